// SPDX-License-Identifier: Apache-2.0
// Blackwell: D = A B^T in f32, as the two gradients need it, and D rounded to bf16.
//
//   load warp --inputs--> mma warp --accums--> epilogue warps --TMA--> D --blocks--> round warp --> bf16
//   (both CTAs)           (leader)             (both CTAs)                (of any cluster)
//
//   input gradient:   A = dZ [tokens, vocab], B = w [vocab, hidden]:  A K-major, B MN-major
//   weight gradient:  A = dZ [tokens, vocab], B = x [tokens, hidden]: both MN-major
//
// A tile has 256 x kN elements and kN / 256 accumulators. With kN = 512, the paired schedule, both
// accumulators of the TMEM belong to one tile: A is loaded once for 512 columns. An accumulator leaves
// the pair as two blocks of 128 x 256, one per CTA, and each is published when it is complete.
#pragma once

#include "cuda/hw/hw.h"
#include "cuda/tile/ring.h"

namespace logitless::model_test {

/// How blocks reach global memory. kAdd divides the k of a tile among several clusters, which add to a
/// result that was zero: the order of the additions, and so the last bits, differ from run to run.
enum class Output { kStore, kAdd };

template <hw::Major kA, hw::Major kB, int kN = 256, Output kOutput = Output::kStore>
struct GradientSm100 {
  struct Params {
    hw::TensorMap a;                   // K-major: [m, k], boxes of 128 x 64
    hw::TensorMap b;                   // MN-major: [k, n], boxes of 64 x 64
    hw::TensorMap d;                   // f32 [m, n], boxes of 32 x 32
    hw::Global<hw::Float4> full;       // the memory of d: [m, pitch / 4]
    hw::Global<hw::Vec2> rounded;      // bf16 [m, pitch], four at a time
    hw::Global<uint32_t> blocks_done;  // [blocks]: warps that have finished, of all epochs
    hw::Global<uint32_t> epoch;        // of this launch, from 1
    int m, n, k;                       // n: a multiple of 4
    int pitch;                         // elements from row to row of full and rounded
    int splits;                        // of k, with Output::kAdd; at most one per 64
  };

  static constexpr int kM = 256, kK = 64;  // of the pair
  static constexpr int kAccumColumns = 256, kAccums = 2, kParts = kN / kAccumColumns;
  static constexpr int kStages = 3, kEpilogueWarps = 4;
  static constexpr int kThreads = 256, kCluster = 2;
  static constexpr int kBlockRows = kM / kCluster;
  static constexpr int kStoreColumns = 32;  // of one TMA store
  static constexpr uint32_t kStageBytes = (kM + kN) * kK * 2;
  static constexpr uint32_t kTmemColumns = kAccums * kAccumColumns;
  static constexpr uint16_t kBothCtas = 0b11;
  static_assert(kParts == 1 || kParts == 2, "the TMEM holds two accumulators of 256 columns");
  static_assert(kStoreColumns * 4 == 128, "a swizzled row has 128 bytes");

  enum Role { kLoadWarp, kMmaWarp, kAllocWarp, kRoundWarp, kEpilogueWarp };

  /// One CTA's half of an operand of 256: 128 of mn, 64 of k.
  template <hw::Major kMajor>
  struct Operand {
    static constexpr int kMn = 128, kBox = 64;  // kBox: 128 bytes of mn, if MN-major
    static constexpr int kBoxBytes = kBox * kK * 2;
    static constexpr hw::OperandLayout kLayout{
        .leading_bytes = kMajor == hw::Major::kK ? 16 : kBoxBytes, .stride_bytes = 1024};
    /// From one instruction's 16 of k to the next: along the row, or 16 rows on.
    static constexpr uint32_t kStep = kMajor == hw::Major::kK ? 16 * 2 : 16 * 128;
    using Tile = hw::Buffer<kMn * kK * 2>;

