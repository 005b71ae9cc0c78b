// SPDX-License-Identifier: Apache-2.0
// Between DLPack's tensors and errors and ours.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <string>

#include "logitless/error.h"
#include "logitless/tensor.h"

namespace logitless::ffi_glue {

namespace ffi = tvm::ffi;

using OptionalTensor = ffi::Optional<ffi::TensorView>;

// Absent tensors become absent views. Throws Error(kType) naming the argument.
TensorView view_of(const char* name, const ffi::TensorView& tensor);
TensorView view_of(const char* name, const OptionalTensor& tensor);

DLDataType dl_dtype(DType dtype);
DType dtype_named(const std::string& name);

// ErrorKind and the name of the Python exception.
const char* exception_of(ErrorKind kind);
ErrorKind kind_of(const std::string& exception);

// Runs body(); an Error leaves as the FFI error of its kind, with exactly its sentence.
template <typename Body>
auto guarded(const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw ffi::Error(exception_of(error.kind()), error.what(), std::string());
  } catch (const std::bad_alloc&) {
    throw ffi::Error("MemoryError", "out of memory", std::string());
  }
}

}  // namespace logitless::ffi_glue
