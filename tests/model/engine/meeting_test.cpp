// SPDX-License-Identifier: Apache-2.0
// Threads that meet: what warps, CTAs, named barriers and clusters exchange, order, and refuse.
#include <set>

#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Order;
using hw::Scope;

// --- warps ---------------------------------------------------------------------------------------------

/// What each thread hears of the others of its warp.
struct Hear : Kernel<2> {
  struct Params {
    hw::Global<uint32_t> index, exchanged, votes, uniform;
    hw::Global<float> number;
  };
  static void run(const Params& p, Smem&) {
    const auto mine = static_cast<uint32_t>(hw::thread()) * 10;
    hw::st(p.index + hw::thread(), hw::shfl(mine, 5));
    hw::st(p.exchanged + hw::thread(), hw::shfl_xor(mine, 12));
    hw::st(p.number + hw::thread(), hw::shfl_xor(static_cast<float>(hw::thread()) + 0.5F, 1));
    hw::st(p.votes + hw::thread(), hw::ballot(hw::thread() % 3 == 0));
    hw::st(p.uniform + hw::thread(), static_cast<uint32_t>(hw::uniform(hw::thread() + 7)));
  }
};

TEST_CASE("shfl, shfl_xor, ballot and uniform, warp by warp") {
  for_seeds(6, [](uint64_t seed) -> std::string {
    World world;
    const Hear::Params p{
        world.allocate<uint32_t>("index", 64), world.allocate<uint32_t>("exchanged", 64),
        world.allocate<uint32_t>("votes", 64), world.allocate<uint32_t>("uniform", 64),
        world.allocate<float>("number", 64)};
    const Report report = hw::launch<Hear>(world, 1, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto index = world.download(p.index, 64), exchanged = world.download(p.exchanged, 64),
               votes = world.download(p.votes, 64), uniform = world.download(p.uniform, 64);
    const auto number = world.download(p.number, 64);
    for (uint32_t t = 0; t < 64; ++t) {
      const uint32_t first = t / 32 * 32;
      uint32_t thirds = 0;
      for (uint32_t lane = 0; lane < 32; ++lane)
        thirds |= ((first + lane) % 3 == 0 ? 1U : 0U) << lane;
      if (index[t] != (first + 5) * 10) return "shfl of thread " + std::to_string(t);
      if (exchanged[t] != (t ^ 12) * 10) return "shfl_xor of thread " + std::to_string(t);
      if (number[t] != static_cast<float>(t ^ 1) + 0.5F) return "float of " + std::to_string(t);
      if (votes[t] != thirds) return "ballot of thread " + std::to_string(t);
      if (uniform[t] != first + 7) return "uniform of thread " + std::to_string(t);
    }
    return "";
  });
}

struct Elect : Kernel<2> {
  struct Params {
    hw::Global<uint32_t> lane;  // [2 calls, warps]
    hw::Global<uint32_t> count;
  };
  static void run(const Params& p, Smem&) {
    for (int call = 0; call < 2; ++call) {
      if (!hw::elect_one()) continue;
      hw::st(p.lane + call * 2 + hw::warp(), static_cast<uint32_t>(hw::lane()));
      hw::add<Order::kRelaxed, Scope::kGpu>(p.count, 1);
    }
  }
};

TEST_CASE("elect.sync elects one lane, always the same one; which one depends on the seed") {
  std::set<uint32_t> elected;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    World world;
    const Elect::Params p{world.allocate<uint32_t>("lane", 4),
                          world.filled<uint32_t>("count", 1, 0)};
    const Report report = hw::launch<Elect>(world, 1, p, {.seed = seed});
    REQUIRE_MESSAGE(report.ok, report.what);
    const auto lanes = world.download(p.lane, 4);
    CHECK(world.download(p.count, 1)[0] == 4);  // twice in each warp
    CHECK(std::set<uint32_t>(lanes.begin(), lanes.end()).size() == 1);
    elected.insert(lanes[0]);
  }
  CHECK(elected.size() > 8);
}

/// A warp whose lanes do not do the same.
struct Apart : Kernel<> {
  enum Flaw {
    kNone,
    kOtherOperation,
    kOtherOperand,
    kOtherWay,
    kOtherWayThenSync,
    kOtherWayThenElect,  // which is no warp sync
    kBadLane,
    kBadMask
  };
  struct Params {
    Flaw flaw;
  };
  static void run(const Params& p, Smem&) {
    const bool odd_one = hw::lane() == 3;
    if (p.flaw == kOtherOperation && odd_one) {
      hw::elect_one();
      return;
    }
    if (p.flaw == kOtherOperand && odd_one) return hw::registers_down<32>();
    const bool apart = p.flaw >= kOtherWay && p.flaw <= kOtherWayThenElect;
    if (apart && odd_one) hw::fence_proxy_async();
    if (p.flaw == kOtherWayThenSync) hw::warp_sync();
    if (p.flaw == kOtherWayThenElect) hw::elect_one();
    if (p.flaw == kBadLane) hw::shfl(1U, 32);
    if (p.flaw == kBadMask) hw::shfl_xor(1U, -1);
    hw::registers_down<40>();
  }
};

