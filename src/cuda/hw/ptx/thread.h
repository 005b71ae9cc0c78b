// SPDX-License-Identifier: Apache-2.0
// Who a thread is, and how threads meet (PTX ISA, "Special registers", "Parallel synchronization").
// What the functions mean is said in model/thread.h.
#pragma once

#include <cuda_runtime.h>

#include "cuda/hw/types.h"

namespace hw {

HW_FN int thread() { return static_cast<int>(threadIdx.x); }
HW_FN int warp() { return static_cast<int>(threadIdx.x / 32); }
HW_FN int lane() { return static_cast<int>(threadIdx.x % 32); }
HW_FN int cta_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return static_cast<int>(r);
}
HW_FN int cluster_id() {
  uint32_t r;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(r));
  return static_cast<int>(r);
}
HW_FN int cluster_count() {
  uint32_t r;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(r));
  return static_cast<int>(r);
}

HW_FN void cta_sync() { __syncthreads(); }
HW_FN void warp_sync() { __syncwarp(); }
HW_FN void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
HW_FN void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
HW_FN void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
HW_FN void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
HW_FN void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
HW_FN bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}

HW_FN uint32_t shfl(uint32_t value, int lane) { return __shfl_sync(~0U, value, lane); }
HW_FN int uniform(int value) { return __shfl_sync(~0U, value, 0); }
HW_FN uint32_t shfl_xor(uint32_t value, int mask) { return __shfl_xor_sync(~0U, value, mask); }
HW_FN float shfl_xor(float value, int mask) { return __shfl_xor_sync(~0U, value, mask); }
HW_FN uint32_t ballot(bool predicate) { return __ballot_sync(~0U, predicate); }

template <int kRegisters>
HW_FN void registers_down() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
HW_FN void registers_up() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
HW_FN void pause() { __nanosleep(1000); }

}  // namespace hw
