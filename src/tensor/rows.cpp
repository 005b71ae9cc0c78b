// SPDX-License-Identifier: Apache-2.0
#include "tensor/rows.h"

#include <cstring>

#include "tensor/bf16.h"

namespace logitless {

namespace {

template <typename Element>
Element* place(const TensorView& tensor, int64_t row, int64_t column) {
  return static_cast<Element*>(tensor.data) + row * tensor.strides[0] + column * tensor.strides[1];
}

std::byte* byte_place(const TensorView& tensor, int64_t row, int64_t column) {
  return static_cast<std::byte*>(tensor.data) +
         (row * tensor.strides[0] + column * tensor.strides[1]) * size_of(tensor.dtype);
}

}  // namespace

void write_row(const float* values, int64_t count, const TensorView& to, int64_t row,
               int64_t column) {
  const int64_t step = to.strides[1];
  if (to.dtype == DType::kFloat32) {
    auto* out = place<float>(to, row, column);
    for (int64_t i = 0; i < count; ++i) out[i * step] = values[i];
  } else {
    auto* out = place<uint16_t>(to, row, column);
    for (int64_t i = 0; i < count; ++i) out[i * step] = float_to_bf16(values[i]);
  }
}

void add_row(const float* values, int64_t count, const TensorView& to, int64_t row,
             int64_t column) {
  const int64_t step = to.strides[1];
  if (to.dtype == DType::kFloat32) {
    auto* out = place<float>(to, row, column);
    for (int64_t i = 0; i < count; ++i) out[i * step] += values[i];
  } else {
    auto* out = place<uint16_t>(to, row, column);
    for (int64_t i = 0; i < count; ++i) {
      out[i * step] = float_to_bf16(bf16_to_float(out[i * step]) + values[i]);
    }
  }
}

void add_scaled(float* values, int64_t count, float factor, const TensorView& from, int64_t row,
                int64_t column) {
  const int64_t step = from.strides[1];
  if (from.dtype == DType::kFloat32) {
    const auto* in = place<const float>(from, row, column);
    for (int64_t i = 0; i < count; ++i) values[i] += factor * in[i * step];
  } else {
    const auto* in = place<const uint16_t>(from, row, column);
    for (int64_t i = 0; i < count; ++i) values[i] += factor * bf16_to_float(in[i * step]);
  }
}

int64_t integer_at(const TensorView& vector, int64_t place) {
  const int64_t offset = place * vector.strides[0];
  return vector.dtype == DType::kInt64 ? static_cast<const int64_t*>(vector.data)[offset]
                                       : static_cast<const int32_t*>(vector.data)[offset];
}

void copy_row(const TensorView& from, int64_t row, std::byte* to) {
  const int64_t element = size_of(from.dtype);
  for (int64_t i = 0; i < from.shape[1]; ++i) {
    std::memcpy(to + i * element, byte_place(from, row, i), static_cast<size_t>(element));
  }
}

void copy_row_to(const std::byte* from, const TensorView& to, int64_t row) {
  const int64_t element = size_of(to.dtype);
  for (int64_t i = 0; i < to.shape[1]; ++i) {
    std::memcpy(byte_place(to, row, i), from + i * element, static_cast<size_t>(element));
  }
}

}  // namespace logitless