TEST_CASE("the lanes of a warp must come together, and by the same way") {
  expect<Apart>({Apart::kNone}, {});
  expect<Apart>({Apart::kOtherWayThenSync}, {});
  expect<Apart>(
      {Apart::kOtherOperation},
      {"other lanes of the warp are at another warp-wide operation (run, meeting_test.cpp:"});
  expect<Apart>({Apart::kOtherOperand},
                {"setmaxnreg: the lanes of the warp disagree on the operand, ", "32", "40"});
  expect<Apart>({Apart::kOtherWay},
                {"setmaxnreg is .aligned, but the lanes of the warp come by different ways (a warp "
                 "sync is missing)"});
  expect<Apart>({Apart::kOtherWayThenElect}, {"setmaxnreg is .aligned, but the lanes of the warp"});
  expect<Apart>({Apart::kBadLane}, {"shfl: lane or mask 32 is not in 0..31"});
  expect<Apart>({Apart::kBadMask}, {"shfl: lane or mask -1 is not in 0..31"});
}

/// One lane initialises or arrives, and the warp goes on to an .aligned operation.
struct OneLane : Kernel<> {
  enum Act { kInit, kFenceInit, kArrive, kExpect, kWait, kFlag, kFence };
  struct Params {
    Act act;
    bool sync;
    hw::Global<uint32_t> flag;
  };
  struct Smem {
    hw::Barrier first, second;
  };
  static void one_lane(const Params& p, Smem& s) {
    switch (p.act) {
      case kInit:
        return hw::barrier_init(s.second, 1);
      case kFenceInit:
        return hw::fence_barrier_init();
      case kArrive:
        return hw::arrive(s.first);
      case kExpect:
        return hw::expect(s.first, 0);
      case kWait:
        return hw::wait(s.first, 1);
      case kFlag:
        return hw::st<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
      case kFence:
        return hw::fence<Scope::kGpu>();
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() == 0) hw::barrier_init(s.first, 2);
    hw::warp_sync();
    if (hw::lane() == 0) one_lane(p, s);
    if (p.sync) hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
  }
};

TEST_CASE("a lane that did something alone needs a warp sync before .aligned operations") {
  for (int act = OneLane::kInit; act <= OneLane::kFence; ++act) {
    CAPTURE(act);
    const auto make = [act](bool sync) {
      return [act, sync](World& world) {
        return OneLane::Params{static_cast<OneLane::Act>(act), sync,
                               world.filled<uint32_t>("flag", 1, 0)};
      };
    };
    expect_of<OneLane>({}, {}, make(true));
    expect_of<OneLane>({}, {"barrier.cluster.arrive is .aligned", "come by different ways"},
                       make(false));
  }
}

/// Lane 3 leaves, the others want the whole warp.
struct Leave : Kernel<> {
  static void run(const Params&, Smem&) {
    if (hw::lane() == 3) return;
    hw::warp_sync();
  }
};

TEST_CASE("a lane must not leave while its warp waits for it") {
  on_some_seed(20, [](uint64_t seed) {
    World world;
    return faults(hw::launch<Leave>(world, 1, {}, {.seed = seed}),
                  {"cluster 0 cta 0 warp 0 lane 3",
                   "exits while other lanes of its warp are at run, meeting_test.cpp:"})
        .empty();
  });
}

// --- registers -------------------------------------------------------------------------------------------

/// Three warpgroups of 168 registers a thread; one gives back what the two others take.
struct Registers : Kernel<12> {
  enum Flaw { kNone, kKeeps, kDownToMore, kUpToLess };
  struct Params {
    Flaw flaw;
  };
  static void run(const Params& p, Smem&) {
    if (p.flaw == kDownToMore) hw::registers_down<176>();
    if (p.flaw == kUpToLess) hw::registers_up<160>();
    if (hw::warp() >= 4) return hw::registers_up<232>();
    if (p.flaw != kKeeps) hw::registers_down<40>();
  }
};