    static HW_FN void load(const Tile& tile, const hw::TensorMap& map, int mn, int k,
                           uint32_t arrived) {
      if constexpr (kMajor == hw::Major::kK) {
        hw::tma_load_pair(hw::address(tile), map, k, mn, arrived);
      } else {
        hw::tma_load_pair(hw::address(tile), map, mn, k, arrived);
        hw::tma_load_pair(hw::address(tile) + kBoxBytes, map, mn + kBox, k, arrived);
      }
    }
    static HW_FN uint64_t at(const Tile& tile) {
      return hw::umma_operand(hw::address(tile), kLayout);
    }
  };
  using OperandA = Operand<kA>;
  using OperandB = Operand<kB>;

  struct Smem {
    typename OperandA::Tile a[kStages];
    typename OperandB::Tile b[kStages][kParts];
    hw::Buffer<32 * kStoreColumns * 4> d[kEpilogueWarps][2];
    tile::Ring<kStages> inputs;
    tile::Ring<kAccums> accums;
    hw::Cell<uint32_t> tmem;
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "a CTA has 227 KB of shared memory");
  static void describe(hw::Names& names) {
    names.add("a", &Smem::a);
    names.add("b", &Smem::b);
    names.add("d", &Smem::d);
    tile::Ring<kStages>::describe(names, "inputs.arrived", "inputs.finished", &Smem::inputs);
    tile::Ring<kAccums>::describe(names, "accums.arrived", "accums.finished", &Smem::accums);
    names.add("tmem", &Smem::tmem);
  }

  /// What clusters take one at a time: a split of the k of a tile. The splits of a tile are neighbours.
  struct Work {
    int m_tiles, n_tiles, k_blocks, splits;

    HW_FN explicit Work(const Params& p)
        : m_tiles((p.m + kM - 1) / kM),
          n_tiles((p.n + kN - 1) / kN),
          k_blocks((p.k + kK - 1) / kK),
          splits(kOutput == Output::kAdd ? p.splits : 1) {}
    HW_FN int tiles() const { return m_tiles * n_tiles; }
    HW_FN int count() const { return tiles() * splits; }
    HW_FN int tile(int unit) const { return unit / splits; }
    HW_FN int first_k(int unit) const { return k_blocks * (unit % splits) / splits; }
    HW_FN int end_k(int unit) const { return k_blocks * (unit % splits + 1) / splits; }
    HW_FN int first_row(int tile) const { return tile % m_tiles * kM; }
    HW_FN int first_column(int tile) const { return tile / m_tiles * kN; }
    HW_FN int block(int tile, int cta, int part) const {
      return (tile * kCluster + cta) * kParts + part;
    }
  };

