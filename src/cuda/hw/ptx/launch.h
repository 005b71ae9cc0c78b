// SPDX-License-Identifier: Apache-2.0
// Launching a kernel type, and what it leaves when it traps.
#pragma once

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
  extern __shared__ __align__(1024) unsigned char shared[];
  K::run(params, *reinterpret_cast<typename K::Smem*>(shared));
#endif
}

/// Host memory that outlives a trap.
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

/// The dynamic shared memory begins above what the system keeps.
inline constexpr uint64_t kSmemOffset = 1024;

/// Once per device and source file, before the first launch there and outside of stream capture:
/// without it a kernel that waits in vain traps and says nothing.
inline cudaError_t watch_launches() {
  LocalFailure* record = ptx::failure_record();
  if (record == nullptr) return cudaErrorMemoryAllocation;
  return cudaMemcpyToSymbol(ptx::local_failure, &record, sizeof record);
}

/// `clusters` clusters of kernel K. Returns what the runtime says of the launch itself.
template <class K>
cudaError_t launch(int clusters, const typename K::Params& params, cudaStream_t stream = nullptr,
                   bool cooperative = false) {
  constexpr int kBytes = static_cast<int>(sizeof(typename K::Smem));
  cudaError_t error =
      cudaFuncSetAttribute(ptx::entry<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
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

/// After a launch of K has failed: who waited for what. Empty if no wait has given up.
template <class K>
std::string launch_failure() {
  const LocalFailure* f = ptx::failure_record();
  if (f == nullptr || f->state != 2) return {};
  const std::string who = "block " + std::to_string(f->block) + " thread " +
                          std::to_string(f->thread) + " waited in vain for ";
  const std::string values = std::to_string(f->expected) + ", it is at " + std::to_string(f->seen);
  if (f->kind != 1) return who + "a flag at " + std::to_string(f->place) + " to reach " + values;
  const uint64_t offset = (f->place & 0xFFFFFF) - kSmemOffset;
  return who + names_of<K>().at(offset) + " to complete the phase with parity " +
         std::to_string(f->expected);
}

}  // namespace hw
