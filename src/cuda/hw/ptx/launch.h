// SPDX-License-Identifier: Apache-2.0
// Launching a kernel type, and what it leaves when it traps.
#pragma once

#include <atomic>
#include <cstdio>
#include <new>
#include <string>

#include "cuda/hw/names.h"
#include "cuda/hw/ptx/copy.h"

namespace hw {

namespace ptx {

/// Every kernel is this one function.
template <class K>
__global__ void __cluster_dims__(K::kCluster, 1, 1) __launch_bounds__(K::kThreads, 1)
    entry(const __grid_constant__ typename K::Params params) {
#if defined(__CUDA_ARCH__)
  K::run(params, *reinterpret_cast<typename K::Smem*>(shared_memory()));
#endif
}

/// Host memory that outlives a trap, one record for the process: after a trap nothing runs any more. A
/// reset of the device frees it.
inline LocalFailure* failure_record() {
  static LocalFailure* record = [] {
    void* memory = nullptr;
    const auto flags = cudaHostAllocPortable | cudaHostAllocMapped;
    if (cudaHostAlloc(&memory, sizeof(LocalFailure), flags) != cudaSuccess)
      return static_cast<LocalFailure*>(nullptr);
    return new (memory) LocalFailure{};
  }();
  return record;
}

}  // namespace ptx

// The next two are static: each source file has its own kernels and its own ptx::local_failure.

/// Tells the kernels of this source file, on the current device, where to leave a record. launch does it
/// the first time, except while its stream is being captured: then call this before the capture.
[[maybe_unused]] static cudaError_t watch_launches() {
  LocalFailure* record = ptx::failure_record();
  if (record == nullptr) return cudaErrorMemoryAllocation;
  return cudaMemcpyToSymbol(ptx::local_failure, &record, sizeof record);
}

namespace ptx {

[[maybe_unused]] static cudaError_t watch_first_launch(cudaStream_t stream) {
  static std::atomic<uint64_t> watched{0};  // bit d: device d
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << device % 64;
  if ((watched.load() & bit) != 0) return cudaSuccess;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess || capture != cudaStreamCaptureStatusNone) return error;
  error = watch_launches();
  if (error == cudaSuccess) watched.fetch_or(bit);
  return error;
}

}  // namespace ptx

/// `clusters` clusters of kernel K. Returns what the runtime says of the launch itself.
template <class K>
cudaError_t launch(int clusters, const typename K::Params& params, cudaStream_t stream = nullptr,
                   bool cooperative = false) {
  constexpr int kBytes = static_cast<int>(sizeof(typename K::Smem));
  static_assert(alignof(typename K::Smem) <= 1024, "shared memory is aligned to 1024 bytes");
  cudaError_t error = ptx::watch_first_launch(stream);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(ptx::entry<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters) * K::kCluster);
  config.blockDim = dim3(K::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cooperative ? 1 : 0;
  return cudaLaunchKernelEx(&config, ptx::entry<K>, params);
}

namespace ptx {

inline std::string sentence(const LocalFailure& f, int cluster, const Names& names) {
  const auto text = [](uint64_t value) { return std::to_string(value); };
  const auto size = static_cast<uint32_t>(cluster);
  const std::string who = "block " + text(f.block) + " (cluster " + text(f.block / size) + " cta " +
                          text(f.block % size) + ") warp " + text(f.thread / 32) + " thread " +
                          text(f.thread) + " waited " + text(kLocalPatience / 1'000'000'000) +
                          " s for ";
  if (f.kind == 1) {
    return who + names.at(f.place) + ": expected the phase with parity " + text(f.expected) +
           " to complete, the last that did has parity " + text(f.seen);
  }
  char place[24];
  std::snprintf(place, sizeof place, "0x%llx", static_cast<unsigned long long>(f.place));
  return who + "the flag at " + place + ": expected " + text(f.expected) + ", seen " + text(f.seen);
}

}  // namespace ptx

/// After a launch of K has failed, and before the device is reset: who waited for what. Empty if no
/// local wait has given up. K must be the kernel that failed: its names are used.
template <class K>
std::string launch_failure() {
  const LocalFailure* f = ptx::failure_record();
  if (f == nullptr || *const_cast<const volatile uint32_t*>(&f->state) != 2) return {};
  return ptx::sentence(*f, K::kCluster, names_of<K>());
}

}  // namespace hw
