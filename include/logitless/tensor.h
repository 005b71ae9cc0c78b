// SPDX-License-Identifier: Apache-2.0
// Views of memory that somebody else owns. The library never keeps one past the call it was given to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace logitless {

enum class DType : int32_t { kFloat32, kBFloat16, kInt32, kInt64 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
      return 2;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

constexpr const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "unknown";
}

enum class DeviceType : int32_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

// One or two dimensions; strides count elements. `data == nullptr` with `ndim == 0` means "absent".
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device = {};
  int32_t ndim = 0;
  std::array<int64_t, 2> shape = {0, 0};
  std::array<int64_t, 2> strides = {0, 0};

  bool present() const { return ndim != 0; }
  int64_t numel() const { return ndim == 0 ? 0 : (ndim == 1 ? shape[0] : shape[0] * shape[1]); }
};

// A contiguous [size] vector or row-major [rows, columns] matrix in host memory.
template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kFloat32;
}
template <>
constexpr DType dtype_of<int32_t>() {
  return DType::kInt32;
}
template <>
constexpr DType dtype_of<int64_t>() {
  return DType::kInt64;
}

inline TensorView vector_view(void* data, DType dtype, int64_t size) {
  return {data, dtype, {}, 1, {size, 0}, {1, 0}};
}

inline TensorView matrix_view(void* data, DType dtype, int64_t rows, int64_t columns) {
  return {data, dtype, {}, 2, {rows, columns}, {columns, 1}};
}

template <typename T>
TensorView vector_view(T* data, int64_t size) {
  return vector_view(data, dtype_of<T>(), size);
}

template <typename T>
TensorView matrix_view(T* data, int64_t rows, int64_t columns) {
  return matrix_view(data, dtype_of<T>(), rows, columns);
}

}  // namespace logitless
