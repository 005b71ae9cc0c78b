// SPDX-License-Identifier: Apache-2.0
// mbarriers: phases, arrivals, bytes, and what they order.
#include <algorithm>

#include "cuda/tile/ring.h"
#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Order;
using hw::Scope;

TEST_CASE("addresses of the same place in other CTAs") {
  CHECK(hw::leader_address(0x03000410) == 0x02000410);
  CHECK(hw::leader_address(0x02000410) == 0x02000410);
  CHECK(hw::cta_address(0x03000410, 0) == 0x00000410);
  CHECK(hw::cta_address(0x00000410, 7) == 0x07000410);
}

// --- phases and counts -----------------------------------------------------------------------------------

/// One thread looks at the parities of a barrier that two arrivals complete.
struct Phases : Kernel<> {
  struct Smem {
    hw::Barrier barrier;
  };
  static void run(const Params&, Smem& s) {
    if (hw::lane() != 0) return;
    hw::barrier_init(s.barrier, 2);
    CHECK(hw::test(s.barrier, 1));  // a fresh barrier has completed the phase before its first
    CHECK_FALSE(hw::test(s.barrier, 0));
    hw::wait(s.barrier, 1);
    hw::arrive(s.barrier);
    CHECK_FALSE(hw::test(s.barrier, 0));
    hw::arrive(s.barrier);
    CHECK(hw::test(s.barrier, 0));
    CHECK_FALSE(hw::test(s.barrier, 1));
    hw::wait(s.barrier, 0);
    hw::arrive_at(hw::address(s.barrier));
    hw::arrive_at<Scope::kCluster>(hw::address(s.barrier));
    CHECK(hw::test(s.barrier, 1));
    CHECK_FALSE(hw::test(s.barrier, 0));
  }
};

TEST_CASE("a phase ends with the last of its arrivals") { expect<Phases>({}, {}); }

/// Warp 0 fills words that warp 1 drains, through global memory.
struct Relay : Kernel<2> {
  static constexpr int kStages = 3, kRounds = 10;
  struct Params {
    hw::Global<uint32_t> slots, out;
    bool producer_starts_ahead;
  };
  struct Smem {
    tile::Ring<kStages> ring;
  };
  static void describe(hw::Names& names) {
    tile::Ring<kStages>::describe(names, "ring.arrived", "ring.finished", &Smem::ring);
  }
  static void produce(const Params& p, Smem& s) {
    auto slot = p.producer_starts_ahead ? tile::RingState<kStages>::producer()
                                        : tile::RingState<kStages>::consumer();
    for (uint32_t round = 0; round < kRounds; ++round, slot.advance()) {
      hw::wait(s.ring.finished[slot.stage], slot.phase);
      hw::st(p.slots + (slot.stage * 32 + hw::lane()), round * 100 + hw::lane());
      hw::arrive(s.ring.arrived[slot.stage]);
    }
  }
  static void consume(const Params& p, Smem& s) {
    auto slot = tile::RingState<kStages>::consumer();
    for (int round = 0; round < kRounds; ++round, slot.advance()) {
      hw::wait(s.ring.arrived[slot.stage], slot.phase);
      // A word of another lane: all 32 arrivals count.
      const uint32_t value = hw::ld(p.slots + (slot.stage * 32 + 31 - hw::lane()));
      hw::st(p.out + (round * 32 + hw::lane()), value);
      hw::arrive(s.ring.finished[slot.stage]);
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) s.ring.init(32 /* lanes of warp 0 */, 32 /* lanes of warp 1 */);
    hw::warp_sync();
    hw::cta_sync();
    if (hw::warp() == 0) {
      produce(p, s);
    } else {
      consume(p, s);
    }
  }
};

TEST_CASE("a ring between two warps") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    World world;
    const Relay::Params p{world.allocate<uint32_t>("slots", 32 * Relay::kStages),
                          world.allocate<uint32_t>("out", 32 * Relay::kRounds), true};
    const Report report = hw::launch<Relay>(world, 1, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto out = world.download(p.out, 32 * Relay::kRounds);
    for (uint32_t i = 0; i < out.size(); ++i) {
      if (out[i] != i / 32 * 100 + 31 - i % 32) return "out[" + std::to_string(i) + "]";
    }
    return "";
  });
}

