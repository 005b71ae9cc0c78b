// SPDX-License-Identifier: Apache-2.0
// A ring of ranks that cannot reach each other's memory: parts go round by one-sided messages, and
// every rank adds them in tree order.
//
//   send warp      own part -> outbox --message--> the next rank's inbox, step 0
//   receive warp   inbox, step n -> outbox --message--> the next rank's inbox, step n + 1
//                  sum of the inbox and the own part, then a credit to the rank before
//
// Each CTA is a channel of its own and counts its chunks in epochs. Outbox and inbox are there
// twice, by the epoch's parity. The credit of an epoch says that its inbox may be overwritten, and
// also that every message of that epoch has arrived, so that its outbox may be. Messages do not
// wait for each other, so each parity has signals of its own: a late one cannot overwrite a newer
// one.
#pragma once

#include "cuda/hw/hw.h"
#include "kernels/push_add.h"  // tree_sum

namespace logitless::model_test {

struct HostRing {
  static constexpr int kThreads = 64, kCluster = 1;
  static constexpr int kCells = 32;  // of a chunk; 16 bytes each, one for each lane
  static constexpr uint32_t kChunkBytes = kCells * 16;

  struct Params {
    struct Rank {
      hw::Global<const hw::Float4> part;  // [CTAs, chunks, kCells]
      hw::Global<hw::Float4> sum;         // [CTAs, chunks, kCells]
      // symmetric memory; steps = ranks - 1
      hw::Global<hw::Float4> outbox, inbox;  // [CTAs, 2, steps, kCells]
      hw::Global<uint64_t> arrived;          // [CTAs, 2, steps]: the epoch that is in the inbox
      hw::Global<uint64_t> credit;           // [CTAs, 2]: the epoch that the next rank has used up
      hw::Global<hw::Vec4> note;  // [CTAs, 2]: what a credit carries: nothing, but a message
                                  // needs bytes
      // of the rank alone
      hw::Global<uint64_t> epoch;  // [CTAs]: chunks so far
      hw::Abort abort;
    };
    Rank rank[kMostRanks];  // a CTA touches its own rank's only
    int ranks, ctas, chunks;
  };
  enum PeerWaits : uint32_t { kArrived = 1, kCredit = 2 };
  enum Role { kSendWarp, kReceiveWarp };
  struct Smem {};

  /// One CTA's way round the ring.
  struct Channel {
    const Params::Rank& mine;
    int rank, next, before, cta, steps;
    uint64_t first;  // the epoch of the launch's first chunk

    HW_FN explicit Channel(const Params& p, Seat seat)
        : mine(p.rank[seat.rank]),
          rank(seat.rank),
          next((seat.rank + 1) % p.ranks),
          before((seat.rank + p.ranks - 1) % p.ranks),
          cta(seat.cta),
          steps(p.ranks - 1),
          first(hw::ld(mine.epoch + seat.cta) + 1) {}

    HW_FN int pair(uint64_t epoch) const { return cta * 2 + static_cast<int>(epoch & 1); }
    HW_FN int slot(uint64_t epoch, int step) const { return pair(epoch) * steps + step; }
    HW_FN hw::Global<hw::Float4> inbox(uint64_t epoch, int step) const {
      return mine.inbox + slot(epoch, step) * kCells;
    }
    /// The whole warp: until a signal of this rank has reached `value`.
    HW_FN bool reached(hw::Global<uint64_t> signal, uint64_t value, int peer,
                       PeerWaits what) const {
      const hw::PeerWait who{static_cast<uint32_t>(rank), static_cast<uint32_t>(peer), what};
      const bool comes = hw::lane() == 0 && hw::wait_peer(signal, value, mine.abort, who);
      const bool came = hw::shfl(comes ? 1 : 0, 0) != 0;
      hw::warp_sync();  // what lane 0 has acquired
      return came;
    }
    /// Until the messages of `epoch` have room: two epochs earlier the same places were in use.
    HW_FN bool has_room(uint64_t epoch) const {
      return reached(mine.credit + pair(epoch), epoch - 2, next, kCredit);
    }
    HW_FN bool has_arrived(uint64_t epoch, int step) const {
      return reached(mine.arrived + slot(epoch, step), epoch, before, kArrived);
    }
    /// The whole warp sends a chunk to the next rank, through the outbox.
    HW_FN void post(hw::Global<const hw::Float4> chunk, uint64_t epoch, int step) const {
      const auto from = mine.outbox + slot(epoch, step) * kCells;
      hw::st(from + hw::lane(), hw::ld(chunk + hw::lane()));
      hw::warp_sync();  // every lane has written its cell
      hw::put_signal(inbox(epoch, step), from, kChunkBytes, mine.arrived + slot(epoch, step), epoch,
                     next);
    }
    /// The whole warp lets the rank before use the places of `epoch` again.
    HW_FN void give_credit(uint64_t epoch) const {
      hw::warp_sync();  // every lane has read its cells
      hw::put_signal(mine.note + (cta * 2 + 1), mine.note + cta * 2, 16, mine.credit + pair(epoch),
                     epoch, before);
    }
  };

