// SPDX-License-Identifier: Apache-2.0
// The first thing of a call: ranks tell each other what they were called with, before any data
// moves.
//
//   a rank's CTA 0   header -> every rank's inbox, then sent <- epoch (st.release.sys)
//   every CTA        waits for all headers; compares them with its own; joins the flags
//
// If two headers differ, both ranks and all others see it: each records the error and gives NaN. If
// a rank never comes, the others stop waiting, say for whom, and give NaN. The kernel ends in every
// case.
#pragma once

#include "cuda/hw/hw.h"
#include "kernels/epoch_barrier.h"

namespace logitless::model_test {

/// What a rank was called with. Flags are joined, everything else must agree.
struct Header {
  uint32_t tokens, hidden, dtype, flags, capacity;

  enum Flags : uint32_t {
    kWantsInputGrad = 1,
    kWantsWeightGrad = 2,
    kRefuses = 0x80000000,  // the sender's own arguments are wrong: nobody may go on
  };
};

/// Why a handshake fails; the first one of a rank stays until the host clears it.
struct HandshakeError {
  enum Reason : uint32_t {
    kNone,
    kTokensDiffer,
    kHiddenDiffers,
    kDtypeDiffers,
    kCapacityDiffers,
    kTooManyTokens,  // more than the capacity that all have
    kRefused,
  };
  /// Packed with the peer whose header shows it; 0: none.
  static HW_BOTH uint32_t pack(Reason reason, int peer) {
    return reason == kNone ? 0 : static_cast<uint32_t>(peer) << 8 | reason;
  }
};

struct Handshake {
  static constexpr int kThreads = 64, kCluster = 1;
  static constexpr int kCells = 2;  // of a header; 16 bytes each

  struct Params {
    struct Rank {
      Header header;
      hw::Global<hw::Vec4> inbox;     // [2, ranks, kCells], by the epoch's parity
      hw::Global<uint32_t> sent;      // [ranks]: the epoch whose header is in the inbox
      hw::Global<uint32_t> error;     // the first HandshakeError
      hw::Global<uint32_t> joined;    // [calls]: flags of all ranks that came
      hw::Global<const float> input;  // [header.tokens]
      hw::Global<float> output;       // [calls, header.tokens]: input + joined flags, or NaN
      hw::Global<uint32_t> ended;     // CTAs x calls; cleared before each launch
      hw::Global<uint32_t> epoch;     // calls so far
      hw::Abort abort;
    };
    Rank rank[kMostRanks];
    int ranks, ctas, calls;
    int absent;  // a rank that leaves at once, as if its process had died; or -1
  };
  static constexpr uint32_t kHeader = 1;  // PeerFailure::what

  struct Smem {
    hw::Cell<uint32_t> agreed, joined;
  };
  static void describe(hw::Names& names) {
    names.add("agreed", &Smem::agreed);
    names.add("joined", &Smem::joined);
  }

  static HW_FN int slot(const Params& p, uint32_t epoch, int rank) {
    return (static_cast<int>(epoch & 1) * p.ranks + rank) * kCells;
  }

  /// Each lane tells one rank. A rank that has given up sends nothing more: its peers may be calls
  /// behind.
  static HW_FN void send(const Params& p, Seat seat, uint32_t epoch) {
    const Header& h = p.rank[seat.rank].header;
    if (hw::lane() >= p.ranks) return;
    if (hw::ld<hw::Order::kRelaxed, hw::Scope::kGpu>(p.rank[seat.rank].abort.raised) != 0) return;
    const Params::Rank& peer = p.rank[hw::lane()];
    const auto to = peer.inbox + slot(p, epoch, seat.rank);
    hw::st(to, hw::Vec4{h.tokens, h.hidden, h.dtype, h.flags});
    hw::st(to + 1, hw::Vec4{h.capacity, 0, 0, 0});
    hw::st<hw::Order::kRelease, hw::Scope::kSys>(peer.sent + seat.rank, epoch);
  }