TEST_CASE("setmaxnreg: more wait until others give back") {
  expect<Registers>({Registers::kNone}, {});
  expect<Registers>(
      {Registers::kKeeps},
      {"deadlock:",
       "waits for registers: 232 each are more than what others gave back [32 lanes]"});
  expect<Registers>({Registers::kDownToMore},
                    {"setmaxnreg.dec to 176 registers, the warp has 168"});
  expect<Registers>({Registers::kUpToLess}, {"setmaxnreg.inc to 160 registers, the warp has 168"});
}

// --- what a meeting orders -------------------------------------------------------------------------------

/// One thread writes global memory; another of the same CTA reads after they have met.
struct Pass : Kernel<2> {
  enum By {
    kNothing,
    kWarpSync,
    kCtaSync,
    kNamedSync,
    kNamedArrive,
    kBarrier,
    kClusterBarrier,
    kShuffle
  };
  struct Params {
    By by;
    hw::Global<uint32_t> data, seen;  // data was 1
  };
  struct Smem {
    hw::Barrier passed;
  };
  static bool within_warp(By by) { return by == kWarpSync || by == kShuffle; }
  static void meet(By by, Smem& s, bool reads) {
    switch (by) {
      case kNothing:
        return;
      case kWarpSync:
        return hw::warp_sync();
      case kCtaSync:
        return hw::cta_sync();
      case kNamedSync:
        return hw::named_sync(3, 64);
      case kNamedArrive:
        return reads ? hw::named_sync(3, 64) : hw::named_arrive(3, 64);
      case kBarrier:
        if (hw::warp() == 0) hw::arrive(s.passed);
        return reads ? hw::wait(s.passed, 0) : void();
      case kClusterBarrier:
        hw::warp_sync();
        hw::cluster_arrive();
        return hw::cluster_wait();
      case kShuffle:
        hw::shfl(0U, 0);
        return;
    }
  }
  static void run(const Params& p, Smem& s) {
    const int reader = within_warp(p.by) ? 7 : 39;
    if (hw::thread() == 0) hw::barrier_init(s.passed, 32);
    hw::warp_sync();
    hw::cta_sync();
    if (hw::thread() == 20) hw::st(p.data, 2);
    meet(p.by, s, hw::thread() / 32 == reader / 32);
    if (hw::thread() == reader) hw::st(p.seen, hw::ld(p.data));
  }
};

std::string pass(Pass::By by, uint64_t seed, uint32_t expected) {
  World world;
  const Pass::Params p{by, world.filled<uint32_t>("data", 1, 1),
                       world.allocate<uint32_t>("seen", 1)};
  const Report report = hw::launch<Pass>(world, 1, p, {.seed = seed});
  if (!report.ok) return report.what;
  const uint32_t seen = world.download(p.seen, 1)[0];
  return seen == expected
             ? ""
             : "expected " + std::to_string(expected) + ", got " + std::to_string(seen);
}

TEST_CASE("who has met sees what the others wrote") {
  for (int by = Pass::kWarpSync; by <= Pass::kClusterBarrier; ++by) {
    CAPTURE(by);
    for_seeds(9, [&](uint64_t seed) { return pass(static_cast<Pass::By>(by), seed, 2); });
  }
}
TEST_CASE("without a meeting, and after an exchange of registers, the old value may be seen") {
  on_some_seed(40, [](uint64_t seed) { return pass(Pass::kNothing, seed, 1).empty(); });
  on_some_seed(40, [](uint64_t seed) { return pass(Pass::kNothing, seed, 2).empty(); });
  on_some_seed(40, [](uint64_t seed) { return pass(Pass::kShuffle, seed, 1).empty(); });
}

// --- named barriers --------------------------------------------------------------------------------------

/// Two warps and two barriers: a word goes back and forth through global memory.
struct BackAndForth : Kernel<3> {
  static constexpr int kThere = 1, kBack = 15, kRounds = 5;
  struct Params {
    hw::Global<uint32_t> ball, score;
  };
  static void run(const Params& p, Smem&) {
    const bool leader = hw::lane() == 0;
    for (int round = 0; round < kRounds; ++round) {
      if (hw::warp() == 0) {
        if (leader) hw::st(p.ball, static_cast<uint32_t>(round * 100));
        hw::named_arrive(kThere, 64);
        hw::named_sync(kBack, 64);
        if (leader) hw::st(p.score + round, hw::ld(p.ball));
      } else if (hw::warp() == 2) {
        hw::named_sync(kThere, 64);
        if (leader) hw::st(p.ball, hw::ld(p.ball) + 1);
        hw::named_arrive(kBack, 64);
      }
    }
  }
};

