// SPDX-License-Identifier: Apache-2.0
// Tensors that own their memory, for tests: written and read as double, poisoned with NaN on demand.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "logitless/tensor.h"

namespace logitless::testing {

inline float round_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return value;  // NaN
  return std::bit_cast<float>((bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U);
}

class Tensor {
 public:
  Tensor() = default;
  static Tensor vector(DType dtype, int64_t size) {
    return Tensor(vector_view(nullptr, dtype, size), size);
  }
  static Tensor matrix(DType dtype, int64_t rows, int64_t columns) {
    return Tensor(matrix_view(nullptr, dtype, rows, columns), rows * columns);
  }
  // A [rows, columns] view with the given strides into memory that holds nothing else but poison.
  static Tensor strided(DType dtype, int64_t rows, int64_t columns, int64_t row_stride,
                        int64_t column_stride) {
    const int64_t elements = (rows - 1) * row_stride + (columns - 1) * column_stride + 1;
    Tensor result(matrix_view(nullptr, dtype, rows, columns), elements);
    result.view_.strides = {row_stride, column_stride};
    return result;
  }

  TensorView view() const {
    TensorView result = view_;
    result.data = const_cast<std::byte*>(bytes_.data());
    return result;
  }
  int64_t rows() const { return view_.shape[0]; }
  int64_t columns() const { return view_.ndim == 2 ? view_.shape[1] : 1; }
  int64_t size() const { return view_.numel(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  // NaN in either float format, −1 in the integers.
  void poison() { std::fill(bytes_.begin(), bytes_.end(), std::byte{0xff}); }

  void set(int64_t row, int64_t column, double value) {
    std::byte* at = address(row, column);
    const auto narrow = static_cast<float>(value);
    if (view_.dtype == DType::kBFloat16) {
      const auto bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(round_to_bf16(narrow)) >> 16);
      std::memcpy(at, &bits, sizeof bits);
    } else {
      std::memcpy(at, &narrow, sizeof narrow);
    }
  }
  void set(int64_t row, double value) { set(row, 0, value); }
  double get(int64_t row, int64_t column = 0) const {
    const std::byte* at = const_cast<Tensor*>(this)->address(row, column);
    if (view_.dtype == DType::kBFloat16) {
      uint16_t bits = 0;
      std::memcpy(&bits, at, sizeof bits);
      return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  void set_id(int64_t index, int64_t id) {
    if (view_.dtype == DType::kInt32) {
      const auto narrow = static_cast<int32_t>(id);
      std::memcpy(address(index, 0), &narrow, sizeof narrow);
    } else {
      std::memcpy(address(index, 0), &id, sizeof id);
    }
  }
  int64_t id(int64_t index) const {
    const std::byte* at = const_cast<Tensor*>(this)->address(index, 0);
    int32_t narrow = 0;
    int64_t wide = 0;
    if (view_.dtype == DType::kInt32) {
      std::memcpy(&narrow, at, sizeof narrow);
      return narrow;
    }
    std::memcpy(&wide, at, sizeof wide);
    return wide;
  }
  std::vector<double> values() const {
    std::vector<double> result;
    for (int64_t i = 0; i < rows(); ++i) {
      for (int64_t j = 0; j < columns(); ++j) result.push_back(get(i, j));
    }
    return result;
  }

 private:
  Tensor(TensorView view, int64_t elements)
      : view_(view), bytes_(static_cast<size_t>(elements * size_of(view.dtype))) {
    poison();
  }
  std::byte* address(int64_t row, int64_t column) {
    return bytes_.data() +
           (row * view_.strides[0] + column * view_.strides[1]) * size_of(view_.dtype);
  }

  TensorView view_;
  std::vector<std::byte> bytes_;
};

// Same dtype, same shape, and the same bits in every byte.
inline bool same_bits(const Tensor& a, const Tensor& b) { return a.bytes() == b.bytes(); }

}  // namespace logitless::testing
