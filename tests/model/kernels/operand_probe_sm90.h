// SPDX-License-Identifier: Apache-2.0
// Hopper: one product of 64 x kN x 64 with operand descriptors that the host gives bit for bit, right or
// wrong. A wrong one reads other bytes than those meant, and the model must read the same as a GPU: so
// all of shared memory around the two tiles is written too.
//
//   guard | A | guard | B | guard
#pragma once

#include "cuda/hw/hw.h"

namespace logitless::model_test {

template <int kN, hw::Major kA, hw::Major kB>
struct OperandProbeSm90 {
  static constexpr int kM = 64, kK = 64, kSteps = kK / 16;
  static constexpr int kThreads = 128, kCluster = 1;
  static constexpr uint32_t kGuardBytes = 32768, kTileA = kM * kK * 2, kTileB = kN * kK * 2;

  /// A row-major matrix that TMA boxes bring into a tile, one after another along its rows.
  struct Source {
    hw::TensorMap map;
    int boxes, box_columns;
  };
  struct Params {
    Source a, b;                 // K-major: [mn, 64], boxes of mn rows; MN-major: [64, mn]
    hw::Global<hw::Bf16> guard;  // kGuardBytes
    uint64_t a_words[kSteps];    // descriptors; their start counts from the tile
    uint64_t b_words[kSteps];
    hw::Global<float> d;  // [64, kN]
  };

  struct Smem {
    hw::Buffer<kGuardBytes> before;
    hw::Buffer<kTileA> a;
    hw::Buffer<kGuardBytes> between;
    hw::Buffer<kTileB> b;
    hw::Buffer<kGuardBytes> after;
    hw::Barrier arrived;
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "a CTA has 227 KB of shared memory");
  static void describe(hw::Names& names) {
    names.add("before", &Smem::before);
    names.add("a", &Smem::a);
    names.add("between", &Smem::between);
    names.add("b", &Smem::b);
    names.add("after", &Smem::after);
    names.add("arrived", &Smem::arrived);
  }

  /// One thread.
  static HW_FN void load(const Params& p, Smem& s) {
    const uint32_t arrived = hw::address(s.arrived);
    hw::arrive_expect(s.arrived, kTileA + kTileB + 3 * kGuardBytes);
    hw::bulk_load(hw::address(s.before), p.guard, kGuardBytes, arrived);
    hw::bulk_load(hw::address(s.between), p.guard, kGuardBytes, arrived);
    hw::bulk_load(hw::address(s.after), p.guard, kGuardBytes, arrived);
    load_tile(p.a, hw::address(s.a), kTileA, arrived);
    load_tile(p.b, hw::address(s.b), kTileB, arrived);
  }
  static HW_FN void load_tile(const Source& source, uint32_t tile, uint32_t bytes,
                              uint32_t arrived) {
    const uint32_t box_bytes = bytes / static_cast<uint32_t>(source.boxes);
    HW_LOOP for (int box = 0; box < source.boxes; ++box) {
      hw::tma_load(tile + box * box_bytes, source.map, box * source.box_columns, 0, arrived);
    }
  }

  /// The descriptor with its start counted from `tile`.
  static HW_FN uint64_t at(uint32_t tile, uint64_t word) {
    return word + hw::WgmmaOperand::Start::put((tile & 0x3FFFF) >> 4);
  }

  static HW_FN void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.arrived, 1 /* the load thread */);
      hw::fence_barrier_init();
      load(p, s);
    }
    hw::cta_sync();
    hw::wait(s.arrived, 0);

    float z[kN / 2];
    hw::wgmma_fence();
    HW_UNROLL for (int step = 0; step < kSteps; ++step) {
      hw::wgmma<kN, kA, kB>(z, at(hw::address(s.a), p.a_words[step]),
                            at(hw::address(s.b), p.b_words[step]), step > 0);
    }
    hw::wgmma_commit();
    hw::wgmma_wait<0>(z);
    HW_UNROLL for (int v = 0; v < kN / 2; ++v) {
      const int row = hw::wgmma_row(hw::thread(), v), column = hw::wgmma_column(hw::thread(), v);
      hw::st(p.d + (row * kN + column), z[v]);
    }
  }
};

}  // namespace logitless::model_test