TEST_CASE("a wrong first phase is a deadlock that says who waits for what") {
  expect_of<Relay>({},
                   {"deadlock:", "cluster 0 cta 0 warp 0 (produce, mbarrier_test.cpp:",
                    "waits for ring.finished[0], parity 0: phase 0 is open, 32 of 32 arrivals "
                    "missing [32 lanes]",
                    "cluster 0 cta 0 warp 1 (consume, mbarrier_test.cpp:",
                    "waits for ring.arrived[0], parity 0: phase 0 is open, 32 of 32 arrivals "
                    "missing [32 lanes]"},
                   [](World& world) {
                     return Relay::Params{world.allocate<uint32_t>("slots", 32 * Relay::kStages),
                                          world.allocate<uint32_t>("out", 32 * Relay::kRounds),
                                          false};
                   });
}

// --- misuse ----------------------------------------------------------------------------------------------

/// One thread of CTA 0 misuses a barrier.
struct Misuse : Kernel<1, 2> {
  enum Act {
    kNone,
    kArrivesWithoutInit,
    kWaitsWithoutInit,
    kTestsWithoutInit,
    kExpectsWithoutInit,
    kInitTwice,
    kCountZero,
    kCountTooLarge,
    kCountLargest,
    kTooManyArrivals,
    kTooManyBytes,
    kMostBytes,
    kArrivesAtNobody,
    kOtherPhase,
    kWaitsForMoreArrivals,
    kRemoteWithoutInit
  };
  struct Params {
    Act act;
  };
  struct Smem {
    hw::Barrier full;
  };
  static void describe(hw::Names& names) { names.add("full", &Smem::full); }
  static uint32_t count(Act act) {
    return act == kCountZero              ? 0
           : act == kCountTooLarge        ? 1U << 20
           : act == kCountLargest         ? (1U << 20) - 1
           : act == kWaitsForMoreArrivals ? 5
                                          : 1;
  }
  static bool initialises(Act act) {
    return act < kArrivesWithoutInit || act > kExpectsWithoutInit;
  }
  static void act(const Params& p, Smem& s) {
    switch (p.act) {
      case kArrivesWithoutInit:
        return hw::arrive(s.full);
      case kWaitsWithoutInit:
        return hw::wait(s.full, 0);
      case kTestsWithoutInit:
        hw::test(s.full, 0);
        return;
      case kExpectsWithoutInit:
        return hw::expect(s.full, 16);
      case kInitTwice:
        return hw::barrier_init(s.full, 1);
      case kTooManyArrivals:
        hw::arrive_expect(s.full, 16);
        return hw::arrive(s.full);
      case kTooManyBytes:
        hw::expect(s.full, 0xFFFFF);
        return hw::arrive_expect(s.full, 1);
      case kMostBytes:
        return hw::arrive_expect(s.full, 0xFFFFF);
      case kArrivesAtNobody:
        return hw::arrive_at(hw::cta_address(hw::address(s.full), 2));
      case kOtherPhase:
        hw::arrive(s.full);
        return hw::wait(s.full, 1);
      case kWaitsForMoreArrivals:
        hw::arrive(s.full);
        hw::arrive_expect(s.full, 64);
        return hw::wait(s.full, 0);
      case kRemoteWithoutInit:
        return hw::arrive_at(hw::cta_address(hw::address(s.full), 1));
      default:
        return;
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::cta_rank() == 0 && hw::lane() == 0) {
      if (initialises(p.act)) hw::barrier_init(s.full, count(p.act));
      act(p, s);
    }
    // CTA 1 stays until the end.
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
  }
};

