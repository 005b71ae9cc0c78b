// SPDX-License-Identifier: Apache-2.0
// The exchange of dX in small: every rank has a part of every tile; the tile's owner adds the
// parts, and the others take the sum.
//
//   fill warp --staged--> push warp --TMA store, pushed--> merge warp --summed--> gather warp
//   (part -> shared)      (-> the owner's slot)            (the owner's)          (-> every dX)
//
// An owner has a slot for each source and tile, twice: a rank that has ended its call may push for
// the next one while a slower owner still reads. It cannot be two calls ahead, because ending a
// call takes everybody's parts of that call.
#pragma once

#include "cuda/hw/hw.h"
#include "cuda/tile/ring.h"
#include "kernels/epoch_barrier.h"

namespace logitless::model_test {

HW_FN hw::Float4 as_floats(hw::Vec4 v) {
  return {hw::as_float(v.x), hw::as_float(v.y), hw::as_float(v.z), hw::as_float(v.w)};
}
HW_FN hw::Vec4 as_words(hw::Float4 v) {
  return {hw::as_bits(v.x), hw::as_bits(v.y), hw::as_bits(v.z), hw::as_bits(v.w)};
}
HW_FN hw::Float4 sum_of(hw::Float4 a, hw::Float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
HW_FN hw::Float4 not_a_number() {
  const float nan = hw::as_float(0x7FFFFFFF);
  return {nan, nan, nan, nan};
}

/// The sum in the order of the balanced tree over the rank index (src/comm/combine.h), whose bits
/// are the same on every rank: neighbours first, then pairs, then fours; who has no neighbour goes
/// on alone.
HW_FN hw::Float4 tree_sum(hw::Float4 (&parts)[kMostRanks], int ranks) {
  HW_UNROLL for (int step = 1; step < kMostRanks; step *= 2) {
    HW_UNROLL for (int r = 0; r + step < kMostRanks; r += 2 * step) {
      if (r + step < ranks) parts[r] = sum_of(parts[r], parts[r + step]);
    }
  }
  return parts[0];
}

struct PushAdd {
  static constexpr int kRows = 8, kColumns = 32, kStages = 2;
  static constexpr int kThreads = 128, kCluster = 1;
  static constexpr int kCells = kRows * kColumns / 4;  // of 16 bytes
  static constexpr uint32_t kTileBytes = kCells * 16;
  static_assert(kColumns * 4 == 128, "a swizzled row has 128 bytes");

  /// Each rank owns `tiles` tiles. `calls` calls follow each other as launches would; more than one
  /// lets the ranks drift apart.
  struct Params {
    struct Rank {
      hw::Global<const hw::Float4> part;  // [calls, owners, tiles, kCells]
      hw::TensorMap slots;                // [2, sources, tiles, kRows] rows of kColumns floats
      hw::Global<hw::Float4> shard;       // [calls, tiles, kCells]: sums of what this rank owns
      hw::Global<hw::Float4> dx;          // [calls, owners, tiles, kCells]
      hw::Global<uint32_t> pushed;        // [sources, tiles]: the epoch whose part is in its slot
      hw::Global<uint32_t> summed;  // [owners, tiles]: the epoch whose sum is in the owner's shard
      hw::Global<uint32_t> ended;   // CTAs x calls; cleared before each launch
      hw::Global<uint32_t> epoch;   // calls so far
      hw::Abort abort;
    };
    Rank rank[kMostRanks];
    int ranks, ctas, tiles, calls;
    bool gather;  // false: every rank keeps what it owns (sequence parallel)
  };
  enum PeerWaits : uint32_t { kPushed = 1, kSummed = 2 };
  enum Role { kFillWarp, kPushWarp, kMergeWarp, kGatherWarp };

  struct Smem {
    hw::Buffer<kTileBytes> staging[kStages];
    hw::Buffer<kTileBytes> slots[kMostRanks];
    tile::Ring<kStages> staged;
    hw::Barrier loaded;
  };
  static void describe(hw::Names& names) {
    names.add("staging", &Smem::staging);
    names.add("slots", &Smem::slots);
    tile::Ring<kStages>::describe(names, "staged.arrived", "staged.finished", &Smem::staged);
    names.add("loaded", &Smem::loaded);
  }

  /// Where a role stands.
  struct Place {
    Seat seat;
    int call;
    uint32_t epoch;
    tile::RingState<kStages> staged;
    tile::RingState<1> loaded;
  };
  /// A tile of the whole matrix. Owners are taken from the next rank on, so that not all ranks push
  /// to one of them at the same time.
  struct Tile {
    int owner, number;

    HW_FN Tile(const Params& p, const Place& at, int unit)
        : owner((at.seat.rank + 1 + unit / p.tiles) % p.ranks), number(unit % p.tiles) {}
  };
  static HW_FN hw::PeerWait who(const Place& at, int peer, PeerWaits what) {
    return {static_cast<uint32_t>(at.seat.rank), static_cast<uint32_t>(peer), what};
  }
  static HW_FN int slot_row(const Params& p, const Place& at, int source, int tile) {
    const auto parity = static_cast<int>(at.epoch & 1);
    return ((parity * p.ranks + source) * p.tiles + tile) * kRows;
  }
  static HW_FN uint32_t cell_address(const hw::Buffer<kTileBytes>& tile, int cell) {
    return hw::swizzled(hw::address(tile) + static_cast<uint32_t>(cell) * 16);
  }

  static HW_FN void fill(const Params& p, Smem& s, Place& at) {
    HW_LOOP for (int unit = at.seat.cta; unit < p.ranks * p.tiles; unit += p.ctas) {
      const Tile tile(p, at, unit);
      const int whole = (at.call * p.ranks + tile.owner) * p.tiles + tile.number;
      const auto part = p.rank[at.seat.rank].part + whole * kCells;
      const int stage = at.staged.stage;
      hw::wait(s.staged.finished[stage], at.staged.phase);
      HW_LOOP for (int cell = hw::lane(); cell < kCells; cell += 32) {
        hw::st_shared(cell_address(s.staging[stage], cell), as_words(hw::ld(part + cell)));
      }
      hw::fence_proxy_async();
      hw::arrive(s.staged.arrived[stage]);
      at.staged.advance();
    }
  }

  /// One thread. Once a wait of this rank has given up, nothing leaves it: its peers may be calls
  /// behind.
  static HW_FN void push(const Params& p, Smem& s, Place& at) {
    const auto raised = p.rank[at.seat.rank].abort.raised;
    HW_LOOP for (int unit = at.seat.cta; unit < p.ranks * p.tiles; unit += p.ctas) {
      const Tile tile(p, at, unit);
      const Params::Rank& owner = p.rank[tile.owner];
      const int stage = at.staged.stage;
      hw::wait(s.staged.arrived[stage], at.staged.phase);
      if (hw::ld<hw::Order::kRelaxed, hw::Scope::kGpu>(raised) == 0) {
        hw::tma_store(owner.slots, 0, slot_row(p, at, at.seat.rank, tile.number),
                      hw::address(s.staging[stage]));
        hw::bulk_commit();
        hw::bulk_wait<0>();  // not .read: the part must be there before its flag is
        hw::st<hw::Order::kRelease, hw::Scope::kSys>(
            owner.pushed + (at.seat.rank * p.tiles + tile.number), at.epoch);
      }
      hw::arrive(s.staged.finished[stage]);
      at.staged.advance();
    }
  }

  /// One thread: every source's part of a tile that this rank owns, into shared memory. False if
  /// one of them does not come.
  static HW_FN bool load_slots(const Params& p, Smem& s, const Place& at, int tile) {
    const Params::Rank& mine = p.rank[at.seat.rank];
    HW_LOOP for (int source = 0; source < p.ranks; ++source) {
      if (!hw::wait_peer(mine.pushed + (source * p.tiles + tile), at.epoch, mine.abort,
                         who(at, source, kPushed))) {
        return false;
      }
    }
    hw::fence_proxy_async_global();  // the flags were acquired, the copies come after them
    hw::arrive_expect(s.loaded, static_cast<uint32_t>(p.ranks) * kTileBytes);
    HW_LOOP for (int source = 0; source < p.ranks; ++source) {
      hw::tma_load(hw::address(s.slots[source]), mine.slots, 0, slot_row(p, at, source, tile),
                   hw::address(s.loaded));
    }
    return true;
  }
  static HW_FN hw::Float4 sum_slots(const Params& p, const Smem& s, int cell) {
    hw::Float4 parts[kMostRanks] = {};
    HW_UNROLL for (int source = 0; source < kMostRanks; ++source) {
      if (source >= p.ranks) break;
      parts[source] = as_floats(hw::ld_shared<hw::Vec4>(cell_address(s.slots[source], cell)));
    }
    return tree_sum(parts, p.ranks);
  }
  static HW_FN void merge(const Params& p, Smem& s, Place& at) {
    const Params::Rank& mine = p.rank[at.seat.rank];
    HW_LOOP for (int tile = at.seat.cta; tile < p.tiles; tile += p.ctas) {
      const bool loads = hw::lane() == 0 && load_slots(p, s, at, tile);
      if (hw::shfl(loads ? 1 : 0, 0) == 0) return;
      hw::wait(s.loaded, at.loaded.phase);
      at.loaded.advance();
      const auto shard = mine.shard + (at.call * p.tiles + tile) * kCells;
      HW_LOOP for (int cell = hw::lane(); cell < kCells; cell += 32) {
        hw::st(shard + cell, sum_slots(p, s, cell));
      }
      hw::warp_sync();  // every lane has written its cells, and read the slots
      if (hw::lane() == 0 && p.gather) {
        HW_LOOP for (int peer = 0; peer < p.ranks; ++peer) {
          hw::st<hw::Order::kRelease, hw::Scope::kSys>(
              p.rank[peer].summed + (at.seat.rank * p.tiles + tile), at.epoch);
        }
      }
    }
  }

  static HW_FN void gather(const Params& p, const Place& at) {
    const Params::Rank& mine = p.rank[at.seat.rank];
    HW_LOOP for (int unit = at.seat.cta; unit < p.ranks * p.tiles; unit += p.ctas) {
      const Tile tile(p, at, unit);
      const int in_matrix = tile.owner * p.tiles + tile.number;
      const bool comes = hw::lane() == 0 && hw::wait_peer(mine.summed + in_matrix, at.epoch,
                                                          mine.abort, who(at, tile.owner, kSummed));
      const bool came = hw::shfl(comes ? 1 : 0, 0) != 0;
      hw::warp_sync();  // what lane 0 has acquired
      const auto shard = p.rank[tile.owner].shard + (at.call * p.tiles + tile.number) * kCells;
      const auto dx = mine.dx + (at.call * p.ranks * p.tiles + in_matrix) * kCells;
      HW_LOOP for (int cell = hw::lane(); cell < kCells; cell += 32) {
        hw::st(dx + cell, came ? hw::ld(shard + cell) : not_a_number());
      }
    }
  }

  static HW_FN void run(const Params& p, Smem& s) {
    const int warp = hw::uniform(hw::warp());
    if (hw::thread() == 0) {
      s.staged.init(32 /* lanes of the fill warp */, 1 /* push thread */);
      hw::barrier_init(s.loaded, 1 /* merge lane that announces the bytes */);
      hw::fence_barrier_init();
    }
    hw::cta_sync();  // barriers are ready

    const Seat seat = Seat::of(p.ctas);
    const Params::Rank& mine = p.rank[seat.rank];
    Place at{.seat = seat,
             .call = 0,
             .epoch = hw::ld(mine.epoch),
             .staged = warp == kFillWarp ? tile::RingState<kStages>::producer()
                                         : tile::RingState<kStages>::consumer(),
             .loaded = tile::RingState<1>::consumer()};
    HW_LOOP for (; at.call < p.calls; ++at.call) {
      ++at.epoch;
      if (warp == kFillWarp) {
        fill(p, s, at);
      } else if (warp == kPushWarp) {
        if (hw::lane() == 0) push(p, s, at);
      } else if (warp == kMergeWarp) {
        merge(p, s, at);
      } else if (p.gather) {
        gather(p, at);
      }
      hw::cta_sync();  // the CTA has ended its call
      if (warp == kGatherWarp && hw::lane() == 0) {
        end_call(mine.ended, static_cast<uint32_t>(p.ctas * (at.call + 1)), mine.epoch, at.epoch);
      }
      hw::cta_sync();  // and so has its rank
    }
  }
};

}  // namespace logitless::model_test
