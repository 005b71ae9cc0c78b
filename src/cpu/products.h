// SPDX-License-Identifier: Apache-2.0
// Matrix products by oneDNN: one product, one thread, a fixed shape, fp32 accumulation and result.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "logitless/tensor.h"

namespace logitless::cpu {

// A matrix operand as it lies in memory: row-major with this row stride, or its transpose.
struct Operand {
  bool transposed = false;
  int64_t stride = 0;
  auto operator<=>(const Operand&) const = default;
};

// c[m, n] (row stride c_stride) = or += a[m, k] · b[k, n].
struct ProductShape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Operand a;
  Operand b;
  int64_t c_stride = 0;
  DType dtype = DType::kFloat32;  // of a and b
  bool accumulate = false;
  auto operator<=>(const ProductShape&) const = default;
};

class Product;

class Products {
 public:
  // `widened` (may be null where bf16 products exist) holds `widened_floats` per worker.
  Products(int workers, float* widened, int64_t widened_floats);
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // Called by `worker` only from its own thread.
  void run(const ProductShape& shape, const void* a, const void* b, float* c, int worker);

 private:
  const Product& find(const ProductShape& shape);

  std::mutex mutex_;
  std::map<ProductShape, std::unique_ptr<Product>> cache_;
  std::vector<std::vector<std::byte>> scratch_;  // oneDNN's own packing memory, per worker
  float* widened_;
  int64_t widened_floats_;
};

// Whether this machine multiplies bf16 operands (AVX2 does not).
bool native_bf16();

// The calling thread's products run on itself alone.
void use_one_product_thread();

std::string product_library();

}  // namespace logitless::cpu
