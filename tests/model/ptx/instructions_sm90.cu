// SPDX-License-Identifier: Apache-2.0
// Every function that exists on Hopper, to be compiled for sm_90a: see instructions.h.
#include "instructions.h"

namespace logitless::ptx_test {

template <int kN, hw::Major kA = hw::Major::kK, hw::Major kB = hw::Major::kK>
HW_FN void product(const Params& p, uint64_t a, uint64_t b) {
  float d[kN / 2];
  hw::wgmma_fence();
  hw::wgmma<kN, kA, kB>(d, a, b, false);
  hw::wgmma_commit();
  hw::wgmma<kN, kA, kB>(d, a, b, true);
  hw::wgmma_commit();
  hw::wgmma_wait<1>(d);
  hw::wgmma_wait<0>(d);
  float sum = 0;
  HW_UNROLL for (int v = 0; v < kN / 2; ++v) sum += d[v];
  keep(p, sum);
}

/// One shape each: the registers of several would not fit. 384 threads have 168 registers each: 128 * 24 + 256 * 240 is what two products of 64 x 256 leave.
template <int kN, hw::Major kA, hw::Major kB>
struct Products {
  using Params = ptx_test::Params;
  using Smem = ptx_test::Smem;
  static constexpr int kThreads = 384, kCluster = 2;

  static HW_FN void run(const Params& p, Smem& s) {
    if (hw::uniform(hw::warp()) < 4) return load(p, s);
    hw::registers_up<240>();
    const uint64_t a = hw::wgmma_operand(hw::address(s.tile), {16, 1024}), b = a + 512;
    product<kN, kA, kB>(p, a, b);
  }
};

}  // namespace logitless::ptx_test

using enum hw::Major;
template cudaError_t hw::launch<logitless::ptx_test::Products<64, kK, kK>>(
    int, const logitless::ptx_test::Params&, cudaStream_t, bool);
template cudaError_t hw::launch<logitless::ptx_test::Products<128, kMn, kK>>(
    int, const logitless::ptx_test::Params&, cudaStream_t, bool);
template cudaError_t hw::launch<logitless::ptx_test::Products<192, kK, kMn>>(
    int, const logitless::ptx_test::Params&, cudaStream_t, bool);
template cudaError_t hw::launch<logitless::ptx_test::Products<256, kMn, kMn>>(
    int, const logitless::ptx_test::Params&, cudaStream_t, bool);
