// SPDX-License-Identifier: Apache-2.0
// Hopper: D = A B^T in f32, as the two gradients need it.
//
//   load warp --inputs--> two consumer warpgroups --> D
//
//   input gradient:   A = dZ [tokens, vocab], B = w [vocab, hidden]:  A K-major, B MN-major
//   weight gradient:  A = dZ [tokens, vocab], B = x [tokens, hidden]: both MN-major
//
// An MN-major operand comes straight from row-major memory whose rows are k, 64 elements of mn at a
// time: that is the width of the swizzle, and a TMA box cannot be wider.
#pragma once

#include "cuda/hw/hw.h"
#include "cuda/tile/ring.h"

namespace logitless::model_test {

template <int kN, hw::Major kA, hw::Major kB>
struct GradientSm90 {
  struct Params {
    hw::TensorMap a;  // K-major: [m, k], boxes of 128 x 64; MN-major: [k, m], boxes of 64 x 64
    hw::TensorMap b;  // K-major: [n, k], boxes of kN x 64; MN-major: [k, n], boxes of 64 x 64
    hw::Global<hw::Vec2> d;  // f32 [m, n], two at a time
    int m, n, k;             // n: even
  };

  static constexpr int kM = 128, kK = 64;
  static constexpr int kCluster = 1, kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kStages = 3;
  static constexpr int kGroupRows = kM / kConsumers;
  static constexpr uint32_t kStageBytes = (kM + kN) * kK * 2;
  static_assert(kGroupRows == 64, "a wgmma has 64 rows");

  enum Role { kLoadWarp };  // of the first warpgroup; the others consume

  /// kMn x kK elements of A or B in shared memory.
  template <hw::Major kMajor, int kMn>
  struct Operand {
    static constexpr bool kRows = kMajor == hw::Major::kK;  // of mn, with k contiguous
    static constexpr int kBox = kRows ? kMn : 64;           // of mn, in one copy
    static constexpr uint32_t kBoxBytes = kBox * kK * 2;
    static constexpr hw::OperandLayout kLayout{.leading_bytes = kRows ? 16 : kBoxBytes,
                                               .stride_bytes = 1024};
    /// From one instruction's 16 of k to the next: along the row, or 16 rows on.
    static constexpr uint32_t kStep = kRows ? 16 * 2 : 16 * 128;
    static_assert(kMn % kBox == 0);
    using Tile = hw::Buffer<kMn * kK * 2>;

    static HW_FN void load(const Tile& tile, const hw::TensorMap& map, int mn, int k,
                           uint32_t arrived) {
      HW_UNROLL for (int box = 0; box < kMn / kBox; ++box) {
        const int first = mn + box * kBox;
        hw::tma_load(hw::address(tile) + box * kBoxBytes, map, kRows ? k : first, kRows ? first : k,
                     arrived);
      }
    }
    /// From element `mn` on, a multiple of 64.
    static HW_FN uint64_t at(const Tile& tile, int mn = 0) {
      return hw::wgmma_operand(hw::address(tile) + mn * kK * 2, kLayout);
    }
  };
  using OperandA = Operand<kA, kM>;
  using OperandB = Operand<kB, kN>;

  struct Smem {
    typename OperandA::Tile a[kStages];
    typename OperandB::Tile b[kStages];
    tile::Ring<kStages> inputs;
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "a CTA has 227 KB of shared memory");
  static void describe(hw::Names& names) {
    names.add("a", &Smem::a);
    names.add("b", &Smem::b);
    tile::Ring<kStages>::describe(names, "inputs.arrived", "inputs.finished", &Smem::inputs);
  }

  /// Down the rows first, so that B streams once.
  struct Tiles {
    int m_tiles, n_tiles, k_blocks;

    HW_FN explicit Tiles(const Params& p)
        : m_tiles((p.m + kM - 1) / kM),
          n_tiles((p.n + kN - 1) / kN),
          k_blocks((p.k + kK - 1) / kK) {}
    HW_FN int count() const { return m_tiles * n_tiles; }
    HW_FN int first_row(int tile) const { return tile % m_tiles * kM; }
    HW_FN int first_column(int tile) const { return tile / m_tiles * kN; }
  };

