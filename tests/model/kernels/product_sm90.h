// SPDX-License-Identifier: Apache-2.0
// Hopper: E = bf16(2^(scale x w^T - anchor)) and the sums of its rows; in raw form the products
// x w^T themselves.
//
//   claim warp --claims--> load warp --inputs--> two consumer warpgroups --TMA store--> E
//   (CTA 0)        |       (both CTAs)           (both CTAs)
//                  '--------------------------------^
//
// A cluster is two CTAs with 128 tokens each, which share the words of a tile: each CTA loads half of
// them for both. Clusters claim tiles one by one, in the order of Tiles. A tile waits for anchors only
// of a tile that was claimed before it, and tiles that find anchors wait for nobody: so the kernel
// ends, however many of its clusters are resident.
#pragma once

#include "cuda/hw/hw.h"
#include "cuda/tile/ring.h"

namespace logitless::model_test {

template <int kN = 256, bool kRaw = false>
struct ProductSm90 {
  struct Params {
    hw::TensorMap x;                    // [tokens, hidden]; boxes of 128 x 64
    hw::TensorMap w;                    // [vocab, hidden]; boxes of kN / 2 x 64
    hw::TensorMap e;                    // [tokens, vocab]; boxes of 64 x 64
    hw::Global<float> raw;              // [tokens, vocab], with kRaw
    hw::Global<int32_t> anchor;         // [tokens]
    hw::Global<float> partial;          // [vocabulary tiles, tokens]
    hw::Global<float> sum;              // [tokens]
    hw::Global<uint32_t> anchor_ready;  // [row blocks]: the epoch whose anchors are there
    hw::Global<uint32_t> tiles_done;    // [row blocks]: vocabulary tiles finished, of all epochs
    hw::Global<uint32_t> claimed;       // tiles claimed, of all epochs
    hw::Global<uint32_t> epoch;  // of this launch, from 1; in memory, so that a graph can replay
    int tokens, vocab, hidden;
    float scale;
  };

  static constexpr int kM = 128, kK = 64;  // of one CTA
  static constexpr int kCluster = 2, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kStages = 3, kClaims = 2;
  static constexpr int kGroupRows = kM / kConsumers;
  static constexpr int kBlockRows = 16;     // a row block: the tokens of one consumer warp
  static constexpr int kStoreColumns = 64;  // of one TMA store
  static constexpr uint32_t kStageBytes = (kM + kN) * kK * 2;
  static constexpr uint16_t kBothCtas = 0b11;
  static_assert(kGroupRows == 64, "a wgmma has 64 rows");
  static_assert(kN / kCluster % 8 == 0, "a CTA's half of the words is whole groups of the swizzle");
  static_assert(kStoreColumns * 2 == 128, "a swizzled row has 128 bytes");

  enum Role { kLoadWarp, kClaimWarp };  // of the first warpgroup; the others consume

  struct Smem {
    hw::Buffer<kM * kK * 2> x[kStages];
    hw::Buffer<kN * kK * 2> w[kStages];
    hw::Buffer<kGroupRows * kStoreColumns * 2> e[kConsumers][2];
    tile::Ring<kStages> inputs;
    tile::Ring<kClaims> claims;  // `finished` counts in CTA 0 only
    hw::Cell<uint32_t> claim[kClaims];
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "a CTA has 227 KB of shared memory");
  static void describe(hw::Names& names) {
    names.add("x", &Smem::x);
    names.add("w", &Smem::w);
    names.add("e", &Smem::e);
    tile::Ring<kStages>::describe(names, "inputs.arrived", "inputs.finished", &Smem::inputs);
    tile::Ring<kClaims>::describe(names, "claims.arrived", "claims.finished", &Smem::claims);
    names.add("claim", &Smem::claim);
  }

  /// The tiles in the order in which clusters claim them: down the tokens first, so that w streams once
  /// and the tiles that find the anchors come before those that wait for them.
  struct Tiles {
    uint32_t m_tiles, n_tiles;
    int k_blocks;

    HW_FN explicit Tiles(const Params& p)
        : m_tiles((p.tokens + kCluster * kM - 1) / (kCluster * kM)),
          n_tiles((p.vocab + kN - 1) / kN),
          k_blocks((p.hidden + kK - 1) / kK) {}
    HW_FN uint32_t count() const { return m_tiles * n_tiles; }
    HW_FN int first_row(uint32_t tile, int cta) const {
      return (static_cast<int>(tile % m_tiles) * kCluster + cta) * kM;
    }
    HW_FN int n(uint32_t tile) const { return static_cast<int>(tile / m_tiles); }
  };

