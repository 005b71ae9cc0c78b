// SPDX-License-Identifier: Apache-2.0
// Every function of the instruction layer that both chips have, called once or more. Only to be compiled:
// test_mirror.py looks at the PTX that each call became. Nothing here makes sense as a program.
#pragma once

#include "cuda/hw/hw.h"

namespace logitless::ptx_test {

struct Params {
  hw::TensorMap map;
  hw::Global<uint32_t> words;
  hw::Global<const uint32_t> inputs;
  hw::Global<int32_t> counts;
  hw::Global<uint64_t> longs;
  hw::Global<float> floats;
  hw::Global<hw::Bf16> halves;
  hw::Global<hw::Vec2> pairs;
  hw::Global<hw::Vec4> quads;
  hw::Global<hw::Float4> float_quads;
  hw::Multicast<float> all_floats;
  hw::Multicast<hw::Bf16> all_halves;
  hw::Multicast<uint32_t> all_words;
  hw::Abort abort;
};
struct Smem {
  hw::Buffer<65536> tile;
  hw::Barrier arrived[2];
  hw::Cell<uint32_t> word;
  hw::Cell<uint64_t> wide;
};
inline void describe_smem(hw::Names& names) {
  names.add("tile", &Smem::tile);
  names.add("arrived", &Smem::arrived);
  names.add("word", &Smem::word);
  names.add("wide", &Smem::wide);
}

/// A use, so that nothing is optimised away.
HW_FN void keep(const Params& p, uint32_t value) {
  hw::st<hw::Order::kRelaxed, hw::Scope::kCta>(p.words, value);
}
HW_FN void keep(const Params& p, float value) { keep(p, hw::as_bits(value)); }

HW_FN void thread_functions(const Params& p) {
  keep(p, static_cast<uint32_t>(hw::thread() + hw::warp() * hw::lane()));
  keep(p, static_cast<uint32_t>(hw::cta_rank() + hw::cluster_id() * hw::cluster_count()));
  hw::cta_sync();
  hw::warp_sync();
  hw::named_sync(1, 128);
  hw::named_arrive(2, 128);
  hw::cluster_arrive();
  hw::cluster_wait();
  hw::cluster_arrive_relaxed();
  hw::cluster_wait();
  keep(p, hw::elect_one() ? 1U : 0U);
  const uint32_t word = hw::ld(p.inputs);
  const float number = hw::ld(p.floats);
  keep(p, hw::shfl(word, 3));
  keep(p, static_cast<uint32_t>(hw::uniform(static_cast<int>(word))));
  keep(p, hw::shfl_xor(word, 1));
  keep(p, hw::shfl_xor(number, 2));
  keep(p, hw::ballot(word > 7));
  hw::pause();
}

HW_FN void barrier_functions(const Params& p, Smem& s) {
  const uint32_t at = hw::address(s.arrived[0]);
  hw::barrier_init(s.arrived[0], 1);
  hw::fence_barrier_init();
  hw::arrive(s.arrived[0]);
  hw::arrive_at(at);
  keep(p, hw::leader_address(hw::ld(p.inputs)));
  hw::arrive_at<hw::Scope::kCluster>(hw::cta_address(at, 1));
  hw::arrive_expect(s.arrived[1], 1024);
  hw::arrive_expect_at(at, 512);
  hw::expect(s.arrived[1], 256);
  hw::wait(s.arrived[0], 0);
  hw::wait<hw::Scope::kCluster>(s.arrived[1], 0);
  keep(p, hw::test(s.arrived[0], 1) ? 1U : 0U);
  keep(p, hw::test<hw::Scope::kCluster>(s.arrived[1], 1) ? 1U : 0U);
  hw::store_async(at, 7, at);
}

template <hw::Scope kScope, class T>
HW_FN void strong_accesses(const Params& p, hw::Global<T> place) {
  using enum hw::Order;
  T sum = hw::ld<kRelaxed, kScope>(place) + hw::ld<kAcquire, kScope>(place);
  hw::st<kRelaxed, kScope>(place, 1);
  hw::st<kRelease, kScope>(place, 2);
  sum += hw::add<kRelaxed, kScope>(place, 3) + hw::add<kAcquire, kScope>(place, 4);
  sum += hw::add<kRelease, kScope>(place, 5) + hw::add<kAcqRel, kScope>(place, 6);
  keep(p, static_cast<uint32_t>(sum));
}
template <hw::Scope kScope>
HW_FN void scoped_functions(const Params& p) {
  strong_accesses<kScope>(p, p.words);
  strong_accesses<kScope>(p, p.counts);
  strong_accesses<kScope>(p, p.longs);
  hw::fence<kScope>();
  hw::wait_flag<hw::Order::kRelaxed, kScope>(p.words, 1);
  hw::wait_flag<hw::Order::kAcquire, kScope>(p.words, 2);
}
HW_FN void memory_functions(const Params& p, Smem& s) {
  const uint32_t at = hw::address(s.tile);
  hw::st_shared(at, 1U);
  hw::st_shared(at, 1.0F);
  hw::st_shared(at, hw::Vec2{1, 2});
  hw::st_shared(at, hw::Vec4{1, 2, 3, 4});
  keep(p, hw::ld_shared<uint32_t>(at));
  keep(p, hw::ld_shared<float>(at));
  keep(p, hw::ld_shared<hw::Vec2>(at).y);
  keep(p, hw::ld_shared<hw::Vec4>(at).w);
  hw::store_matrix(at, 1, 2, 3, 4);
  keep(p, s.word.load() + hw::address(s.word));
  s.word.store(1);
  keep(p, static_cast<uint32_t>(s.wide.load()));
  s.wide.store(1);
  hw::fence_proxy_async();
  hw::fence_proxy_async_global();
  // Loads whose words are all used, and stores of something else: neither can be part of a copy.
  const hw::Vec2 pair = hw::ld(p.pairs);
  const hw::Vec4 quad = hw::ld(p.quads);
  const hw::Float4 floats = hw::ld(p.float_quads);
  keep(p, pair.x + pair.y + quad.x + quad.y + quad.z + quad.w);
  keep(p, floats.x + floats.y + floats.z + floats.w);
  keep(p, uint32_t{hw::ld(p.halves).bits});
  hw::st(p.halves, hw::Bf16{1});
  hw::st(p.floats, 1.0F);
  hw::st(p.pairs, hw::Vec2{1, 2});
  hw::st(p.quads, hw::Vec4{1, 2, 3, 4});
  hw::st(p.float_quads, hw::Float4{1, 2, 3, 4});
  scoped_functions<hw::Scope::kCta>(p);
  scoped_functions<hw::Scope::kCluster>(p);
  scoped_functions<hw::Scope::kGpu>(p);
  scoped_functions<hw::Scope::kSys>(p);
}

template <hw::Cache kCache>
HW_FN void cached_copies(const Params& p, Smem& s) {
  const uint32_t at = hw::address(s.tile), barrier = hw::address(s.arrived[0]);
  hw::tma_load<kCache>(at, p.map, 0, 64, barrier);
  hw::tma_load_multicast<kCache>(at, p.map, 0, 64, barrier, uint16_t{3});
  hw::tma_store<kCache>(p.map, 0, 64, at);
}
HW_FN void copy_functions(const Params& p, Smem& s) {
  const uint32_t at = hw::address(s.tile), barrier = hw::address(s.arrived[0]);
  hw::prefetch(p.map);
  cached_copies<hw::Cache::kNormal>(p, s);
  cached_copies<hw::Cache::kEvictFirst>(p, s);
  cached_copies<hw::Cache::kEvictLast>(p, s);
  hw::tma_reduce_add(p.map, 0, 64, at);
  hw::bulk_load(at, p.inputs, 1024, barrier);
  hw::bulk_store(p.words, at, 1024);
  hw::bulk_reduce_add(p.floats, at, 1024);
  hw::bulk_commit();
  hw::bulk_wait_read<1>();
  hw::bulk_wait<0>();
}

HW_FN void number_functions(const Params& p) {
  const float a = hw::ld(p.floats), b = hw::ld(p.floats + 1);
  keep(p, hw::exp2(a));
  keep(p, hw::log2(a));
  keep(p, hw::fma(a, b, a));
  keep(p, hw::ceil(a));
  keep(p, hw::max(a, b));
  keep(p, hw::min(a, b));
  keep(p, hw::bf16_bits(a));
  keep(p, hw::bf16_value(hw::as_bits(b)));
  keep(p, hw::pack_bf16(a, b) + hw::as_bits(hw::as_float(hw::as_bits(a) + 1)));
}
/// The functions on bits are for hosts too.
inline uint32_t numbers_of_a_host(float value) {
  const uint32_t bits = hw::pack_bf16(value, hw::bf16_value(hw::bf16_bits(value)));
  return hw::as_bits(hw::as_float(bits));
}

HW_FN void peer_functions(const Params& p) {
  using enum hw::Order;
  hw::multimem_store(p.all_floats, hw::Vec4{1, 2, 3, 4});
  keep(p, hw::multimem_load_add(p.all_floats).x);
  keep(p, hw::multimem_load_add(p.all_halves).x);
  hw::multimem_add<kRelaxed, hw::Scope::kGpu>(p.all_words, 1);
  hw::multimem_add<kRelaxed, hw::Scope::kSys>(p.all_words, 2);
  hw::multimem_add<kRelease, hw::Scope::kGpu>(p.all_words, 3);
  hw::multimem_add<kRelease, hw::Scope::kSys>(p.all_words, 4);
  hw::fence_proxy_alias();
  const hw::PeerWait who{0, 1, 2};
  keep(p, hw::wait_peer(p.words, 5, p.abort, who) ? 1U : 0U);
  keep(p, hw::wait_peer<hw::Scope::kGpu>(p.longs, 6, p.abort, who) ? 1U : 0U);
#if defined(LOGITLESS_NVSHMEM)
  hw::put_signal(p.floats, p.floats, 1024, p.longs, 1, 1);
#endif
}

/// A loader as kernels have it: 24 registers, and every kind of wait in a loop. It must not spill.
HW_FN void load(const Params& p, Smem& s) {
  hw::registers_down<24>();
  uint32_t phase = 0;
  HW_LOOP for (uint32_t i = 0; i < hw::ld(p.inputs); ++i) {
    hw::wait_flag<hw::Order::kAcquire, hw::Scope::kGpu>(p.words + i, i);
    hw::wait(s.arrived[0], phase);
    hw::arrive_expect(s.arrived[1], hw::Buffer<65536>::kSize);
    hw::tma_load(hw::address(s.tile), p.map, 0, static_cast<int>(i), hw::address(s.arrived[1]));
    phase ^= 1;
  }
}

struct Instructions {
  using Params = ptx_test::Params;
  using Smem = ptx_test::Smem;
  static constexpr int kThreads = 384, kCluster = 2;

  static HW_FN void run(const Params& p, Smem& s) {
    thread_functions(p);
    barrier_functions(p, s);
    memory_functions(p, s);
    copy_functions(p, s);
    number_functions(p);
    peer_functions(p);
  }
  static void describe(hw::Names& names) { describe_smem(names); }
};

}  // namespace logitless::ptx_test

template cudaError_t hw::launch<logitless::ptx_test::Instructions>(
    int, const logitless::ptx_test::Params&, cudaStream_t, bool);
template std::string hw::launch_failure<logitless::ptx_test::Instructions>();
