// SPDX-License-Identifier: Apache-2.0
// Blackwell: D = C + A B^T in f32, one accumulator at a time, for every shape of accumulator that a
// tcgen05.mma can have: one CTA with 64 or 128 rows, a pair with 128 or 256 (hw::tmem_place).
//
//   load warp --inputs--> mma warp --multiplied--> epilogue warps --> D
//                            ^------preloaded------ epilogue warps <-- C, or D of the split before
//
// The k of a tile is divided into splits that follow each other, each in another cluster: a split loads
// what the one before it has stored into its accumulator. So the sum is in the order of k, and the same
// in every run. Clusters wait for each other: all of them must be resident.
#pragma once

#include <bit>

#include "cuda/hw/hw.h"
#include "cuda/tile/ring.h"

namespace logitless::model_test {

template <hw::CtaGroup kGroup, int kM, int kN>
struct SingleSm100 {
  static constexpr bool kPair = kGroup == hw::CtaGroup::kTwo;
  static constexpr int kCluster = kPair ? 2 : 1;
  static constexpr int kK = 64, kStages = 2, kEpilogueWarps = 4;
  static constexpr int kThreads = 192;
  static constexpr int kRowsA = kM / kCluster, kRowsB = kN / kCluster;  // of one CTA
  static constexpr uint32_t kStageBytes = (kM + kN) * kK * 2;
  /// Columns of TMEM that the accumulator takes, and how many an instruction loads.
  static constexpr int kColumns = kPair && kM == 128 ? kN / 2 : kN;
  static constexpr int kChunk = kColumns % 64 == 0 ? 64 : kColumns % 32 == 0 ? 32 : 16;
  static constexpr uint32_t kTmemColumns = std::bit_ceil(uint32_t{kColumns});
  static_assert(kPair ? kM == 128 || kM == 256 : kM == 64 || kM == 128,
                "accumulators have 64 or 128 rows per CTA");
  static_assert(kColumns % kChunk == 0 && kN <= 256 && kTmemColumns >= 32);

  struct Params {
    hw::TensorMap a, b;             // [m, k], boxes of kRowsA x 64; [n, k], boxes of kRowsB x 64
    hw::Global<float> c, d;         // [m, n]
    hw::Global<uint32_t> finished;  // [tiles, CTAs, warps]: splits that are in d, of all epochs
    hw::Global<uint32_t> epoch;     // of this launch, from 1
    int m, n, k, splits;            // splits: at most one per 64 of k
  };

  /// The epilogue comes first: warp w reaches the TMEM lanes 32 (w % 4) ... 32 (w % 4) + 31.
  enum Role { kLoadWarp = kEpilogueWarps, kMmaWarp };

  struct Smem {
    hw::Buffer<kRowsA * kK * 2> a[kStages];
    hw::Buffer<kRowsB * kK * 2> b[kStages];
    tile::Ring<kStages> inputs;
    hw::Barrier preloaded, multiplied;  // of the accumulator, which goes back and forth
    hw::Cell<uint32_t> tmem;
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "a CTA has 227 KB of shared memory");
  static void describe(hw::Names& names) {
    names.add("a", &Smem::a);
    names.add("b", &Smem::b);
    tile::Ring<kStages>::describe(names, "inputs.arrived", "inputs.finished", &Smem::inputs);
    names.add("preloaded", &Smem::preloaded);
    names.add("multiplied", &Smem::multiplied);
    names.add("tmem", &Smem::tmem);
  }

  /// What clusters take one at a time: a split of a tile. The first splits of all tiles come first, so
  /// that nobody waits for a split that is not yet under way.
  struct Work {
    int m_tiles, tiles, k_blocks, splits;

    HW_FN explicit Work(const Params& p)
        : m_tiles((p.m + kM - 1) / kM),
          tiles(m_tiles * ((p.n + kN - 1) / kN)),
          k_blocks((p.k + kK - 1) / kK),
          splits(p.splits) {}
    HW_FN int count() const { return tiles * splits; }
    HW_FN int split(int unit) const { return unit / tiles; }
    HW_FN int first_row(int unit) const { return unit % tiles % m_tiles * kM; }
    HW_FN int first_column(int unit) const { return unit % tiles / m_tiles * kN; }
    HW_FN int first_k(int unit) const { return k_blocks * split(unit) / splits; }
    HW_FN int end_k(int unit) const { return k_blocks * (split(unit) + 1) / splits; }
  };

