// SPDX-License-Identifier: Apache-2.0
#include "ffi/tensors.h"

namespace logitless::ffi_glue {

namespace {

DType dtype_of_dl(const char* name, const DLDataType& dtype) {
  if (dtype.lanes == 1) {
    if (dtype.code == kDLFloat && dtype.bits == 32) return DType::kFloat32;
    if (dtype.code == kDLBfloat && dtype.bits == 16) return DType::kBFloat16;
    if (dtype.code == kDLInt && dtype.bits == 32) return DType::kInt32;
    if (dtype.code == kDLInt && dtype.bits == 64) return DType::kInt64;
  }
  static constexpr const char* kCodes[] = {"int", "uint", "float", "handle", "bfloat"};
  const std::string code =
      dtype.code < 5 ? kCodes[dtype.code] : "type " + std::to_string(dtype.code) + " of bits ";
  throw Error(ErrorKind::kType, std::string(name) +
                                    ": expected float32, bfloat16, int32 or int64, got " + code +
                                    std::to_string(dtype.bits));
}

}  // namespace

TensorView view_of(const char* name, const ffi::TensorView& tensor) {
  TensorView view;
  view.dtype = dtype_of_dl(name, tensor.dtype());
  const DLDevice device = tensor.device();
  if (device.device_type != kDLCPU && device.device_type != kDLCUDA) {
    throw Error(ErrorKind::kType, std::string(name) +
                                      ": expected a CPU or CUDA tensor, got DLPack device type " +
                                      std::to_string(static_cast<int>(device.device_type)));
  }
  view.device = {device.device_type == kDLCPU ? DeviceType::kCpu : DeviceType::kCuda,
                 device.device_type == kDLCPU ? 0 : device.device_id};
  if (tensor.ndim() < 1 || tensor.ndim() > 2) {
    throw Error(ErrorKind::kValue, std::string(name) + ": expected 1 or 2 dimensions, got " +
                                       std::to_string(tensor.ndim()));
  }
  view.ndim = tensor.ndim();
  view.data = static_cast<std::byte*>(tensor.data_ptr()) + tensor.byte_offset();
  for (int axis = 0; axis < view.ndim; ++axis) {
    view.shape[static_cast<size_t>(axis)] = tensor.size(axis);
    view.strides[static_cast<size_t>(axis)] = tensor.stride(axis);
  }
  return view;
}

TensorView view_of(const char* name, const OptionalTensor& tensor) {
  return tensor.has_value() ? view_of(name, tensor.value()) : TensorView{};
}

DLDataType dl_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {kDLFloat, 32, 1};
    case DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case DType::kInt32:
      return {kDLInt, 32, 1};
    case DType::kInt64:
      return {kDLInt, 64, 1};
  }
  throw Error(ErrorKind::kType, "dtype: unknown");
}

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw Error(ErrorKind::kType, "dtype: expected bfloat16 or float32, got " + name);
}

const char* exception_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kValue:
      return "ValueError";
    case ErrorKind::kType:
      return "TypeError";
    case ErrorKind::kMemory:
      return "MemoryError";
    case ErrorKind::kTimeout:
      return "TimeoutError";
    case ErrorKind::kState:
    case ErrorKind::kUnavailable:
      return "RuntimeError";
  }
  return "RuntimeError";
}

ErrorKind kind_of(const std::string& exception) {
  for (const ErrorKind kind :
       {ErrorKind::kValue, ErrorKind::kType, ErrorKind::kMemory, ErrorKind::kTimeout}) {
    if (exception == exception_of(kind)) return kind;
  }
  return ErrorKind::kState;
}

}  // namespace logitless::ffi_glue
