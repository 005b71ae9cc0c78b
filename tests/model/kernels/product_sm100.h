// SPDX-License-Identifier: Apache-2.0
// Blackwell: E = bf16(2^(scale x w^T - anchor)) and the sums of its rows; in raw form the products
// x w^T themselves.
//
//   load warp --inputs--> mma warp --accums--> epilogue warps --TMA store--> E
//   (both CTAs)           (leader)             (both CTAs)
//
// A cluster is one pair of CTAs and owns tiles of 256 tokens x 256 words. Each CTA loads half of both
// operands, the leader's tensor core instructions read both halves, and each CTA finds its own 128
// tokens in its TMEM. Clusters wait for each other's anchors: all of them must be resident.
#pragma once

#include "cuda/hw/hw.h"
#include "cuda/tile/ring.h"

namespace logitless::model_test {

template <bool kRaw = false>
struct ProductSm100 {
  struct Params {
    hw::TensorMap x, w;          // [tokens, hidden], [vocab, hidden]; boxes of 128 x 64
    hw::TensorMap e;             // [tokens, vocab]; boxes of 32 x 64
    hw::Global<float> raw;       // [tokens, vocab], with kRaw; then nothing below but the sizes
    hw::Global<int32_t> anchor;  // [tokens]
    hw::Global<float> partial;   // [vocabulary tiles, tokens]
    hw::Global<float> sum;       // [tokens]
    hw::Global<uint32_t> anchor_ready;  // [row blocks]: the epoch whose anchors are there
    hw::Global<uint32_t> tiles_done;    // [row blocks]: vocabulary tiles finished, of all epochs
    hw::Global<uint32_t> epoch;  // of this launch, from 1; in memory, so that a graph can replay
    int tokens, vocab, hidden;
    float scale;
  };

  static constexpr int kM = 256, kN = 256, kK = 64;  // of the pair
  static constexpr int kStages = 3, kAccums = 2, kEpilogueWarps = 4;
  static constexpr int kThreads = 256, kCluster = 2;
  static constexpr int kBlockRows = 32;     // a row block: the tokens of one epilogue warp
  static constexpr int kStoreColumns = 64;  // of one TMA store
  static constexpr uint32_t kStageBytes = (kM + kN) * kK * 2;
  static constexpr uint32_t kTmemColumns = kAccums * kN;
  static constexpr uint16_t kBothCtas = 0b11;
  static_assert(kStoreColumns * 2 == 128, "a swizzled row has 128 bytes");
  static_assert(kTmemColumns == 512, "an allocation is a power of two of at most 512 columns");

  enum Role { kLoadWarp, kMmaWarp, kAllocWarp, kEpilogueWarp = 4 };

  struct Smem {
    hw::Buffer<kM / 2 * kK * 2> x[kStages];
    hw::Buffer<kN / 2 * kK * 2> w[kStages];
    hw::Buffer<kBlockRows * kStoreColumns * 2> e[kEpilogueWarps][2];
    tile::Ring<kStages> inputs;
    tile::Ring<kAccums> accums;
    hw::Cell<uint32_t> tmem;
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "a CTA has 227 KB of shared memory");
  static void describe(hw::Names& names) {
    names.add("x", &Smem::x);
    names.add("w", &Smem::w);
    names.add("e", &Smem::e);
    tile::Ring<kStages>::describe(names, "inputs.arrived", "inputs.finished", &Smem::inputs);
    tile::Ring<kAccums>::describe(names, "accums.arrived", "accums.finished", &Smem::accums);
    names.add("tmem", &Smem::tmem);
  }

  /// The tiles in the order in which clusters take them: down the tokens first, so that w streams once
  /// and the tiles that find the anchors come before those that wait for them.
  struct Tiles {
    int m_tiles, n_tiles, k_blocks;

    HW_FN explicit Tiles(const Params& p)
        : m_tiles((p.tokens + kM - 1) / kM),
          n_tiles((p.vocab + kN - 1) / kN),
          k_blocks((p.hidden + kK - 1) / kK) {}
    HW_FN int count() const { return m_tiles * n_tiles; }
    HW_FN int m(int tile) const { return tile % m_tiles; }
    HW_FN int n(int tile) const { return tile / m_tiles; }
  };

  /// What one epilogue warp has of a tile.
  struct Block {
    int first_row, first_column, n;
    uint32_t accum;  // TMEM address

    HW_FN int row() const { return first_row + hw::lane(); }
    HW_FN int index() const { return first_row / kBlockRows; }
  };