  static HW_FN HandshakeError::Reason compare(const Header& mine, const Header& theirs) {
    if ((theirs.flags & Header::kRefuses) != 0) return HandshakeError::kRefused;
    if (theirs.tokens != mine.tokens) return HandshakeError::kTokensDiffer;
    if (theirs.hidden != mine.hidden) return HandshakeError::kHiddenDiffers;
    if (theirs.dtype != mine.dtype) return HandshakeError::kDtypeDiffers;
    if (theirs.capacity != mine.capacity) return HandshakeError::kCapacityDiffers;
    if (theirs.tokens > theirs.capacity) return HandshakeError::kTooManyTokens;
    return HandshakeError::kNone;
  }

  struct Verdict {
    bool came;
    uint32_t flags, error;
  };
  /// What this lane thinks of its rank's header.
  static HW_FN Verdict judge(const Params& p, Seat seat, uint32_t epoch) {
    const Params::Rank& mine = p.rank[seat.rank];
    const int peer = hw::lane();
    if (peer >= p.ranks) return {.came = true, .flags = 0, .error = 0};
    const hw::PeerWait who{static_cast<uint32_t>(seat.rank), static_cast<uint32_t>(peer), kHeader};
    if (!hw::wait_peer(mine.sent + peer, epoch, mine.abort, who)) {
      return {.came = false, .flags = 0, .error = 0};
    }
    const auto from = mine.inbox + slot(p, epoch, peer);
    const hw::Vec4 a = hw::ld(from), b = hw::ld(from + 1);
    const Header theirs{a.x, a.y, a.z, a.w, b.x};
    return {true, theirs.flags, HandshakeError::pack(compare(mine.header, theirs), peer)};
  }
  /// The warp's: all came, the flags joined, the error of the lowest peer.
  static HW_FN Verdict join(Verdict v) {
    v.came = hw::ballot(v.came) == 0xFFFFFFFF;
    HW_UNROLL for (int mask = 16; mask > 0; mask /= 2) {
      v.flags |= hw::shfl_xor(v.flags, mask);
      const uint32_t other = hw::shfl_xor(v.error, mask);
      if (v.error == 0 || (other != 0 && other < v.error)) v.error = other;
    }
    return v;
  }
  /// One thread of a rank keeps what it found.
  static HW_FN void record(const Params& p, Seat seat, int call, const Verdict& v) {
    const Params::Rank& mine = p.rank[seat.rank];
    hw::st(mine.joined + call, v.flags);
    if (v.error != 0 && hw::ld(mine.error) == 0) hw::st(mine.error, v.error);
  }

  /// The first warp exchanges headers for its CTA.
  static HW_FN void exchange(const Params& p, Smem& s, Seat seat, int call, uint32_t epoch) {
    if (seat.cta == 0) send(p, seat, epoch);
    const Verdict v = join(judge(p, seat, epoch));
    if (hw::lane() != 0) return;
    if (seat.cta == 0) record(p, seat, call, v);
    s.agreed.store(v.came && v.error == 0 ? 1 : 0);
    s.joined.store(v.flags);
  }
  static HW_FN void write(const Params& p, const Smem& s, Seat seat, int call) {
    const Params::Rank& mine = p.rank[seat.rank];
    const auto tokens = static_cast<int>(mine.header.tokens);
    const bool agreed = s.agreed.load() != 0;
    const auto joined = static_cast<float>(s.joined.load());
    HW_LOOP for (int i = seat.cta * kThreads + hw::thread(); i < tokens; i += p.ctas * kThreads) {
      hw::st(mine.output + (call * tokens + i),
             agreed ? hw::ld(mine.input + i) + joined : hw::as_float(0x7FFFFFFF));
    }
  }

  static HW_FN void run(const Params& p, Smem& s) {
    const Seat seat = Seat::of(p.ctas);
    if (seat.rank == p.absent) return;
    const Params::Rank& mine = p.rank[seat.rank];
    uint32_t epoch = hw::ld(mine.epoch);
    HW_LOOP for (int call = 0; call < p.calls; ++call) {
      ++epoch;
      if (hw::warp() == 0) exchange(p, s, seat, call, epoch);
      hw::cta_sync();  // the CTA has read the inbox, and knows whether all agree
      write(p, s, seat, call);
      if (hw::thread() == 0) {
        end_call(mine.ended, static_cast<uint32_t>(p.ctas * (call + 1)), mine.epoch, epoch);
      }
      hw::cta_sync();  // every CTA of the rank has read the inbox, and this one its verdict
    }
  }
};

}  // namespace logitless::model_test
