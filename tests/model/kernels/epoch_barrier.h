// SPDX-License-Identifier: Apache-2.0
// A barrier over all CTAs of all ranks, and a kernel that exchanges words through it.
//
//   every CTA           arrived += 1                            (within the rank, .acq_rel.gpu)
//   a rank's last CTA   epoch += 1; every rank's inbox <- epoch (st.release.sys)
//   every CTA           waits until its rank's inbox holds the epoch of every rank
//
// Epochs only grow, so nothing has to be reset. They live in device memory: as an argument they
// would be frozen in a CUDA graph.
#pragma once

#include "cuda/hw/hw.h"

namespace logitless::model_test {

inline constexpr int kMostRanks = 8;

/// Several ranks share a launch; each has a block of `ctas` CTAs.
struct Seat {
  int rank, cta;  // the CTA's number in its rank

  static HW_FN Seat of(int ctas) { return {hw::cluster_id() / ctas, hw::cluster_id() % ctas}; }
};

/// What each rank has for a barrier.
struct BarrierSide {
  hw::Global<uint32_t> arrived;  // CTAs of the rank, in this launch; cleared before each launch
  hw::Global<uint32_t> inbox;    // [ranks]: the last barrier that each rank has come to
  hw::Global<uint32_t> epoch;    // barriers that this rank has come to, ever
  hw::Abort abort;
};

class EpochBarrier {
 public:
  static constexpr uint32_t kWait = 1;  // PeerFailure::what

  HW_FN EpochBarrier(const BarrierSide* sides, int ranks, int ctas)
      : sides_(sides),
        ranks_(ranks),
        ctas_(static_cast<uint32_t>(ctas)),
        rank_(Seat::of(ctas).rank),
        epoch_(hw::ld(sides[rank_].epoch)) {}

  /// All threads of all CTAs of all ranks; then each sees what the others wrote before it. False,
  /// in every thread of the CTA, if another rank did not come. `came` is for this function alone.
  HW_FN bool meet(hw::Cell<uint32_t>& came) {
    ++epoch_;
    ++meetings_;
    hw::cta_sync();  // the whole CTA has arrived
    if (hw::thread() == 0) {
      arrive();
      came.store(wait() ? 1 : 0);
    }
    hw::cta_sync();
    return came.load() != 0;
  }
  /// Barriers so far, this rank's first launch included; counted modulo 2^32.
  HW_FN uint32_t epoch() const { return epoch_; }

 private:
  HW_FN void arrive() {
    const BarrierSide& mine = sides_[rank_];
    const uint32_t before = hw::add<hw::Order::kAcqRel, hw::Scope::kGpu>(mine.arrived, 1);
    if (before + 1 != ctas_ * meetings_) return;
    // The last CTA has acquired what the others released, and speaks for all of them.
    hw::st(mine.epoch, epoch_);
    HW_LOOP for (int peer = 0; peer < ranks_; ++peer) {
      hw::st<hw::Order::kRelease, hw::Scope::kSys>(sides_[peer].inbox + rank_, epoch_);
    }
  }
  HW_FN bool wait() {
    const BarrierSide& mine = sides_[rank_];
    HW_LOOP for (int peer = 0; peer < ranks_; ++peer) {
      const hw::PeerWait who{static_cast<uint32_t>(rank_), static_cast<uint32_t>(peer), kWait};
      if (!hw::wait_peer(mine.inbox + peer, epoch_, mine.abort, who)) return false;
    }
    return true;
  }

  const BarrierSide* sides_;
  int ranks_;
  uint32_t ctas_;
  int rank_;
  uint32_t epoch_;
  uint32_t meetings_ = 0;  // of this launch
};

/// One thread of each CTA of a rank: the end of a call. When it returns, the rank's other CTAs have
/// ended the call as well, as if the next one were another launch. `arrivals`: CTAs x calls so far.
HW_FN void end_call(hw::Global<uint32_t> ended, uint32_t arrivals, hw::Global<uint32_t> epoch,
                    uint32_t value) {
  const uint32_t before = hw::add<hw::Order::kAcqRel, hw::Scope::kGpu>(ended, 1);
  if (before + 1 == arrivals) hw::st(epoch, value);  // everyone has read the old one
  hw::wait_flag<hw::Order::kAcquire, hw::Scope::kGpu>(ended, arrivals);
}

/// Rounds: every thread writes a word to its rank's board, meets, and adds up what the threads of
/// its neighbour's number have written in all CTAs of all ranks. Two boards are enough: who writes
/// to one again has met everybody after they read it.
struct BarrierRounds {
  static constexpr int kThreads = 64, kCluster = 1;
  static constexpr uint32_t kNothing = 0xFFFFFFFF;  // in place of a sum, if another rank is missing

  struct Params {
    struct Rank {
      hw::Global<const uint32_t> words;  // [rounds, CTAs, threads]
      hw::Global<uint32_t> board;        // [2, CTAs, threads]
      hw::Global<uint32_t> sums;         // [rounds, CTAs, threads]
    };
    Rank rank[kMostRanks];
    BarrierSide side[kMostRanks];
    int ranks, ctas, rounds;
  };
  struct Smem {
    hw::Cell<uint32_t> came;
  };
  static void describe(hw::Names& names) { names.add("came", &Smem::came); }

  /// Words of a board; each counts with a factor of its own, so that none can stand for another.
  static HW_FN uint32_t add_boards(const Params& p, uint32_t board, int thread) {
    uint32_t sum = 0;
    HW_LOOP for (int i = 0; i < p.ranks * p.ctas; ++i) {
      const auto from = p.rank[i / p.ctas].board + (board * p.ctas + i % p.ctas) * kThreads;
      sum += hw::ld(from + thread) * static_cast<uint32_t>(2 * i + 1);
    }
    return sum;
  }

  static HW_FN void run(const Params& p, Smem& s) {
    const Seat seat = Seat::of(p.ctas);
    const Params::Rank& mine = p.rank[seat.rank];
    EpochBarrier barrier(p.side, p.ranks, p.ctas);
    bool together = true;
    HW_LOOP for (int round = 0; round < p.rounds; ++round) {
      const int at = (round * p.ctas + seat.cta) * kThreads + hw::thread();
      if (together) {
        const uint32_t board = (barrier.epoch() + 1) & 1;
        hw::st(mine.board + ((board * p.ctas + seat.cta) * kThreads + hw::thread()),
               hw::ld(mine.words + at));
        together = barrier.meet(s.came);
        if (together) {
          hw::st(mine.sums + at, add_boards(p, board, (hw::thread() + 1) % kThreads));
        }
      }
      if (!together) hw::st(mine.sums + at, kNothing);
    }
  }
};

}  // namespace logitless::model_test