  /// What one consumer warp has of a tile.
  struct Block {
    int group, group_row, first_row;  // the warpgroup, its first row, and the warp's
    int n;                            // the vocabulary tile

    HW_FN int index() const { return first_row / kBlockRows; }
    /// Of values 4 i + 2 half and 4 i + 2 half + 1 of a thread, and the column of the first of the two.
    HW_FN int row(int half) const { return first_row + hw::lane() / 4 + 8 * half; }
    HW_FN int column(int i) const { return n * kN + 8 * i + hw::lane() % 4 * 2; }
  };

  /// One thread of the cluster. Every cluster's last claim is past the last tile, and ends it; so a
  /// launch adds count + clusters to the counter, which nobody has to reset.
  static HW_FN void claim_tiles(const Params& p, Smem& s) {
    const uint32_t count = Tiles(p).count();
    const uint32_t before = (hw::ld(p.epoch) - 1) * (count + hw::cluster_count());
    uint32_t tile = 0;
    for (auto claim = tile::RingState<kClaims>::producer(); tile < count; claim.advance()) {
      tile = hw::add<hw::Order::kRelaxed, hw::Scope::kGpu>(p.claimed, 1) - before;
      hw::wait<hw::Scope::kCluster>(s.claims.finished[claim.stage], claim.phase);
      HW_UNROLL for (int cta = 0; cta < kCluster; ++cta) {
        const uint32_t arrived = hw::cta_address(hw::address(s.claims.arrived[claim.stage]), cta);
        hw::arrive_expect_at(arrived, sizeof(uint32_t));
        hw::store_async(hw::cta_address(hw::address(s.claim[claim.stage]), cta), tile, arrived);
      }
    }
  }
  /// The claimed tile, for a reader of this CTA. At cluster scope: CTA 0 has stored it.
  static HW_FN uint32_t await_claim(Smem& s, const tile::RingState<kClaims>& claim) {
    hw::wait<hw::Scope::kCluster>(s.claims.arrived[claim.stage], claim.phase);
    return s.claim[claim.stage].load();
  }
  /// One reader has read. At cluster scope: CTA 0 stores the next one.
  static HW_FN void finish_claim(Smem& s, const tile::RingState<kClaims>& claim) {
    hw::arrive_at<hw::Scope::kCluster>(
        hw::cta_address(hw::address(s.claims.finished[claim.stage]), 0));
  }

  /// One thread of each CTA.
  static HW_FN void load(const Params& p, Smem& s) {
    constexpr int kHalf = kN / kCluster;
    const Tiles tiles(p);
    const int cta = hw::cta_rank();
    auto in = tile::RingState<kStages>::producer();
    for (auto claim = tile::RingState<kClaims>::consumer();; claim.advance()) {
      const uint32_t tile = await_claim(s, claim);
      finish_claim(s, claim);
      if (tile >= tiles.count()) break;
      for (int k = 0; k < tiles.k_blocks; ++k, in.advance()) {
        hw::wait(s.inputs.finished[in.stage], in.phase);  // in both CTAs: w goes to both
        hw::arrive_expect(s.inputs.arrived[in.stage], kStageBytes);
        const uint32_t arrived = hw::address(s.inputs.arrived[in.stage]);
        hw::tma_load(hw::address(s.x[in.stage]), p.x, k * kK, tiles.first_row(tile, cta), arrived);
        hw::tma_load_multicast(hw::address(s.w[in.stage]) + cta * kHalf * kK * 2, p.w, k * kK,
                               tiles.n(tile) * kN + cta * kHalf, arrived, kBothCtas);
      }
    }
  }

  static HW_FN void consume(const Params& p, Smem& s, int group) {
    const Tiles tiles(p);
    const int warp = hw::warp() % 4;
    auto in = tile::RingState<kStages>::consumer();
    int stores = 0;
    for (auto claim = tile::RingState<kClaims>::consumer();; claim.advance()) {
      const uint32_t tile = await_claim(s, claim);
      hw::warp_sync();  // every lane has read it
      if (hw::lane() == 0) finish_claim(s, claim);
      hw::warp_sync();  // wgmma wants the warp together again
      if (tile >= tiles.count()) break;

      float z[kN / 2];
      multiply(s, in, tiles.k_blocks, group, z);
      const int group_row = tiles.first_row(tile, hw::cta_rank()) + group * kGroupRows;
      const Block block{group, group_row, group_row + warp * kBlockRows, tiles.n(tile)};
      if constexpr (kRaw) {
        write_raw(p, block, z);
      } else {
        float anchor[2];
        if (block.n == 0) {
          publish_anchors(p, block, z, anchor);
        } else {
          await_anchors(p, block, anchor);
        }
        write_exponentials(p, s, block, z, anchor, stores);
        add_sums(p, block, static_cast<int>(tiles.n_tiles));
      }
    }
    if (hw::thread() % 128 == 0) hw::bulk_wait_read<0>();  // before shared memory goes
  }