TEST_CASE("a barrier misused") {
  struct Case {
    Misuse::Act act;
    Words words;
  };
  const Case cases[] = {
      {Misuse::kNone, {}},
      {Misuse::kCountLargest, {}},
      {Misuse::kArrivesWithoutInit,
       {"cluster 0 cta 0 warp 0 lane 0 (act, mbarrier_test.cpp:",
        "mbarrier.arrive: no mbarrier has been initialised at full of CTA 0"}},
      {Misuse::kWaitsWithoutInit, {"mbarrier.try_wait: no mbarrier has been initialised at full"}},
      {Misuse::kTestsWithoutInit, {"mbarrier.test_wait: no mbarrier has been initialised at full"}},
      {Misuse::kExpectsWithoutInit,
       {"mbarrier.expect_tx: no mbarrier has been initialised at full"}},
      {Misuse::kInitTwice, {"mbarrier.init: full is initialised twice"}},
      {Misuse::kCountZero, {"mbarrier.init: full with a count of 0"}},
      {Misuse::kCountTooLarge, {"mbarrier.init: full with a count of 1048576"}},
      {Misuse::kTooManyArrivals,
       {"mbarrier.arrive: mbarrier full gets more arrivals in a phase than its count, 1"}},
      {Misuse::kTooManyBytes,
       {"mbarrier.arrive.expect_tx: mbarrier full has 1048576 bytes outstanding, more than its "
        "tx-count can hold"}},
      {Misuse::kMostBytes, {"CTA 0 exits, and mbarrier full expected 1048575 bytes and got 0"}},
      {Misuse::kArrivesAtNobody,
       {"mbarrier.arrive: address 0x02000400 names CTA 2 of a cluster of 2"}},
      {Misuse::kOtherPhase,
       {"deadlock:",
        "waits for full, parity 1: phase 1 is open, 1 of 1 arrivals missing [1 lane]"}},
      {Misuse::kWaitsForMoreArrivals,
       {"deadlock:",
        "waits for full, parity 0: phase 0 is open, 3 of 5 arrivals missing, 64 bytes "
        "expected, 0 delivered [1 lane]"}},
      {Misuse::kRemoteWithoutInit,
       {"mbarrier.arrive: no mbarrier has been initialised at full of CTA 1"}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.act));
    expect<Misuse>({each.act}, each.words, {.seeds = 3});
  }
}

// --- bytes -----------------------------------------------------------------------------------------------