  static HW_FN void send(const Params& p, const Channel& c) {
    const auto part = c.mine.part + c.cta * p.chunks * kCells;
    HW_LOOP for (int i = 0; i < p.chunks; ++i) {
      const uint64_t epoch = c.first + static_cast<uint64_t>(i);
      if (!c.has_room(epoch)) return;
      c.post(part + i * kCells, epoch, 0);
    }
    // The last two credits: no message of this launch outlives it.
    const uint64_t end = c.first + static_cast<uint64_t>(p.chunks);
    if (c.has_room(end)) c.has_room(end + 1);
  }

  /// All steps of a chunk; what has not yet been everywhere goes on. False if the ring is broken.
  static HW_FN bool receive_chunk(const Channel& c, uint64_t epoch) {
    HW_LOOP for (int step = 0; step < c.steps; ++step) {
      if (!c.has_arrived(epoch, step)) return false;
      if (step + 1 == c.steps) continue;
      if (!c.has_room(epoch)) return false;
      c.post(hw::Global<const hw::Float4>(c.inbox(epoch, step).address()), epoch, step + 1);
    }
    return true;
  }
  /// This lane's cell of the sum. What arrives in step n began n + 1 ranks before.
  static HW_FN hw::Float4 add(const Params& p, const Channel& c, uint64_t epoch,
                              hw::Global<const hw::Float4> own) {
    hw::Float4 parts[kMostRanks] = {};
    HW_UNROLL for (int rank = 0; rank < kMostRanks; ++rank) {
      if (rank >= p.ranks) break;
      const int step = (c.rank - 1 - rank + p.ranks) % p.ranks;
      parts[rank] =
          rank == c.rank ? hw::ld(own + hw::lane()) : hw::ld(c.inbox(epoch, step) + hw::lane());
    }
    return tree_sum(parts, p.ranks);
  }
  static HW_FN void receive(const Params& p, const Channel& c) {
    bool whole = true;
    HW_LOOP for (int i = 0; i < p.chunks; ++i) {
      const uint64_t epoch = c.first + static_cast<uint64_t>(i);
      const int chunk = (c.cta * p.chunks + i) * kCells;
      whole = whole && receive_chunk(c, epoch);
      hw::st(c.mine.sum + (chunk + hw::lane()),
             whole ? add(p, c, epoch, c.mine.part + chunk) : not_a_number());
      if (whole) c.give_credit(epoch);
    }
  }

  static HW_FN void run(const Params& p, Smem&) {
    const Channel channel(p, Seat::of(p.ctas));
    if (hw::warp() == kSendWarp) {
      send(p, channel);
    } else {
      receive(p, channel);
    }
    hw::cta_sync();  // both warps have read the epoch
    if (hw::thread() == 0) {
      hw::st(channel.mine.epoch + channel.cta, channel.first + static_cast<uint64_t>(p.chunks) - 1);
    }
  }
};

}  // namespace logitless::model_test