  /// z = x w^T for the 64 tokens of a warpgroup.
  static HW_FN void multiply(Smem& s, tile::RingState<kStages>& in, int k_blocks, int group,
                             float (&z)[kN / 2]) {
    constexpr hw::OperandLayout kRows{.leading_bytes = 16, .stride_bytes = 1024};
    for (int k = 0; k < k_blocks; ++k, in.advance()) {
      hw::wait(s.inputs.arrived[in.stage], in.phase);
      const uint64_t x =
          hw::wgmma_operand(hw::address(s.x[in.stage]) + group * kGroupRows * kK * 2, kRows);
      const uint64_t w = hw::wgmma_operand(hw::address(s.w[in.stage]), kRows);
      hw::wgmma_fence();
      HW_UNROLL for (int step = 0; step < kK / 16; ++step) {
        hw::wgmma<kN>(z, hw::operand_advance(x, step * 32), hw::operand_advance(w, step * 32),
                      k > 0 || step > 0);
      }
      hw::wgmma_commit();
      hw::wgmma_wait<0>(z);
      if (hw::thread() % 128 < kCluster) {  // one thread for each CTA that writes into this stage
        hw::arrive_at(
            hw::cta_address(hw::address(s.inputs.finished[in.stage]), hw::thread() % 128));
      }
      hw::warp_sync();  // wgmma wants the warp together again
    }
  }

  static HW_FN void write_raw(const Params& p, const Block& block, const float (&z)[kN / 2]) {
    HW_UNROLL for (int v = 0; v < kN / 2; ++v) {
      const int row = block.row(v / 2 % 2), column = block.column(v / 4) + v % 2;
      if (row < p.tokens && column < p.vocab) {
        hw::st(p.raw + (int64_t{row} * p.vocab + column), z[v]);
      }
    }
  }

  /// The anchor of a row is its largest exponent among the first kN words, rounded up: the same in every
  /// run, and near enough to the largest of all for exponentials that neither overflow nor vanish.
  static HW_FN void publish_anchors(const Params& p, const Block& block, const float (&z)[kN / 2],
                                    float (&anchor)[2]) {
    HW_UNROLL for (int half = 0; half < 2; ++half) {
      float top = -1e30f;
      HW_UNROLL for (int v = 0; v < kN / 4; ++v) {
        const float value = z[v / 2 * 4 + half * 2 + v % 2] * p.scale;
        if (block.column(v / 2) + v % 2 < p.vocab) top = hw::max(top, value);
      }
      top = hw::max(top, hw::shfl_xor(top, 1));
      top = hw::max(top, hw::shfl_xor(top, 2));
      anchor[half] = hw::ceil(top);
      if (hw::lane() % 4 == 0 && block.row(half) < p.tokens) {
        hw::st(p.anchor + block.row(half), static_cast<int32_t>(anchor[half]));
      }
    }
    hw::warp_sync();
    if (hw::lane() == 0 && block.first_row < p.tokens) {
      hw::st<hw::Order::kRelease, hw::Scope::kGpu>(p.anchor_ready + block.index(), hw::ld(p.epoch));
    }
  }
  static HW_FN void await_anchors(const Params& p, const Block& block, float (&anchor)[2]) {
    if (hw::lane() == 0 && block.first_row < p.tokens) {
      hw::wait_flag<hw::Order::kAcquire, hw::Scope::kGpu>(p.anchor_ready + block.index(),
                                                          hw::ld(p.epoch));
    }
    hw::warp_sync();
    HW_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = block.row(half);
      anchor[half] = static_cast<float>(row < p.tokens ? hw::ld(p.anchor + row) : 0);
    }
  }

