// SPDX-License-Identifier: Apache-2.0
// Hopper's tensor core. The device model's half of ptx/wgmma.h.
#pragma once

#include "cuda/hw/model/memory.h"

namespace hw {

namespace model {

void wgmma_fence(Site site);
void wgmma(float* d, int n, uint64_t a, uint64_t b, bool accumulate, Major major_a, Major major_b,
           Site site);
void wgmma_commit(Site site);
void wgmma_wait(int pending, Site site);

}  // namespace model

/// Before the first wgmma, and whenever registers of an accumulator were touched by other code.
inline void wgmma_fence(Site site = Site::current()) { model::wgmma_fence(site); }
/// D[64 x kN] (+)= A[64 x 16] B[kN x 16]^T, bf16 in, f32 out, by the four warps of a warpgroup.
/// Value v of thread t: (wgmma_row, wgmma_column). D must not be touched before wgmma_wait.
template <int kN, Major kA = Major::kK, Major kB = Major::kK>
inline void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate,
                  Site site = Site::current()) {
  static_assert(kN % 64 == 0 && kN >= 64 && kN <= 256,
                "instructions exist here for N = 64 ... 256");
  model::wgmma(d, kN, a, b, accumulate, kA, kB, site);
}
inline void wgmma_commit(Site site = Site::current()) { model::wgmma_commit(site); }
/// Until at most kPending groups are incomplete. `d`: the accumulator that may be read after it.
template <int kPending, int kValues>
inline void wgmma_wait(float (&)[kValues], Site site = Site::current()) {
  model::wgmma_wait(kPending, site);
}

}  // namespace hw