/// A copy of 64 bytes, announced in one of several ways.
struct Bytes : Kernel<> {
  enum Way {
    kArriveExpect,
    kExpectThenArrive,
    kArriveAfterCopy,  // the bytes may come before they are announced
    kTestLoop,
    kTooFew,
    kTooMany,
    kNotAnnounced,
    kNoArrival,
    kNoInitFence,
    kNobodyWaits,
    kNobodyKnows  // neither announced nor waited for
  };
  struct Params {
    Way way;
    hw::Global<uint32_t> line, out;
  };
  struct Smem {
    hw::Buffer<64, 128> tile;
    hw::Barrier full;
  };
  static void describe(hw::Names& names) {
    names.add("tile", &Smem::tile);
    names.add("full", &Smem::full);
  }
  static void announce(Way way, Smem& s) {
    switch (way) {
      case kExpectThenArrive:
        hw::expect(s.full, 40);
        hw::expect(s.full, 24);
        return hw::arrive(s.full);
      case kTooFew:
        return hw::arrive_expect(s.full, 48);
      case kTooMany:
        return hw::arrive_expect(s.full, 80);
      case kNotAnnounced:
        return hw::arrive(s.full);
      case kNoArrival:
        return hw::expect(s.full, 64);
      case kArriveAfterCopy:
      case kNobodyKnows:
        return;
      default:
        return hw::arrive_expect(s.full, 64);
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    hw::barrier_init(s.full, 1);
    if (p.way != kNoInitFence) hw::fence_barrier_init();
    announce(p.way, s);
    hw::bulk_load(hw::address(s.tile), p.line, 64, hw::address(s.full));
    if (p.way == kArriveAfterCopy) hw::arrive_expect(s.full, 64);
    if (p.way == kNobodyWaits || p.way == kNobodyKnows) return;
    if (p.way == kTestLoop) {
      while (!hw::test(s.full, 0)) hw::pause();
    } else {
      hw::wait(s.full, 0);
    }
    hw::st(p.out, hw::ld_shared<uint32_t>(hw::address(s.tile) + 60));
  }
};

std::string copy_bytes(Bytes::Way way, uint64_t seed, const Words& words) {
  World world;
  const Bytes::Params p{way, world.filled<uint32_t>("line", 16, 5),
                        world.allocate<uint32_t>("out", 1)};
  const Report report = hw::launch<Bytes>(world, 1, p, {.seed = seed});
  if (!words.empty() || !report.ok) return verdict(report, words);
  return world.download(p.out, 1)[0] == 5 ? "" : "the bytes have not come";
}

TEST_CASE("a phase ends when its bytes have come too") {
  for (const auto way : {Bytes::kArriveExpect, Bytes::kExpectThenArrive, Bytes::kArriveAfterCopy,
                         Bytes::kTestLoop}) {
    CAPTURE(static_cast<int>(way));
    for_seeds(9, [&](uint64_t seed) { return copy_bytes(way, seed, {}); });
  }
}
TEST_CASE("bytes that do not match what was announced") {
  const auto fails = [](Bytes::Way way, const Words& words) {
    CAPTURE(static_cast<int>(way));
    for_seeds(9, [&](uint64_t seed) { return copy_bytes(way, seed, words); });
  };
  // What comes too much is still there when the phase has ended or never ends.
  fails(Bytes::kTooFew, {"full"});
  on_some_seed(9, [](uint64_t seed) {
    return copy_bytes(Bytes::kTooFew, seed, {"deadlock:", "48 bytes expected, 64 delivered"})
        .empty();
  });
  fails(Bytes::kTooMany,
        {"deadlock:",
         "waits for full, parity 0: phase 0 is open, 0 of 1 arrivals missing, 80 bytes "
         "expected, 64 delivered [1 lane]"});
  fails(Bytes::kNoArrival, {"deadlock:",
                            "phase 0 is open, 1 of 1 arrivals missing, 64 bytes "
                            "expected, 64 delivered [1 lane]"});
  fails(Bytes::kNoInitFence,
        {"bulk load: mbarrier full of CTA 0 was initialised without fence.mbarrier_init"});
  on_some_seed(60, [](uint64_t seed) {
    return copy_bytes(Bytes::kNobodyWaits, seed,
                      {"CTA 0 exits, and mbarrier full expected 64 bytes and got 0"})
        .empty();
  });
  on_some_seed(60, [](uint64_t seed) {
    return copy_bytes(Bytes::kNobodyKnows, seed,
                      {"CTA 0 exits while an asynchronous copy writes tile"})
        .empty();
  });
  // Not announced: the phase ends at once, and the tile is not there yet.
  fails(Bytes::kNotAnnounced, {"cluster 0 cta 0"});
  on_some_seed(20, [](uint64_t seed) {
    return copy_bytes(Bytes::kNotAnnounced, seed,
                      {"ld.shared of tile+60 while an asynchronous copy writes it"})
        .empty();
  });
  on_some_seed(20, [](uint64_t seed) {
    return copy_bytes(Bytes::kNotAnnounced, seed,
                      {"CTA 0 exits, and mbarrier full expected 0 bytes and got 64"})
        .empty();
  });
}

/// Seventeen copies of 64 KB that nobody has announced.
struct Flood : Kernel<> {
  struct Params {
    hw::Global<uint32_t> line;
  };
  struct Smem {
    hw::Buffer<64 << 10> tile[3];
    hw::Barrier full, landed;
  };
  static void describe(hw::Names& names) {
    names.add("full", &Smem::full);
    names.add("landed", &Smem::landed);
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    hw::barrier_init(s.full, 2);
    hw::barrier_init(s.landed, 1);
    hw::fence_barrier_init();
    for (int i = 0; i < 17; ++i) {
      hw::bulk_load(hw::address(s.tile[i % 3]), p.line, 64 << 10, hw::address(s.full));
      // So that no two copies go to one place: a word after the copy of the round before last.
      hw::arrive_expect(s.landed, 16);
      hw::bulk_load(hw::address(s.tile[(i + 1) % 3]), p.line, 16, hw::address(s.landed));
      hw::wait(s.landed, static_cast<uint32_t>(i) & 1);
    }
  }
};

TEST_CASE("more bytes than a tx-count can hold come unannounced") {
  on_some_seed(9, [](uint64_t seed) {
    World world;
    const Flood::Params p{world.filled<uint32_t>("line", 16 << 10, 5)};
    return faults(
               hw::launch<Flood>(world, 1, p, {.seed = seed * 3 + 2}),
               {"bulk load: mbarrier full has -1048576 bytes outstanding, more than its tx-count "
                "can hold"})
        .empty();
  });
}

// --- other CTAs ------------------------------------------------------------------------------------------

/// CTA 1 has a word for CTA 0, and arrives at its barrier.
struct Remote : Kernel<1, 2> {
  enum Way {
    kAtCluster,
    kArrivePlain,
    kWaitPlain,
    kExpectPlain,
    kNoInitFence,
    kTestAtCluster,
    kTestPlain
  };
  struct Params {
    Way way;
    hw::Global<uint32_t> data, out;
  };
  struct Smem {
    hw::Barrier full;
  };
  static void describe(hw::Names& names) { names.add("full", &Smem::full); }
  static void give(const Params& p, Smem& s) {
    hw::st(p.data, 2);
    const uint32_t full = hw::cta_address(hw::address(s.full), 0);
    if (p.way == kArrivePlain) return hw::arrive_at(full);
    if (p.way == kExpectPlain) return hw::arrive_expect_at(full, 0);
    hw::arrive_at<Scope::kCluster>(full);
  }
  static void take(const Params& p, Smem& s) {
    switch (p.way) {
      case kWaitPlain:
        hw::wait(s.full, 0);
        break;
      case kTestAtCluster:
        while (!hw::test<Scope::kCluster>(s.full, 0)) hw::pause();
        break;
      case kTestPlain:
        while (!hw::test(s.full, 0)) hw::pause();
        break;
      default:
        hw::wait<Scope::kCluster>(s.full, 0);
    }
    hw::st(p.out, hw::ld(p.data));
  }
  static void run(const Params& p, Smem& s) {
    if (hw::cta_rank() == 0 && hw::lane() == 0) {
      hw::barrier_init(s.full, 1);
      if (p.way != kNoInitFence) hw::fence_barrier_init();
    }
    hw::warp_sync();
    hw::cluster_arrive_relaxed();
    hw::cluster_wait();
    if (hw::lane() == 0) {
      if (hw::cta_rank() == 1) {
        give(p, s);
      } else {
        take(p, s);
      }
    }
    hw::warp_sync();
    hw::cluster_arrive_relaxed();
    hw::cluster_wait();
  }
};

TEST_CASE("an arrival from another CTA orders what it did only at cluster scope, on both sides") {
  const auto make = [](Remote::Way way) {
    return [way](World& world) {
      return Remote::Params{way, world.filled<uint32_t>("data", 1, 1),
                            world.allocate<uint32_t>("out", 1)};
    };
  };
  for (const auto way : {Remote::kAtCluster, Remote::kTestAtCluster}) {
    for_seeds(9, [&](uint64_t seed) -> std::string {
      World world;
      const Remote::Params p = make(way)(world);
      const Report report = hw::launch<Remote>(world, 1, p, {.seed = seed});
      if (!report.ok) return report.what;
      return world.download(p.out, 1)[0] == 2 ? "" : "the word is old";
    });
  }
  for (const auto way :
       {Remote::kArrivePlain, Remote::kWaitPlain, Remote::kExpectPlain, Remote::kTestPlain}) {
    CAPTURE(static_cast<int>(way));
    expect_of<Remote>({.seeds = 9},
                      {"cluster 0 cta 0 warp 0 lane 0 (take, mbarrier_test.cpp:",
                       "ld.global at data+0, which cluster 0 cta 1 wrote (give, mbarrier_test.cpp:",
                       "nothing orders this after that"},
                      make(way));
  }
  expect_of<Remote>({},
                    {"mbarrier.arrive: mbarrier full of CTA 0 was initialised without "
                     "fence.mbarrier_init"},
                    make(Remote::kNoInitFence));
}

/// CTA 1 leaves; CTA 0 arrives at its barrier until it notices.
struct Left : Kernel<1, 2> {
  struct Smem {
    hw::Barrier full;
  };
  static void run(const Params&, Smem& s) {
    if (hw::lane() == 0) {
      hw::barrier_init(s.full, 1U << 19);
      hw::fence_barrier_init();
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::cta_rank() == 1 || hw::lane() != 0) return;
    for (int i = 0; i < 1 << 17; ++i) {
      hw::arrive_at(hw::cta_address(hw::address(s.full), 1));
      hw::pause();
    }
  }
};

TEST_CASE("an arrival at a CTA that has left") {
  expect<Left>({}, {"cluster 0 cta 0", "mbarrier.arrive: CTA 1 of the cluster has exited"});
}

// --- st.async --------------------------------------------------------------------------------------------

/// CTA 0 writes words into CTA 1, whose barrier hears of them.
struct StoreAsync : Kernel<1, 2> {
  enum Flaw {
    kNone,
    kOtherBarrier,
    kMisaligned,
    kNoInitFence,
    kTwoAtOnePlace,
    kOnBarrier,
    kReadsEarly,
    kLeaves
  };
  static constexpr uint32_t kWords = 8;
  struct Params {
    Flaw flaw;
    hw::Global<uint32_t> out;
  };
  struct Smem {
    hw::Buffer<kWords * 4, 16> words;
    hw::Barrier full;
  };
  static void describe(hw::Names& names) {
    names.add("words", &Smem::words);
    names.add("full", &Smem::full);
  }
  static void give(const Params& p, Smem& s) {
    const uint32_t words = hw::cta_address(hw::address(s.words), 1);
    const uint32_t full = hw::cta_address(hw::address(s.full), 1);
    for (uint32_t i = 0; i < kWords; ++i) {
      uint32_t to = words + i * 4;
      if (p.flaw == kMisaligned) to += 2;
      if (p.flaw == kTwoAtOnePlace) to = words;
      if (p.flaw == kOnBarrier) to = full;
      hw::store_async(to, 100 + i, p.flaw == kOtherBarrier ? hw::address(s.full) : full);
    }
  }
  static void take(const Params& p, Smem& s) {
    if (p.flaw != kReadsEarly) hw::wait<Scope::kCluster>(s.full, 0);
    for (uint32_t i = 0; i < kWords; ++i) {
      hw::st(p.out + i, hw::ld_shared<uint32_t>(hw::address(s.words) + i * 4));
    }
    if (p.flaw == kReadsEarly) hw::wait<Scope::kCluster>(s.full, 0);
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() == 0) {
      hw::barrier_init(s.full, 1);
      if (p.flaw != kNoInitFence) hw::fence_barrier_init();
      if (hw::cta_rank() == 1) hw::arrive_expect(s.full, kWords * 4);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::lane() != 0) return;
    if (hw::cta_rank() == 0) {
      give(p, s);
    } else if (p.flaw != kLeaves) {
      take(p, s);
    }
  }
};