  /// The part of a tile that one TMEM lane holds: kColumns elements of a row. Row -1: none.
  struct Place {
    int row, first_column;
  };
  static HW_BOTH Place place(int cta, int lane) {
    if (kPair && kM == 128) return {cta * 64 + lane % 64, lane / 64 * kColumns};
    if (kM == 64) return {lane % 32 < 16 ? lane / 32 * 16 + lane % 16 : -1, 0};
    return {cta * 128 + lane, 0};
  }
  /// That place is the inverse of hw::tmem_place.
  static HW_BOTH bool inverse() {
    for (int m = 0; m < kM; ++m) {
      for (int n = 0; n < kN; n += kN / 4) {
        const hw::TmemPlace there = hw::tmem_place(kGroup, kM, kN, m, n);
        const Place back = place(there.cta, there.lane);
        if (back.row != m || back.first_column + there.column != n) return false;
      }
    }
    return true;
  }

  static HW_FN void load(const Params& p, Smem& s) {
    const Work work(p);
    const int cta = hw::cta_rank();
    auto in = tile::RingState<kStages>::producer();
    for (int unit = hw::cluster_id(); unit < work.count(); unit += hw::cluster_count()) {
      const int row = work.first_row(unit) + cta * kRowsA;
      const int column = work.first_column(unit) + cta * kRowsB;
      for (int k = work.first_k(unit); k < work.end_k(unit); ++k, in.advance()) {
        hw::wait(s.inputs.finished[in.stage], in.phase);
        if (cta == 0) hw::arrive_expect(s.inputs.arrived[in.stage], kStageBytes);
        load_rows(s.a[in.stage], p.a, k * kK, row, s.inputs.arrived[in.stage]);
        load_rows(s.b[in.stage], p.b, k * kK, column, s.inputs.arrived[in.stage]);
      }
    }
    drain(s, in);
  }
  /// Nobody waits for the commits of the last rounds, but they must arrive before this CTA leaves.
  static HW_FN void drain(Smem& s, tile::RingState<kStages> slot) {
    for (int i = 0; i < kStages; ++i, slot.advance()) {
      hw::wait(s.inputs.finished[slot.stage], slot.phase);
    }
  }
  template <int kBytes>
  static HW_FN void load_rows(const hw::Buffer<kBytes>& to, const hw::TensorMap& map, int k,
                              int row, const hw::Barrier& arrived) {
    if constexpr (kPair) {
      hw::tma_load_pair(hw::address(to), map, k, row, hw::leader_address(hw::address(arrived)));
    } else {
      hw::tma_load(hw::address(to), map, k, row, hw::address(arrived));
    }
  }

  /// One thread, of the leader if there is a pair.
  static HW_FN void mma(const Params& p, Smem& s) {
    constexpr uint32_t kInstruction = hw::umma_instruction(kM, kN, hw::Major::kK, hw::Major::kK);
    constexpr hw::OperandLayout kRows{.leading_bytes = 16, .stride_bytes = 1024};
    const Work work(p);
    const uint32_t tmem = s.tmem.load();
    auto in = tile::RingState<kStages>::consumer();
    auto acc = tile::RingState<1>::consumer();
    for (int unit = hw::cluster_id(); unit < work.count(); unit += hw::cluster_count()) {
      hw::wait(s.preloaded, acc.phase);  // the fence below orders this wait as well
      for (int k = work.first_k(unit); k < work.end_k(unit); ++k, in.advance()) {
        hw::wait(s.inputs.arrived[in.stage], in.phase);
        hw::tcgen05_after_sync();
        const uint64_t a = hw::umma_operand(hw::address(s.a[in.stage]), kRows);
        const uint64_t b = hw::umma_operand(hw::address(s.b[in.stage]), kRows);
        HW_UNROLL for (int step = 0; step < kK / 16; ++step) {
          hw::tcgen05_mma<kGroup>(tmem, hw::operand_advance(a, step * 32),
                                  hw::operand_advance(b, step * 32), kInstruction,
                                  true /* D starts as C */);
        }
        commit(s.inputs.finished[in.stage]);
      }
      commit(s.multiplied);
      acc.advance();
    }
  }
  static HW_FN void commit(hw::Barrier& barrier) {
    if constexpr (kPair) {
      hw::tcgen05_commit_multicast<kGroup>(barrier, 0b11);
    } else {
      hw::tcgen05_commit<kGroup>(barrier);
    }
  }

  /// What a thread of the epilogue has of a tile: kColumns elements of a row.
  struct Part {
    int64_t first;  // index in c and d
    int columns;    // from there to the end of the row: more than kColumns, fewer, or none

    HW_FN Part(const Params& p, const Work& work, int unit) {
      const Place mine = place(hw::cta_rank(), hw::thread());
      const int row = work.first_row(unit) + mine.row;
      const int column = work.first_column(unit) + mine.first_column;
      first = int64_t{row} * p.n + column;
      columns = mine.row >= 0 && row < p.m ? p.n - column : 0;
    }
  };

