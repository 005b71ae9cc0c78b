// SPDX-License-Identifier: Apache-2.0
// The one error type of the library. Every error is one sentence that carries the values it is about:
//   tokens: expected x.shape[0] == target.shape[0], got 4096 and 4095
#pragma once

#include <stdexcept>
#include <string>

namespace logitless {

// What a caller can do about an error, and the exception it becomes in Python.
enum class ErrorKind {
  kValue,        // ValueError: a value or a shape is wrong
  kType,         // TypeError: a dtype or a device is wrong
  kState,        // RuntimeError: the call does not fit what was configured or saved before
  kMemory,       // MemoryError: the bytes wanted could not be had
  kTimeout,      // TimeoutError: a rank did not come in time
  kUnavailable,  // RuntimeError: this build or machine cannot do it
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& sentence) : std::runtime_error(sentence), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace logitless