  static HW_FN void load(const Params& p, Smem& s) {
    const Work work(p);
    const int cta = hw::cta_rank();
    auto in = tile::RingState<kStages>::producer();
    for (int unit = hw::cluster_id(); unit < work.count(); unit += hw::cluster_count()) {
      const int row = work.first_row(work.tile(unit)) + cta * OperandA::kMn;
      const int column = work.first_column(work.tile(unit)) + cta * OperandB::kMn;
      for (int k = work.first_k(unit); k < work.end_k(unit); ++k, in.advance()) {
        hw::wait(s.inputs.finished[in.stage], in.phase);
        if (cta == 0) hw::arrive_expect(s.inputs.arrived[in.stage], kStageBytes);
        const uint32_t arrived = hw::leader_address(hw::address(s.inputs.arrived[in.stage]));
        OperandA::load(s.a[in.stage], p.a, row, k * kK, arrived);
        HW_UNROLL for (int part = 0; part < kParts; ++part) {
          OperandB::load(s.b[in.stage][part], p.b, column + part * kAccumColumns, k * kK, arrived);
        }
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

  /// One thread of the leader.
  static HW_FN void mma(const Params& p, Smem& s) {
    const Work work(p);
    const uint32_t tmem = s.tmem.load();
    auto in = tile::RingState<kStages>::consumer();
    auto acc = tile::RingState<kAccums>::producer();
    for (int unit = hw::cluster_id(); unit < work.count(); unit += hw::cluster_count()) {
      const int first = work.first_k(unit), last = work.end_k(unit) - 1;
      for (int k = first; k <= last; ++k, in.advance()) {
        hw::wait(s.inputs.arrived[in.stage], in.phase);
        auto part_acc = acc;
        HW_UNROLL for (int part = 0; part < kParts; ++part, part_acc.advance()) {
          if (k == first) hw::wait(s.accums.finished[part_acc.stage], part_acc.phase);
          hw::tcgen05_after_sync();  // orders both waits
          multiply(tmem + part_acc.stage * kAccumColumns, OperandA::at(s.a[in.stage]),
                   OperandB::at(s.b[in.stage][part]), k > first);
          if (k == last) {
            hw::tcgen05_commit_multicast<hw::CtaGroup::kTwo>(s.accums.arrived[part_acc.stage],
                                                             kBothCtas);
          }
        }
        hw::tcgen05_commit_multicast<hw::CtaGroup::kTwo>(s.inputs.finished[in.stage], kBothCtas);
      }
      HW_UNROLL for (int part = 0; part < kParts; ++part) acc.advance();
    }
  }
  static HW_FN void multiply(uint32_t accum, uint64_t a, uint64_t b, bool accumulate) {
    constexpr uint32_t kInstruction = hw::umma_instruction(kM, kAccumColumns, kA, kB);
    HW_UNROLL for (int step = 0; step < kK / 16; ++step) {
      hw::tcgen05_mma<hw::CtaGroup::kTwo>(accum, hw::operand_advance(a, step * OperandA::kStep),
                                          hw::operand_advance(b, step * OperandB::kStep),
                                          kInstruction, accumulate || step > 0);
    }
  }

  static HW_FN void epilogue(const Params& p, Smem& s) {
    const Work work(p);
    const int warp = hw::warp() - kEpilogueWarp, cta = hw::cta_rank();
    const uint32_t tmem = hw::tmem_address(s.tmem.load(), warp * 32, 0);
    auto acc = tile::RingState<kAccums>::consumer();
    for (int unit = hw::cluster_id(); unit < work.count(); unit += hw::cluster_count()) {
      const int tile = work.tile(unit);
      const int row = work.first_row(tile) + cta * kBlockRows + warp * 32;
      HW_LOOP for (int part = 0; part < kParts; ++part, acc.advance()) {
        hw::wait(s.accums.arrived[acc.stage], acc.phase);
        hw::tcgen05_after_sync();
        write_block(p, s, tmem + acc.stage * kAccumColumns, row,
                    work.first_column(tile) + part * kAccumColumns);
        hw::tcgen05_before_sync();
        hw::warp_sync();  // every lane has read its accumulator
        if (hw::lane() == 0) {
          hw::arrive_at(hw::leader_address(hw::address(s.accums.finished[acc.stage])));
          publish(p.blocks_done + work.block(tile, cta, part));
        }
      }
    }
  }
  /// 32 columns at a time: accumulator -> swizzled buffer -> TMA. A buffer is filled while the copy of
  /// the other one reads.
  static HW_FN void write_block(const Params& p, Smem& s, uint32_t accum, int row, int column) {
    HW_LOOP for (int c = 0; c < kAccumColumns; c += kStoreColumns) {
      const uint32_t d = hw::address(s.d[hw::warp() - kEpilogueWarp][c / kStoreColumns % 2]);
      if (hw::lane() == 0) hw::bulk_wait_read<1>();  // the copy before last has left this buffer
      hw::warp_sync();
      uint32_t v[32];
      hw::tmem_ld(accum + c, v);
      hw::tmem_wait_ld(v);
      HW_UNROLL for (int i = 0; i < 32; i += 4) {
        hw::st_shared(hw::swizzled(d + hw::lane() * 128 + i * 4),
                      hw::Vec4{v[i], v[i + 1], v[i + 2], v[i + 3]});
      }
      hw::fence_proxy_async();
      hw::warp_sync();
      if (hw::lane() == 0) {
        if constexpr (kOutput == Output::kAdd) {
          hw::tma_reduce_add(p.d, column + c, row, d);
        } else {
          hw::tma_store(p.d, column + c, row, d);
        }
        hw::bulk_commit();
      }
    }
  }
  /// Tells the round warps that one more warp has written its rows. The wait is the full one: with
  /// bulk_wait_read the data may still be on its way when the counter is seen.
  static HW_FN void publish(hw::Global<uint32_t> counter) {
    hw::bulk_wait<0>();
    hw::add<hw::Order::kRelease, hw::Scope::kGpu>(counter, 1);
  }

  /// Rounds complete blocks, whoever made them.
  static HW_FN void round(const Params& p) {
    const Work work(p);
    const uint32_t all = hw::ld(p.epoch) * static_cast<uint32_t>(kEpilogueWarps * work.splits);
    const int stride = hw::cluster_count() * kCluster;
    for (int tile = 0; tile < work.tiles(); ++tile) {
      for (int cta = 0; cta < kCluster; ++cta) {
        for (int part = 0; part < kParts; ++part) {
          const int block = work.block(tile, cta, part);
          if (block % stride != hw::cluster_id() * kCluster + hw::cta_rank()) continue;
          if (hw::lane() == 0) {
            hw::wait_flag<hw::Order::kAcquire, hw::Scope::kGpu>(p.blocks_done + block, all);
          }
          hw::warp_sync();
          round_block(p, work.first_row(tile) + cta * kBlockRows,
                      work.first_column(tile) + part * kAccumColumns);
        }
      }
    }
  }
  static HW_FN void round_block(const Params& p, int first_row, int first_column) {
    const int end_row = first_row + kBlockRows < p.m ? first_row + kBlockRows : p.m;
    const int end_column = first_column + kAccumColumns < p.n ? first_column + kAccumColumns : p.n;
    for (int row = first_row; row < end_row; ++row) {
      for (int column = first_column + hw::lane() * 4; column < end_column; column += 32 * 4) {
        const int64_t four = (int64_t{row} * p.pitch + column) / 4;
        const hw::Float4 v = hw::ld(p.full + four);
        hw::st(p.rounded + four, hw::Vec2{hw::pack_bf16(v.x, v.y), hw::pack_bf16(v.z, v.w)});
      }
    }
  }

  static HW_FN void run(const Params& p, Smem& s) {
    const int warp = hw::uniform(hw::warp());
    if (warp == kLoadWarp && hw::elect_one()) {
      s.inputs.init(1 /* the leader's load thread */, 1 /* one commit */);
      s.accums.init(1 /* one commit */, kCluster * kEpilogueWarps /* one lane of each warp */);
      hw::fence_barrier_init();
    }
    if (warp == kAllocWarp) {
      hw::tmem_alloc<hw::CtaGroup::kTwo>(s.tmem, kTmemColumns);
      hw::tmem_relinquish<hw::CtaGroup::kTwo>();
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();  // barriers and TMEM are ready, the peer's too

    if (warp == kLoadWarp) {
      if (hw::elect_one()) load(p, s);
    } else if (warp == kMmaWarp && hw::cta_rank() == 0) {
      if (hw::elect_one()) mma(p, s);
    } else if (warp == kRoundWarp) {
      round(p);
    } else if (warp >= kEpilogueWarp) {
      epilogue(p, s);
    }

    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();  // neither CTA leaves while its peer uses it
    if (warp == kAllocWarp) {
      hw::tcgen05_after_sync();
      hw::tmem_dealloc<hw::CtaGroup::kTwo>(s.tmem.load(), kTmemColumns);
    }
  }
};

}  // namespace logitless::model_test