  static HW_FN void load(const Params& p, Smem& s) {
    const Tiles tiles(p);
    const int cta = hw::cta_rank();
    auto in = tile::RingState<kStages>::producer();
    for (int tile = hw::cluster_id(); tile < tiles.count(); tile += hw::cluster_count()) {
      for (int k = 0; k < tiles.k_blocks; ++k, in.advance()) {
        hw::wait(s.inputs.finished[in.stage], in.phase);
        if (cta == 0) hw::arrive_expect(s.inputs.arrived[in.stage], kStageBytes);
        const uint32_t arrived = hw::leader_address(hw::address(s.inputs.arrived[in.stage]));
        hw::tma_load_pair(hw::address(s.x[in.stage]), p.x, k * kK,
                          tiles.m(tile) * kM + cta * (kM / 2), arrived);
        hw::tma_load_pair(hw::address(s.w[in.stage]), p.w, k * kK,
                          tiles.n(tile) * kN + cta * (kN / 2), arrived);
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
    constexpr uint32_t kInstruction = hw::umma_instruction(kM, kN, hw::Major::kK, hw::Major::kK);
    constexpr hw::OperandLayout kRows{.leading_bytes = 16, .stride_bytes = 1024};
    const Tiles tiles(p);
    const uint32_t tmem = s.tmem.load();
    auto in = tile::RingState<kStages>::consumer();
    auto acc = tile::RingState<kAccums>::producer();
    for (int tile = hw::cluster_id(); tile < tiles.count(); tile += hw::cluster_count()) {
      // The fence below orders this wait as well.
      hw::wait(s.accums.finished[acc.stage], acc.phase);
      for (int k = 0; k < tiles.k_blocks; ++k, in.advance()) {
        hw::wait(s.inputs.arrived[in.stage], in.phase);
        hw::tcgen05_after_sync();
        const uint64_t x = hw::umma_operand(hw::address(s.x[in.stage]), kRows);
        const uint64_t w = hw::umma_operand(hw::address(s.w[in.stage]), kRows);
        HW_UNROLL for (int step = 0; step < kK / 16; ++step) {
          hw::tcgen05_mma<hw::CtaGroup::kTwo>(
              tmem + acc.stage * kN, hw::operand_advance(x, step * 32),
              hw::operand_advance(w, step * 32), kInstruction, k > 0 || step > 0);
        }
        hw::tcgen05_commit_multicast<hw::CtaGroup::kTwo>(s.inputs.finished[in.stage], kBothCtas);
      }
      hw::tcgen05_commit_multicast<hw::CtaGroup::kTwo>(s.accums.arrived[acc.stage], kBothCtas);
      acc.advance();
    }
  }

  static HW_FN void epilogue(const Params& p, Smem& s) {
    const Tiles tiles(p);
    const int warp = hw::warp() - kEpilogueWarp;
    const uint32_t tmem = hw::tmem_address(s.tmem.load(), warp * 32, 0);
    auto acc = tile::RingState<kAccums>::consumer();
    for (int tile = hw::cluster_id(); tile < tiles.count(); tile += hw::cluster_count()) {
      const Block block{.first_row = tiles.m(tile) * kM + hw::cta_rank() * (kM / 2) + warp * 32,
                        .first_column = tiles.n(tile) * kN,
                        .n = tiles.n(tile),
                        .accum = tmem + acc.stage * kN};
      const bool live = block.first_row < p.tokens;  // or the whole warp is past the last token
      if (live && !kRaw && block.n > 0) await_anchors(p, block);
      hw::wait(s.accums.arrived[acc.stage], acc.phase);
      hw::tcgen05_after_sync();
      if (live && kRaw) write_raw(p, block);
      if (live && !kRaw && block.n == 0) publish_anchors(p, block);
      if (live && !kRaw) write_exponentials(p, s, block);
      hw::tcgen05_before_sync();
      hw::warp_sync();  // every lane has read its accumulator and written its partial sum
      if (hw::lane() == 0) {
        hw::arrive_at(hw::leader_address(hw::address(s.accums.finished[acc.stage])));
      }
      if (live && !kRaw) add_sums(p, block, tiles.n_tiles);
      hw::warp_sync();  // tcgen05.ld wants the warp together again
      acc.advance();
    }
    if (hw::lane() == 0) hw::bulk_wait<0>();
  }

  static HW_FN void write_raw(const Params& p, const Block& block) {
    for (int column = 0; column < kN; column += 32) {
      uint32_t v[32];
      hw::tmem_ld(block.accum + column, v);
      hw::tmem_wait_ld(v);
      const int first = block.first_column + column;
      HW_UNROLL for (int i = 0; i < 32; ++i) {
        if (block.row() < p.tokens && first + i < p.vocab) {
          hw::st(p.raw + (int64_t{block.row()} * p.vocab + first + i), hw::as_float(v[i]));
        }
      }
    }
  }

  /// The anchor of a row is its largest exponent among the first kN words, rounded up: the same in every
  /// run, and near enough to the largest of all for exponentials that neither overflow nor vanish.
  static HW_FN void publish_anchors(const Params& p, const Block& block) {
    float top = -1e30f;
    for (int column = 0; column < kN; column += 32) {
      uint32_t v[32];
      hw::tmem_ld(block.accum + column, v);
      hw::tmem_wait_ld(v);
      HW_UNROLL for (int i = 0; i < 32; ++i) {
        if (block.first_column + column + i < p.vocab) {
          top = hw::max(top, hw::as_float(v[i]) * p.scale);
        }
      }
    }
    if (block.row() < p.tokens) hw::st(p.anchor + block.row(), static_cast<int>(hw::ceil(top)));
    hw::warp_sync();
    if (hw::lane() == 0) {
      hw::st<hw::Order::kRelease, hw::Scope::kGpu>(p.anchor_ready + block.index(), hw::ld(p.epoch));
    }
  }
  static HW_FN void await_anchors(const Params& p, const Block& block) {
    if (hw::lane() == 0) {
      hw::wait_flag<hw::Order::kAcquire, hw::Scope::kGpu>(p.anchor_ready + block.index(),
                                                          hw::ld(p.epoch));
    }
    hw::warp_sync();
  }

  /// 64 columns at a time: accumulator -> registers -> swizzled buffer -> TMA store. A buffer is filled
  /// while the store of the other one reads.
  static HW_FN void write_exponentials(const Params& p, Smem& s, const Block& block) {
    const bool inside = block.row() < p.tokens;
    const auto anchor = static_cast<float>(inside ? hw::ld(p.anchor + block.row()) : 0);
    float sum = 0;
    HW_LOOP for (int column = 0; column < kN; column += kStoreColumns) {
      const uint32_t e = hw::address(s.e[hw::warp() - kEpilogueWarp][column / kStoreColumns % 2]);
      if (hw::lane() == 0) hw::bulk_wait_read<1>();  // the store before last has left this buffer
      hw::warp_sync();
      HW_UNROLL for (int half = 0; half < kStoreColumns; half += 32) {
        uint32_t v[32];
        hw::tmem_ld(block.accum + column + half, v);
        hw::tmem_wait_ld(v);
        HW_UNROLL for (int i = 0; i < 32; ++i) {
          const bool in_vocab = block.first_column + column + half + i < p.vocab;
          const float value = hw::exp2(hw::fma(hw::as_float(v[i]), p.scale, -anchor));
          v[i] = hw::as_bits(in_vocab ? value : 0);
          sum += hw::as_float(v[i]);
        }
        HW_UNROLL for (int i = 0; i < 32; i += 8) {
          const hw::Vec4 cell{pack(v[i], v[i + 1]), pack(v[i + 2], v[i + 3]),
                              pack(v[i + 4], v[i + 5]), pack(v[i + 6], v[i + 7])};
          hw::st_shared(hw::swizzled(e + hw::lane() * 128 + (half + i) * 2), cell);
        }
      }
      hw::fence_proxy_async();
      hw::warp_sync();
      if (hw::lane() == 0) {
        hw::tma_store(p.e, block.first_column + column, block.first_row, e);
        hw::bulk_commit();
      }
    }
    if (inside) hw::st(p.partial + (int64_t{block.n} * p.tokens + block.row()), sum);
  }
  static HW_FN uint32_t pack(uint32_t low, uint32_t high) {
    return hw::pack_bf16(hw::as_float(low), hw::as_float(high));
  }

  /// Whoever finishes the last vocabulary tile of a row block adds its partial sums, in the order of the
  /// columns: the result does not depend on who came last.
  static HW_FN void add_sums(const Params& p, const Block& block, int n_tiles) {
    uint32_t earlier = 0;
    if (hw::lane() == 0) {
      earlier = hw::add<hw::Order::kAcqRel, hw::Scope::kGpu>(p.tiles_done + block.index(), 1);
    }
    hw::warp_sync();  // what the counter acquired, every lane may read
    earlier = hw::shfl(earlier, 0);
    if (earlier + 1 != hw::ld(p.epoch) * static_cast<uint32_t>(n_tiles)) return;
    if (block.row() >= p.tokens) return;
    float sum = 0;
    HW_LOOP for (int n = 0; n < n_tiles; ++n) {
      sum += hw::ld(p.partial + (int64_t{n} * p.tokens + block.row()));
    }
    hw::st(p.sum + block.row(), sum);
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
