// SPDX-License-Identifier: Apache-2.0
// All-reduce in the switch: every rank writes its part, the owner of a shard reads the sum of all
// parts through the multicast address, and writes it to all ranks through another.
//
//   part --st--> barrier --fence.proxy.alias--> ld_reduce --> multimem.st --> counter of every rank
//                                               (the owner's shard)               |
//   output <--ld-- sum <--fence.proxy.alias-- all shards are there <--------------'
//
// The switch promises no order of its additions: only exactly representable sums are equal in every
// run.
#pragma once

#include "cuda/hw/hw.h"
#include "kernels/epoch_barrier.h"

namespace logitless::model_test {

/// T: float or hw::Bf16.
template <class T>
struct MultimemReduce {
  static constexpr int kThreads = 64, kCluster = 1;
  static constexpr int kPerCell =
      16 / sizeof(T);  // elements of 16 bytes, what an instruction moves
  static constexpr uint32_t kNan = sizeof(T) == 4 ? 0x7FFFFFFF : 0x7FFF7FFF;

  struct Params {
    struct Rank {
      hw::Global<const hw::Vec4> input;  // [calls, ranks, cells]
      hw::Global<hw::Vec4> output;       // [calls, ranks, cells]
      // symmetric memory
      hw::Global<hw::Vec4> part, sum;  // [ranks, cells]
      hw::Global<uint32_t> shards;     // CTAs of owners that have written their sums, ever
    };
    Rank rank[kMostRanks];
    BarrierSide side[kMostRanks];
    hw::Multicast<T> parts, sums;  // the multicast addresses of part, sum and shards
    hw::Multicast<uint32_t> all_shards;
    int ranks, ctas, cells, calls;  // cells: of one shard
  };
  static constexpr uint32_t kShards = EpochBarrier::kWait + 1;  // PeerFailure::what
  struct Smem {
    hw::Cell<uint32_t> came, complete;
  };
  static void describe(hw::Names& names) {
    names.add("came", &Smem::came);
    names.add("complete", &Smem::complete);
  }

  static HW_FN hw::Vec4 as_cell(hw::Float4 v) {
    return {hw::as_bits(v.x), hw::as_bits(v.y), hw::as_bits(v.z), hw::as_bits(v.w)};
  }
  static HW_FN hw::Vec4 as_cell(hw::Vec4 v) { return v; }

  /// This CTA's part of its rank's shard.
  static HW_FN void reduce(const Params& p, Seat seat) {
    HW_LOOP for (int i = seat.cta * kThreads + hw::thread(); i < p.cells; i += p.ctas * kThreads) {
      const int64_t at = (seat.rank * int64_t{p.cells} + i) * kPerCell;
      hw::multimem_store(p.sums + at, as_cell(hw::multimem_load_add(p.parts + at)));
    }
  }
  /// The whole CTA: tells every rank, and waits for every owner. The counter has no single writer:
  /// a failure names this rank as its own peer.
  static HW_FN bool all_summed(const Params& p, Smem& s, Seat seat, uint32_t epoch) {
    hw::cta_sync();  // every thread has written its sums
    if (hw::thread() == 0) {
      hw::multimem_add<hw::Order::kRelease, hw::Scope::kSys>(p.all_shards, 1);
      const auto rank = static_cast<uint32_t>(seat.rank);
      const bool came =
          hw::wait_peer(p.rank[seat.rank].shards, epoch * static_cast<uint32_t>(p.ranks * p.ctas),
                        p.side[seat.rank].abort, {rank, rank, kShards});
      s.complete.store(came ? 1 : 0);
    }
    hw::cta_sync();
    return s.complete.load() != 0;
  }
  static HW_FN bool exchange(const Params& p, Smem& s, Seat seat, EpochBarrier& barrier) {
    if (!barrier.meet(s.came)) return false;
    hw::fence_proxy_alias();  // parts were written through their own addresses
    reduce(p, seat);
    if (!all_summed(p, s, seat, barrier.epoch())) return false;
    hw::fence_proxy_alias();  // sums were written through the multicast address
    return true;
  }

  static HW_FN void run(const Params& p, Smem& s) {
    const Seat seat = Seat::of(p.ctas);
    const typename Params::Rank& mine = p.rank[seat.rank];
    EpochBarrier barrier(p.side, p.ranks, p.ctas);
    const int all = p.ranks * p.cells;
    bool together = true;
    HW_LOOP for (int call = 0; call < p.calls; ++call) {
      const auto input = mine.input + call * all;
      const auto output = mine.output + call * all;
      const int first = seat.cta * kThreads + hw::thread(), stride = p.ctas * kThreads;
      if (together) {
        HW_LOOP for (int i = first; i < all; i += stride) {
          hw::st(mine.part + i, hw::ld(input + i));
        }
        together = exchange(p, s, seat, barrier);
      }
      HW_LOOP for (int i = first; i < all; i += stride) {
        hw::st(output + i, together ? hw::ld(mine.sum + i) : hw::Vec4{kNan, kNan, kNan, kNan});
      }
    }
  }
};

}  // namespace logitless::model_test