  /// 64 columns at a time: registers -> swizzled buffer -> TMA store. A buffer is filled while the store
  /// of the other one reads.
  static HW_FN void write_exponentials(const Params& p, Smem& s, const Block& block,
                                       const float (&z)[kN / 2], const float (&anchor)[2],
                                       int& stores) {
    const bool leads = hw::thread() % 128 == 0;
    float sum[2] = {0, 0};
    HW_UNROLL for (int column = 0; column < kN; column += kStoreColumns, ++stores) {
      const uint32_t e = hw::address(s.e[block.group][stores % 2]);
      if (leads) hw::bulk_wait_read<1>();  // the store before last has left this buffer
      hw::named_sync(1 + block.group, 128);
      HW_UNROLL for (int strip = 0; strip < kStoreColumns; strip += 16) {
        uint32_t
            cells[4];  // rows 0-7, rows 8-15 of the first eight columns; then of the next eight
        HW_UNROLL for (int c = 0; c < 4; ++c) {
          const int i = (column + strip) / 8 + c / 2, half = c % 2;
          float out[2];
          HW_UNROLL for (int b = 0; b < 2; ++b) {
            const float exponent = hw::fma(z[i * 4 + half * 2 + b], p.scale, -anchor[half]);
            out[b] = block.column(i) + b < p.vocab ? hw::exp2(exponent) : 0;
            sum[half] += out[b];
          }
          cells[c] = hw::pack_bf16(out[0], out[1]);
        }
        const int row = block.first_row - block.group_row + hw::lane() % 16;
        const int column_bytes = (strip + hw::lane() / 16 * 8) * 2;
        hw::store_matrix(hw::swizzled(e + row * 128 + column_bytes), cells[0], cells[1], cells[2],
                         cells[3]);
      }
      hw::fence_proxy_async();
      hw::named_sync(1 + block.group, 128);
      if (leads) {
        hw::tma_store(p.e, block.n * kN + column, block.group_row, e);
        hw::bulk_commit();
      }
    }
    HW_UNROLL for (int half = 0; half < 2; ++half) {
      sum[half] += hw::shfl_xor(sum[half], 1);
      sum[half] += hw::shfl_xor(sum[half], 2);
      if (hw::lane() % 4 == 0 && block.row(half) < p.tokens) {
        hw::st(p.partial + (int64_t{block.n} * p.tokens + block.row(half)), sum[half]);
      }
    }
  }

  /// Whoever finishes the last vocabulary tile of a row block adds its partial sums, in the order of the
  /// columns: the result does not depend on who came last.
  static HW_FN void add_sums(const Params& p, const Block& block, int n_tiles) {
    if (block.first_row >= p.tokens) return;
    hw::warp_sync();  // every lane has written its partial sums
    uint32_t earlier = 0;
    if (hw::lane() == 0) {
      earlier = hw::add<hw::Order::kAcqRel, hw::Scope::kGpu>(p.tiles_done + block.index(), 1);
    }
    hw::warp_sync();  // what the counter acquired, every lane may read
    earlier = hw::shfl(earlier, 0);
    if (earlier + 1 != hw::ld(p.epoch) * static_cast<uint32_t>(n_tiles)) return;
    const int row = block.first_row + hw::lane();
    if (hw::lane() >= kBlockRows || row >= p.tokens) return;
    float sum = 0;
    HW_LOOP for (int n = 0; n < n_tiles; ++n) {
      sum += hw::ld(p.partial + (int64_t{n} * p.tokens + row));
    }
    hw::st(p.sum + row, sum);
  }

  static HW_FN void run(const Params& p, Smem& s) {
    const int warp = hw::uniform(hw::warp()), group = warp / 4 - 1;
    if (hw::thread() == 0) {
      s.inputs.init(1 /* this CTA's load thread */,
                    kCluster * kConsumers /* one thread of each warpgroup of both CTAs */);
      s.claims.init(
          1 /* the claim thread */,
          kCluster * (1 + 4 * kConsumers) /* load threads, a lane of each consumer warp */);
      hw::fence_barrier_init();
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();  // the barriers are ready, the peer's too

    if (group < 0) {
      hw::registers_down<40>();
      if (warp == kLoadWarp) {
        if (hw::elect_one()) load(p, s);
      } else if (warp == kClaimWarp && hw::cta_rank() == 0) {
        if (hw::elect_one()) claim_tiles(p, s);
      }
    } else {
      hw::registers_up<232>();
      consume(p, s, group);
    }

    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();  // neither CTA leaves while its peer sends to it
  }
};

}  // namespace logitless::model_test
