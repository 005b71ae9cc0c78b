// SPDX-License-Identifier: Apache-2.0
// Every function that exists on Blackwell, to be compiled for sm_100f: see instructions.h.
#include "instructions.h"

namespace logitless::ptx_test {

template <hw::Cache kCache>
HW_FN void pair_loads(const Params& p, Smem& s) {
  const uint32_t at = hw::address(s.tile), leader = hw::leader_address(hw::address(s.arrived[0]));
  hw::tma_load_pair<kCache>(at, p.map, 0, 64, leader);
  hw::tma_load_pair_multicast<kCache>(at, p.map, 0, 64, leader, uint16_t{3});
}

template <int kColumns>
HW_FN void columns_of_tmem(uint32_t base) {
  uint32_t v[kColumns];
  hw::tmem_ld(base, v);
  hw::tmem_wait_ld(v);
  hw::tmem_st(base + kColumns, v);
  hw::tmem_wait_st();
}

template <hw::CtaGroup kGroup>
HW_FN void tensor_core(Smem& s) {
  hw::tmem_alloc<kGroup>(s.word, 512);
  hw::tmem_relinquish<kGroup>();
  const uint32_t base = s.word.load();
  const uint64_t a = hw::umma_operand(hw::address(s.tile), {16, 1024}), b = a + 512;
  const uint32_t instruction = hw::umma_instruction(128, 256, hw::Major::kK, hw::Major::kMn);
  hw::tcgen05_mma<kGroup>(base, a, b, instruction, false);
  hw::tcgen05_mma<kGroup>(base, a, b, instruction, true);
  hw::tcgen05_commit<kGroup>(s.arrived[0]);
  hw::tcgen05_commit_multicast<kGroup>(s.arrived[1], uint16_t{3});
  hw::tcgen05_before_sync();
  hw::tcgen05_after_sync();
  columns_of_tmem<8>(base);
  columns_of_tmem<16>(base);
  columns_of_tmem<32>(base);
  columns_of_tmem<64>(base);
  hw::tmem_dealloc<kGroup>(base, 512);
}

/// A kernel takes one CTA group for all it does.
template <hw::CtaGroup kGroup>
struct TensorCore {
  using Params = ptx_test::Params;
  using Smem = ptx_test::Smem;
  static constexpr int kThreads = 384, kCluster = 2;

  static HW_FN void run(const Params& p, Smem& s) {
    if (hw::uniform(hw::warp()) < 4) return load(p, s);
    hw::registers_up<240>();
    if constexpr (kGroup == hw::CtaGroup::kTwo) {
      pair_loads<hw::Cache::kNormal>(p, s);
      pair_loads<hw::Cache::kEvictFirst>(p, s);
      pair_loads<hw::Cache::kEvictLast>(p, s);
    }
    tensor_core<kGroup>(s);
  }
};

}  // namespace logitless::ptx_test

template cudaError_t hw::launch<logitless::ptx_test::TensorCore<hw::CtaGroup::kOne>>(
    int, const logitless::ptx_test::Params&, cudaStream_t, bool);
template cudaError_t hw::launch<logitless::ptx_test::TensorCore<hw::CtaGroup::kTwo>>(
    int, const logitless::ptx_test::Params&, cudaStream_t, bool);