  static HW_FN void epilogue(const Params& p, Smem& s) {
    const Work work(p);
    const uint32_t tmem = hw::tmem_address(s.tmem.load(), hw::warp() * 32, 0);
    const auto before = (hw::ld(p.epoch) - 1) * static_cast<uint32_t>(work.splits);
    auto acc = tile::RingState<1>::consumer();
    for (int unit = hw::cluster_id(); unit < work.count(); unit += hw::cluster_count()) {
      const Part part(p, work, unit);
      const int split = work.split(unit);
      const auto finished =
          p.finished +
          ((unit % work.tiles * kCluster + hw::cta_rank()) * kEpilogueWarps + hw::warp());
      if (split > 0) {
        if (hw::lane() == 0) {
          hw::wait_flag<hw::Order::kAcquire, hw::Scope::kGpu>(finished, before + split);
        }
        hw::warp_sync();
      }
      hw::tcgen05_after_sync();  // the allocation comes before the first store
      preload(split == 0 ? p.c : p.d, part, tmem);
      hw::tcgen05_before_sync();
      hw::warp_sync();  // every lane has stored its part
      if (hw::lane() == 0) hw::arrive_at(hw::leader_address(hw::address(s.preloaded)));
      hw::warp_sync();  // tcgen05.ld wants the warp together again

      hw::wait(s.multiplied, acc.phase);
      hw::tcgen05_after_sync();
      write(p.d, part, tmem);
      hw::warp_sync();  // every lane has written its part
      if (hw::lane() == 0) {
        hw::st<hw::Order::kRelease, hw::Scope::kGpu>(finished, before + split + 1);
      }
      hw::warp_sync();
      acc.advance();
    }
    hw::tcgen05_before_sync();  // the last loads come before the TMEM is given back
  }
  static HW_FN void preload(hw::Global<float> from, const Part& part, uint32_t tmem) {
    HW_LOOP for (int column = 0; column < kColumns; column += kChunk) {
      uint32_t v[kChunk];
      HW_UNROLL for (int i = 0; i < kChunk; ++i) {
        const int at = column + i;
        v[i] = at < part.columns ? hw::as_bits(hw::ld(from + (part.first + at))) : 0;
      }
      hw::tmem_st(tmem + column, v);
    }
    hw::tmem_wait_st();
  }
  static HW_FN void write(hw::Global<float> to, const Part& part, uint32_t tmem) {
    HW_LOOP for (int column = 0; column < kColumns; column += kChunk) {
      uint32_t v[kChunk];
      hw::tmem_ld(tmem + column, v);
      hw::tmem_wait_ld(v);
      HW_UNROLL for (int i = 0; i < kChunk; ++i) {
        const int at = column + i;
        if (at < part.columns) hw::st(to + (part.first + at), hw::as_float(v[i]));
      }
    }
  }

  static HW_FN void run(const Params& p, Smem& s) {
    static_assert(inverse(), "a lane must know which elements it holds");
    const int warp = hw::uniform(hw::warp());
    if (warp == kLoadWarp && hw::elect_one()) {
      s.inputs.init(1 /* the leader's load thread */, 1 /* one commit */);
      hw::barrier_init(s.preloaded, kCluster * kEpilogueWarps /* one lane of each warp */);
      hw::barrier_init(s.multiplied, 1 /* one commit */);
      hw::fence_barrier_init();
    }
    if (warp == kMmaWarp) {
      hw::tmem_alloc<kGroup>(s.tmem, kTmemColumns);
      hw::tmem_relinquish<kGroup>();
    }
    meet();  // barriers and TMEM are ready, the peer's too

    if (warp == kLoadWarp) {
      if (hw::elect_one()) load(p, s);
    } else if (warp == kMmaWarp) {
      if (hw::cta_rank() == 0 && hw::elect_one()) mma(p, s);
    } else {
      epilogue(p, s);
    }

    meet();  // nobody uses the TMEM any more, and neither CTA leaves while its peer uses it
    if (warp == kMmaWarp) {
      hw::tcgen05_after_sync();
      hw::tmem_dealloc<kGroup>(s.tmem.load(), kTmemColumns);
    }
  }
  /// All threads of the CTA, or of the pair.
  static HW_FN void meet() {
    hw::warp_sync();
    if constexpr (kPair) {
      hw::cluster_arrive();
      hw::cluster_wait();
    } else {
      hw::cta_sync();
    }
  }
};

}  // namespace logitless::model_test
