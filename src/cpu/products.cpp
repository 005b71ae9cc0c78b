// SPDX-License-Identifier: Apache-2.0
#include "cpu/products.h"

#include <dnnl.hpp>
#include <unordered_map>

#include "cpu/lanes.h"
#include "logitless/error.h"
#include "tensor/bf16.h"

#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP && defined(_OPENMP)
// Of the OpenMP runtime that oneDNN runs on; its header is in no place that all compilers look.
extern "C" void omp_set_num_threads(int threads);
#endif

namespace logitless::cpu {

namespace {

using dnnl::memory;

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

memory::data_type data_type(DType dtype) {
  return dtype == DType::kBFloat16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc describe(int64_t rows, int64_t columns, DType dtype, const Operand& operand) {
  const memory::dims strides =
      operand.transposed ? memory::dims{1, operand.stride} : memory::dims{operand.stride, 1};
  return {{rows, columns}, data_type(dtype), strides};
}

dnnl::matmul::primitive_desc describe_product(const ProductShape& shape) {
  const memory::desc a = describe(shape.m, shape.k, shape.dtype, shape.a);
  const memory::desc b = describe(shape.k, shape.n, shape.dtype, shape.b);
  const memory::desc c = describe(shape.m, shape.n, DType::kFloat32, {false, shape.c_stride});
  dnnl::primitive_attr attributes;
  // The caller brings the scratchpad: the library's own is shared by all threads of a primitive.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.accumulate) {
    dnnl::post_ops add;
    add.append_sum(1.0F);
    attributes.set_post_ops(add);
  }
#if DNNL_VERSION_MAJOR >= 3
  return {engine(), a, b, c, attributes};
#else
  return {dnnl::matmul::desc(a, b, c), attributes, engine()};
#endif
}

// Copies a bf16 operand to fp32 without its gaps; the orientation stays.
LOGITLESS_CLONES
Operand widen(const void* from, int64_t rows, int64_t columns, const Operand& operand, float* to) {
  const auto* source = static_cast<const uint16_t*>(from);
  const int64_t lines = operand.transposed ? columns : rows;
  const int64_t length = operand.transposed ? rows : columns;
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t i = 0; i < length; ++i) {
      to[line * length + i] = bf16_to_float(source[line * operand.stride + i]);
    }
  }
  return {operand.transposed, length};
}

}  // namespace

class Product {
 public:
  explicit Product(const ProductShape& shape)
      : description_(describe_product(shape)), primitive_(description_) {}

  void run(const void* a, const void* b, float* c, std::vector<std::byte>& scratch) const {
    const size_t wanted = description_.scratchpad_desc().get_size();
    if (scratch.size() < wanted) scratch.resize(wanted);
    dnnl::stream stream(engine());
    primitive_.execute(
        stream,
        {{DNNL_ARG_SRC, {description_.src_desc(), engine(), const_cast<void*>(a)}},
         {DNNL_ARG_WEIGHTS, {description_.weights_desc(), engine(), const_cast<void*>(b)}},
         {DNNL_ARG_DST, {description_.dst_desc(), engine(), c}},
         {DNNL_ARG_SCRATCHPAD, {description_.scratchpad_desc(), engine(), scratch.data()}}});
    stream.wait();
  }

 private:
  dnnl::matmul::primitive_desc description_;
  dnnl::matmul primitive_;
};

Products::Products(int workers, float* widened, int64_t widened_floats)
    : scratch_(static_cast<size_t>(workers)), widened_(widened), widened_floats_(widened_floats) {}

Products::~Products() = default;

const Product& Products::find(const ProductShape& shape) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Product>& product = cache_[shape];
  if (!product) product = std::make_unique<Product>(shape);
  return *product;
}

void Products::run(const ProductShape& shape, const void* a, const void* b, float* c, int worker) {
  std::vector<std::byte>& scratch = scratch_[static_cast<size_t>(worker)];
  if (shape.dtype == DType::kFloat32 || native_bf16()) {
    find(shape).run(a, b, c, scratch);
    return;
  }
  if (shape.k * (shape.m + shape.n) > widened_floats_) {
    throw Error(ErrorKind::kState, "products: the plan widens " + std::to_string(widened_floats_) +
                                       " values per worker, this product needs " +
                                       std::to_string(shape.k * (shape.m + shape.n)));
  }
  float* wide_a = widened_ + worker * widened_floats_;
  float* wide_b = wide_a + shape.m * shape.k;
  ProductShape wide = shape;
  wide.dtype = DType::kFloat32;
  wide.a = widen(a, shape.m, shape.k, shape.a, wide_a);
  wide.b = widen(b, shape.k, shape.n, shape.b, wide_b);
  find(wide).run(wide_a, wide_b, c, scratch);
}

bool native_bf16() {
  static const bool native = [] {
    try {
      const Product probe({.m = 16,
                           .n = 16,
                           .k = 16,
                           .a = {false, 16},
                           .b = {false, 16},
                           .c_stride = 16,
                           .dtype = DType::kBFloat16});
      return true;
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return native;
}

void use_one_product_thread() {
#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP && defined(_OPENMP)
  omp_set_num_threads(1);
#endif
}

std::string product_library() {
  const dnnl_version_t* version = dnnl::version();
  return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch);
}

}  // namespace logitless::cpu