  /// One thread.
  static HW_FN void load(const Params& p, Smem& s) {
    const Tiles tiles(p);
    auto in = tile::RingState<kStages>::producer();
    for (int tile = hw::cluster_id(); tile < tiles.count(); tile += hw::cluster_count()) {
      for (int k = 0; k < tiles.k_blocks; ++k, in.advance()) {
        hw::wait(s.inputs.finished[in.stage], in.phase);
        hw::arrive_expect(s.inputs.arrived[in.stage], kStageBytes);
        const uint32_t arrived = hw::address(s.inputs.arrived[in.stage]);
        OperandA::load(s.a[in.stage], p.a, tiles.first_row(tile), k * kK, arrived);
        OperandB::load(s.b[in.stage], p.b, tiles.first_column(tile), k * kK, arrived);
      }
    }
  }

  static HW_FN void consume(const Params& p, Smem& s, int group) {
    const Tiles tiles(p);
    auto in = tile::RingState<kStages>::consumer();
    for (int tile = hw::cluster_id(); tile < tiles.count(); tile += hw::cluster_count()) {
      float z[kN / 2];
      multiply(s, in, tiles.k_blocks, group, z);
      write(p, tiles.first_row(tile) + group * kGroupRows, tiles.first_column(tile), z);
      hw::warp_sync();  // wgmma wants the warp together again
    }
  }

  /// z = A B^T for the 64 rows of a warpgroup. While the products of one block run, those of the block
  /// before are waited for, and its stage goes back to the load warp.
  static HW_FN void multiply(Smem& s, tile::RingState<kStages>& in, int k_blocks, int group,
                             float (&z)[kN / 2]) {
    int previous = in.stage;
    for (int k = 0; k < k_blocks; ++k, in.advance()) {
      hw::wait(s.inputs.arrived[in.stage], in.phase);
      const uint64_t a = OperandA::at(s.a[in.stage], group * kGroupRows);
      const uint64_t b = OperandB::at(s.b[in.stage]);
      hw::wgmma_fence();
      HW_UNROLL for (int step = 0; step < kK / 16; ++step) {
        hw::wgmma<kN, kA, kB>(z, hw::operand_advance(a, step * OperandA::kStep),
                              hw::operand_advance(b, step * OperandB::kStep), k > 0 || step > 0);
      }
      hw::wgmma_commit();
      hw::wgmma_wait<1>(z);
      if (k > 0) release(s, previous);
      previous = in.stage;
    }
    hw::wgmma_wait<0>(z);
    release(s, previous);
  }
  /// By a whole warpgroup, whose products with this stage are done.
  static HW_FN void release(Smem& s, int stage) {
    if (hw::thread() % 128 == 0) hw::arrive(s.inputs.finished[stage]);
    hw::warp_sync();  // wgmma wants the warp together again
  }

  static HW_FN void write(const Params& p, int first_row, int first_column,
                          const float (&z)[kN / 2]) {
    const int row = first_row + hw::wgmma_row(hw::thread() % 128, 0);
    const int column = first_column + hw::wgmma_column(hw::thread() % 128, 0);
    HW_UNROLL for (int v = 0; v < kN / 2; v += 2) {
      const int r = row + v / 2 % 2 * 8, c = column + v / 4 * 8;
      if (r < p.m && c < p.n) {
        hw::st(p.d + (int64_t{r} * p.n + c) / 2,
               hw::Vec2{hw::as_bits(z[v]), hw::as_bits(z[v + 1])});
      }
    }
  }

  static HW_FN void run(const Params& p, Smem& s) {
    const int warp = hw::uniform(hw::warp()), group = warp / 4 - 1;
    if (hw::thread() == 0) {
      s.inputs.init(1 /* the load thread */, kConsumers /* one thread of each warpgroup */);
      hw::fence_barrier_init();
    }
    hw::cta_sync();  // the barriers are ready

    if (group < 0) {
      hw::registers_down<40>();
      if (warp == kLoadWarp && hw::elect_one()) load(p, s);
    } else {
      hw::registers_up<232>();
      consume(p, s, group);
    }
  }
};

}  // namespace logitless::model_test