TEST_CASE("st.async: words, and 4 bytes each on a barrier of the same CTA") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    World world;
    const StoreAsync::Params p{StoreAsync::kNone,
                               world.allocate<uint32_t>("out", StoreAsync::kWords)};
    const Report report = hw::launch<StoreAsync>(world, 1, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto out = world.download(p.out, StoreAsync::kWords);
    for (uint32_t i = 0; i < StoreAsync::kWords; ++i) {
      if (out[i] != 100 + i) return "word " + std::to_string(i);
    }
    return "";
  });
}

TEST_CASE("st.async misused") {
  const auto launch = [](StoreAsync::Flaw flaw, uint64_t seed) {
    World world;
    return hw::launch<StoreAsync>(
        world, 1, {flaw, world.allocate<uint32_t>("out", StoreAsync::kWords)}, {.seed = seed});
  };
  const auto fails = [&](StoreAsync::Flaw flaw, const Words& words) {
    CAPTURE(static_cast<int>(flaw));
    for_seeds(6, [&](uint64_t seed) { return faults(launch(flaw, seed), words); });
  };
  fails(StoreAsync::kOtherBarrier, {"st.async: its word is in CTA 1, its mbarrier in CTA 0"});
  fails(StoreAsync::kMisaligned, {"st.async: not aligned to 4 bytes"});
  fails(StoreAsync::kNoInitFence,
        {"st.async: mbarrier full of CTA 1 was initialised without fence.mbarrier_init"});
  fails(StoreAsync::kOnBarrier, {"st.async overwrites mbarrier full"});
  on_some_seed(9, [&](uint64_t seed) {
    return faults(launch(StoreAsync::kTwoAtOnePlace, seed),
                  {"st.async to words of CTA 1 while another copy writes it"})
        .empty();
  });
  on_some_seed(9, [&](uint64_t seed) {
    return faults(launch(StoreAsync::kReadsEarly, seed), {"ld.shared of words"}).empty();
  });
  on_some_seed(20, [&](uint64_t seed) {
    return faults(launch(StoreAsync::kLeaves, seed),
                  {"CTA 1 exits, and mbarrier full expected 32 bytes and got"})
        .empty();
  });
}

