// SPDX-License-Identifier: Apache-2.0
// A group whose exchanges the caller's framework makes, by callbacks over uint8 tensors.
#pragma once

#include "ffi/tensors.h"
#include "logitless/group.h"

namespace logitless::ffi_glue {

class CallbackGroup final : public Group {
 public:
  CallbackGroup(int rank, int size, ffi::Function all_gather, ffi::Function all_to_all,
                ffi::Optional<ffi::Function> abort);
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void all_gather(const void* mine, void* all, int64_t bytes, const Device& device,
                  const char* what) override;
  void all_to_all(const void* send, void* receive, int64_t bytes, const Device& device,
                  const char* what) override;
  void abort(const Error& reason) noexcept override;

 private:
  int rank_;
  int size_;
  ffi::Function all_gather_;
  ffi::Function all_to_all_;
  ffi::Optional<ffi::Function> abort_;
};

}  // namespace logitless::ffi_glue