TEST_CASE("named barriers, round after round") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    World world;
    const BackAndForth::Params p{world.allocate<uint32_t>("ball", 1),
                                 world.allocate<uint32_t>("score", BackAndForth::kRounds)};
    const Report report = hw::launch<BackAndForth>(world, 1, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto score = world.download(p.score, BackAndForth::kRounds);
    for (uint32_t round = 0; round < BackAndForth::kRounds; ++round) {
      if (score[round] != round * 100 + 1) return "round " + std::to_string(round);
    }
    return "";
  });
}

struct Named : Kernel<3> {
  struct Params {
    int id, threads, threads_of_warp_1;
  };
  static void run(const Params& p, Smem&) {
    if (hw::warp() == 2) return;
    hw::named_sync(p.id, hw::warp() == 1 ? p.threads_of_warp_1 : p.threads);
  }
};

TEST_CASE("named barriers: ids and counts") {
  expect<Named>({1, 64, 64}, {});
  expect<Named>({15, 64, 64}, {});
  expect<Named>({1, 32, 32}, {});
  expect<Named>({0, 64, 64}, {"bar.sync: barrier id 0 is not in 1..15"});
  expect<Named>({16, 64, 64}, {"bar.sync: barrier id 16 is not in 1..15"});
  expect<Named>({1, 48, 48}, {"bar.sync 1: 48 threads are no whole warps of this CTA"});
  expect<Named>({1, 0, 0}, {"bar.sync 1: 0 threads are no whole warps"});
  expect<Named>({1, 128, 128}, {"bar.sync 1: 128 threads are no whole warps of this CTA"});
  expect<Named>({1, 64, 96}, {"a named barrier: threads disagree on the count, ", "64", "96"});
  expect<Named>({4, 96, 96},
                {"deadlock:", "waits at a named barrier (id 4, 96 threads) [32 lanes]"});
}

// --- clusters --------------------------------------------------------------------------------------------

/// CTAs of a cluster take turns to add to a word.
struct Turns : Kernel<2, 3> {
  enum Flaw { kNone, kRelaxed, kArrivesTwice, kWaitsOnly, kOneStays };
  struct Params {
    Flaw flaw;
    hw::Global<uint32_t> sum;
  };
  static void barrier(Flaw flaw) {
    if (flaw == kRelaxed) {
      hw::cluster_arrive_relaxed();
    } else if (flaw != kWaitsOnly) {
      hw::cluster_arrive();
    }
    if (flaw == kArrivesTwice) hw::cluster_arrive();
    hw::cluster_wait();
  }
  static void run(const Params& p, Smem&) {
    for (int turn = 0; turn < 6; ++turn) {
      const bool mine = turn % 3 == hw::cta_rank();
      if (mine && hw::thread() == 0) hw::st(p.sum, hw::ld(p.sum) + 1);
      if (p.flaw == kOneStays && hw::cta_rank() == 2 && turn == 3) hw::named_sync(1, 64);
      if (p.flaw == kOneStays && hw::cta_rank() == 2 && turn == 4 && hw::warp() == 1) {
        hw::named_sync(2, 64);
      }
      barrier(p.flaw);
    }
  }
};

TEST_CASE("the cluster's barrier orders what CTAs write") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    World world;
    const Turns::Params p{Turns::kNone, world.filled<uint32_t>("sum", 1, 10)};
    const Report report = hw::launch<Turns>(world, 1, p, {.seed = seed});
    if (!report.ok) return report.what;
    return world.download(p.sum, 1)[0] == 16 ? "" : "a turn got lost";
  });
}

TEST_CASE("the cluster's barrier, misused") {
  const auto make = [](Turns::Flaw flaw) {
    return
        [flaw](World& world) { return Turns::Params{flaw, world.filled<uint32_t>("sum", 1, 10)}; };
  };
  expect_of<Turns>({},
                   {"cta 1", "ld.global at sum+0, which cluster 0 cta 0 wrote (run, ",
                    "nothing orders this after that"},
                   make(Turns::kRelaxed));
  expect_of<Turns>({}, {"barrier.cluster.arrive twice without a wait"}, make(Turns::kArrivesTwice));
  expect_of<Turns>({}, {"barrier.cluster.wait without an arrive"}, make(Turns::kWaitsOnly));
  expect_of<Turns>({},
                   {"deadlock:", "cta 0 warp 1", "waits at the cluster's barrier [32 lanes]",
                    "cta 2 warp 1", "waits at a named barrier (id 2, 64 threads) [32 lanes]"},
                   make(Turns::kOneStays));
}

}  // namespace
}  // namespace logitless::model_test