// --- knowledge -------------------------------------------------------------------------------------------

/// A thread learns of another cluster's work, and tells the other warps of its CTA by a barrier.
struct Tell : Kernel<2> {
  struct Params {
    bool tells;
    hw::Global<uint32_t> flag, data, out;
  };
  struct Smem {
    hw::Barrier told;
  };
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) hw::barrier_init(s.told, 1);
    hw::warp_sync();
    hw::cta_sync();
    if (hw::cluster_id() == 0) {
      if (hw::thread() != 0) return;
      hw::st(p.data, 9);
      return hw::st<Order::kRelease, Scope::kGpu>(p.flag, 1);
    }
    if (hw::thread() == 0) {
      hw::wait_flag<Order::kAcquire, Scope::kGpu>(p.flag, 1);
      hw::arrive(s.told);
    }
    if (hw::thread() != 40) return;
    if (p.tells) {
      hw::wait(s.told, 0);
    } else {
      hw::wait_flag<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
    }
    hw::st(p.out, hw::ld(p.data));
  }
};

TEST_CASE("a barrier passes on what the arriving thread has acquired") {
  const auto make = [](bool tells) {
    return [tells](World& world) {
      return Tell::Params{tells, world.filled<uint32_t>("flag", 1, 0),
                          world.filled<uint32_t>("data", 1, 0), world.allocate<uint32_t>("out", 1)};
    };
  };
  expect_of<Tell>({.clusters = 2, .seeds = 9}, {}, make(true));
  expect_of<Tell>(
      {.clusters = 2, .seeds = 9},
      {"cluster 1 cta 0 warp 1 lane 8", "ld.global at data+0, which cluster 0 cta 0 wrote"},
      make(false));
}

