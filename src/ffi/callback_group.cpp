// SPDX-License-Identifier: Apache-2.0
#include "ffi/callback_group.h"

#include <utility>

namespace logitless::ffi_glue {

namespace {

// Memory of the exchange: the callback only borrows it; it is neither allocated nor freed here.
struct BorrowedMemory {
  void* data;
  // NOLINTBEGIN(readability-identifier-naming): the names that TVM FFI calls
  void AllocData(DLTensor* tensor) const { tensor->data = data; }
  void FreeData(DLTensor*) const {}
  // NOLINTEND(readability-identifier-naming)
};

ffi::Tensor borrow(const void* data, int64_t bytes, const Device& device) {
  const DLDevice dl_device =
      device.type == DeviceType::kCpu ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, device.index};
  return ffi::Tensor::FromNDAlloc(BorrowedMemory{const_cast<void*>(data)}, ffi::Shape({bytes}),
                                  DLDataType{kDLUInt, 8, 1}, dl_device);
}

template <typename Exchange>
void translated(const Exchange& exchange) {
  try {
    exchange();
  } catch (const ffi::Error& error) {
    throw Error(kind_of(std::string(error.kind())), std::string(error.message()));
  }
}

}  // namespace

CallbackGroup::CallbackGroup(int rank, int size, ffi::Function all_gather, ffi::Function all_to_all,
                             ffi::Optional<ffi::Function> abort)
    : rank_(rank),
      size_(size),
      all_gather_(std::move(all_gather)),
      all_to_all_(std::move(all_to_all)),
      abort_(std::move(abort)) {}

void CallbackGroup::all_gather(const void* mine, void* all, int64_t bytes, const Device& device,
                               const char* what) {
  translated([&] {
    all_gather_(borrow(mine, bytes, device), borrow(all, bytes * size_, device), ffi::String(what));
  });
}

void CallbackGroup::all_to_all(const void* send, void* receive, int64_t bytes, const Device& device,
                               const char* what) {
  translated([&] {
    all_to_all_(borrow(send, bytes * size_, device), borrow(receive, bytes * size_, device),
                ffi::String(what));
  });
}

void CallbackGroup::abort(const Error& reason) noexcept {
  if (!abort_.has_value()) return;
  try {
    abort_.value()(ffi::String(reason.what()));
  } catch (...) {  // the reason could not be carried: peers time out instead
  }
}

}  // namespace logitless::ffi_glue