/// CTA 1 learns of another cluster's work, and arrives at CTA 0's barrier.
struct TellPeer : Kernel<1, 2> {
  struct Params {
    bool at_cluster;
    hw::Global<uint32_t> flag, data, out;
  };
  struct Smem {
    hw::Barrier told;
  };
  static void tell(const Params& p, Smem& s) {
    hw::wait_flag<Order::kAcquire, Scope::kGpu>(p.flag, 1);
    const uint32_t told = hw::cta_address(hw::address(s.told), 0);
    if (p.at_cluster) return hw::arrive_at<Scope::kCluster>(told);
    hw::arrive_at(told);
  }
  static void read(const Params& p, Smem& s) {
    if (p.at_cluster) {
      hw::wait<Scope::kCluster>(s.told, 0);
    } else {
      hw::wait(s.told, 0);
    }
    hw::st(p.out, hw::ld(p.data));
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() == 0) {
      hw::barrier_init(s.told, 1);
      hw::fence_barrier_init();
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::lane() == 0) {
      if (hw::cluster_id() == 0 && hw::cta_rank() == 0) {
        hw::st(p.data, 9);
        hw::st<Order::kRelease, Scope::kGpu>(p.flag, 1);
      }
      if (hw::cluster_id() == 1 && hw::cta_rank() == 1) tell(p, s);
      if (hw::cluster_id() == 1 && hw::cta_rank() == 0) read(p, s);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
  }
};

TEST_CASE("a plain arrival at another CTA passes on nothing") {
  const auto make = [](bool at_cluster) {
    return [at_cluster](World& world) {
      return TellPeer::Params{at_cluster, world.filled<uint32_t>("flag", 1, 0),
                              world.filled<uint32_t>("data", 1, 0),
                              world.allocate<uint32_t>("out", 1)};
    };
  };
  expect_of<TellPeer>({.clusters = 2}, {}, make(true));
  expect_of<TellPeer>({.clusters = 2},
                      {"cluster 1 cta 0 warp 0 lane 0 (read, mbarrier_test.cpp:",
                       "ld.global at data+0, which cluster 0 cta 0 wrote (run, "},
                      make(false));
}

}  // namespace
}  // namespace logitless::model_test
