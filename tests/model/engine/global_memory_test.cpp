// SPDX-License-Identifier: Apache-2.0
// Global memory: litmus tests of its order, at every scope and distance, and who may reach what.
#include <algorithm>
#include <stdexcept>

#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Order;
using hw::Scope;

constexpr Scope kScopes[] = {Scope::kCta, Scope::kCluster, Scope::kGpu, Scope::kSys};
std::string name_of(Scope scope) {
  constexpr const char* kNames[] = {"cta", "cluster", "gpu", "sys"};
  return kNames[static_cast<int>(scope)];
}

/// Calls f.operator()<scope>() with a scope that is known at run time only.
template <class F>
auto at_scope(Scope scope, F f) {
  switch (scope) {
    case Scope::kCta:
      return f.template operator()<Scope::kCta>();
    case Scope::kCluster:
      return f.template operator()<Scope::kCluster>();
    case Scope::kGpu:
      return f.template operator()<Scope::kGpu>();
    default:
      return f.template operator()<Scope::kSys>();
  }
}

// --- message passing -------------------------------------------------------------------------------------

/// How far the reader is from the writer.
enum class Distance { kCta, kGpu, kRank };
std::string name_of(Distance distance) {
  constexpr const char* kNames[] = {"same CTA", "other cluster", "other rank"};
  return kNames[static_cast<int>(distance)];
}
bool reaches(Scope scope, Distance distance) {
  constexpr Scope kNeeded[] = {Scope::kCta, Scope::kGpu, Scope::kSys};
  return scope >= kNeeded[static_cast<int>(distance)];
}

enum class Publish { kRelaxed, kRelease, kFence, kAddRelaxed, kAddRelease, kAddFence };
enum class Observe { kRelaxed, kAcquire, kFence, kLoadAcquire, kAddAcquire };

/// A word of data, then a flag; the reader waits for the flag and reads the word.
struct Message : Kernel<2> {
  struct Params {
    Distance distance;
    Publish publish;
    Scope released;
    Observe observe;
    Scope acquired;
    hw::Global<uint32_t> data, flag, out;
  };
  static void raise(const Params& p) {
    at_scope(p.released, [&]<Scope kScope>() {
      switch (p.publish) {
        case Publish::kRelaxed:
          return hw::st<Order::kRelaxed, kScope>(p.flag, 1);
        case Publish::kRelease:
          return hw::st<Order::kRelease, kScope>(p.flag, 1);
        case Publish::kFence:
          hw::fence<kScope>();
          return hw::st<Order::kRelaxed, Scope::kSys>(p.flag, 1);
        case Publish::kAddRelaxed:
          hw::add<Order::kRelaxed, kScope>(p.flag, 1);
          return;
        case Publish::kAddRelease:
          hw::add<Order::kRelease, kScope>(p.flag, 1);
          return;
        case Publish::kAddFence:
          hw::fence<kScope>();
          hw::add<Order::kRelaxed, Scope::kSys>(p.flag, 1);
          return;
      }
    });
  }
  static void await(const Params& p) {
    at_scope(p.acquired, [&]<Scope kScope>() {
      switch (p.observe) {
        case Observe::kRelaxed:
          return hw::wait_flag<Order::kRelaxed, kScope>(p.flag, 1);
        case Observe::kAcquire:
          return hw::wait_flag<Order::kAcquire, kScope>(p.flag, 1);
        case Observe::kFence:
          hw::wait_flag<Order::kRelaxed, Scope::kSys>(p.flag, 1);
          return hw::fence<kScope>();
        case Observe::kLoadAcquire:
          while (hw::ld<Order::kAcquire, kScope>(p.flag) == 0) hw::pause();
          return;
        case Observe::kAddAcquire:
          while (hw::add<Order::kAcqRel, kScope>(p.flag, 0) == 0) hw::pause();
          return;
      }
    });
  }
  static void publish(const Params& p) {
    hw::st(p.data, 2);
    raise(p);
    hw::pause();  // the end of a thread shows its CTA what it wrote: not yet
  }
  static void read(const Params& p) {
    await(p);
    hw::st(p.out, hw::ld(p.data));
  }
  static void run(const Params& p, Smem&) {
    const int reader = p.distance == Distance::kCta ? 0 : 1;
    if (hw::cluster_id() == 0 && hw::thread() == 3) publish(p);
    if (hw::cluster_id() == reader && hw::thread() == 40) read(p);
  }
};

struct Outcome {
  Report report;
  uint32_t out = 0;
};
Outcome send(Distance distance, Publish publish, Scope released, Observe observe, Scope acquired,
             uint64_t seed) {
  World world(distance == Distance::kRank ? 2 : 1);
  const Message::Params p{distance,
                          publish,
                          released,
                          observe,
                          acquired,
                          world.filled<uint32_t>("data", 1, 1),
                          world.filled<uint32_t>("flag", 1, 0),
                          world.filled<uint32_t>("out", 1, 0)};
  Outcome outcome{
      hw::launch<Message>(world, 2, p,
                          {.seed = seed, .clusters_per_rank = distance == Distance::kRank ? 1 : 2}),
      0};
  outcome.out = world.download(p.out, 1)[0];
  return outcome;
}

/// Ordered: the message arrives on every seed. If not, the reader faults, or, in one CTA, may read the
/// old word.
void check_message(Distance distance, Publish publish, Scope released, Observe observe,
                   Scope acquired, bool ordered) {
  CAPTURE(name_of(distance));
  CAPTURE(static_cast<int>(publish));
  CAPTURE(name_of(released));
  CAPTURE(static_cast<int>(observe));
  CAPTURE(name_of(acquired));
  const auto one = [&](uint64_t seed) {
    return send(distance, publish, released, observe, acquired, seed);
  };
  if (ordered) {
    for_seeds(3, [&](uint64_t seed) -> std::string {
      const Outcome outcome = one(seed);
      if (!outcome.report.ok) return outcome.report.what;
      return outcome.out == 2 ? "" : "the old word";
    });
  } else if (distance == Distance::kCta) {
    on_some_seed(40, [&](uint64_t seed) {
      const Outcome outcome = one(seed);
      return outcome.report.ok && outcome.out == 1;
    });
  } else {
    for_seeds(3, [&](uint64_t seed) {
      return faults(one(seed).report,
                    {"cluster 1 cta 0 warp 1 lane 8 (read, global_memory_test.cpp:",
                     distance == Distance::kRank ? "ld.global at data[rank 0]+0, which"
                                                 : "ld.global at data+0, which",
                     "cluster 0 cta 0 wrote (publish, global_memory_test.cpp:",
                     "nothing orders this after that"});
    });
  }
}

TEST_CASE("message passing: release and acquire, every pair of scopes, every distance") {
  for (const Distance distance : {Distance::kCta, Distance::kGpu, Distance::kRank}) {
    for (const Scope released : kScopes) {
      for (const Scope acquired : kScopes) {
        const bool ordered = reaches(released, distance) && reaches(acquired, distance);
        check_message(distance, Publish::kRelease, released, Observe::kAcquire, acquired, ordered);
      }
    }
  }
}
TEST_CASE("message passing: a fence before a relaxed flag") {
  for (const Distance distance : {Distance::kCta, Distance::kGpu, Distance::kRank}) {
    for (const Scope scope : kScopes) {
      check_message(distance, Publish::kFence, scope, Observe::kAcquire, Scope::kSys,
                    reaches(scope, distance));
      check_message(distance, Publish::kAddFence, scope, Observe::kAcquire, Scope::kSys,
                    reaches(scope, distance));
    }
  }
}
TEST_CASE("message passing: a fence after a relaxed flag") {
  for (const Distance distance : {Distance::kGpu, Distance::kRank}) {
    for (const Scope scope : kScopes) {
      check_message(distance, Publish::kRelease, Scope::kSys, Observe::kFence, scope,
                    reaches(scope, distance));
      check_message(distance, Publish::kFence, Scope::kSys, Observe::kFence, scope,
                    reaches(scope, distance));
    }
  }
}
TEST_CASE("message passing: additions and loads in a loop") {
  for (const Distance distance : {Distance::kGpu, Distance::kRank}) {
    for (const Scope scope : kScopes) {
      const bool ordered = reaches(scope, distance);
      check_message(distance, Publish::kAddRelease, scope, Observe::kAcquire, scope, ordered);
      check_message(distance, Publish::kRelease, scope, Observe::kLoadAcquire, scope, ordered);
      check_message(distance, Publish::kAddRelease, scope, Observe::kAddAcquire, scope, ordered);
    }
  }
}
TEST_CASE("message passing: relaxed on one side is not enough at any scope") {
  for (const Distance distance : {Distance::kCta, Distance::kGpu, Distance::kRank}) {
    for (const Scope scope : kScopes) {
      check_message(distance, Publish::kRelaxed, scope, Observe::kAcquire, Scope::kSys, false);
      check_message(distance, Publish::kAddRelaxed, scope, Observe::kAcquire, Scope::kSys, false);
      if (distance == Distance::kCta) continue;
      check_message(distance, Publish::kRelease, Scope::kSys, Observe::kRelaxed, scope, false);
    }
  }
}

/// The fence comes before the data, or the other thread's data comes without a meeting.
struct Unfenced : Kernel<2> {
  enum Way { kRight, kFenceFirst, kOthersData };
  struct Params {
    Way way;
    hw::Global<uint32_t> data, flag, out;
  };
  static void write(const Params& p) {
    if (p.way == kFenceFirst) hw::fence<Scope::kGpu>();
    hw::st(p.data, 2);
    if (p.way != kFenceFirst) hw::fence<Scope::kGpu>();
    hw::st<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
  }
  static void run(const Params& p, Smem&) {
    if (hw::cluster_id() == 0) {
      if (p.way == kOthersData) {
        if (hw::thread() == 50) hw::st(p.data, 2);
        if (hw::thread() == 0) hw::st<Order::kRelease, Scope::kGpu>(p.flag, 1);
      } else if (hw::thread() == 0) {
        write(p);
      }
    } else if (hw::thread() == 0) {
      hw::wait_flag<Order::kAcquire, Scope::kGpu>(p.flag, 1);
      hw::st(p.out, hw::ld(p.data));
    }
  }
};

TEST_CASE("a fence releases what came before it, a thread what it knows of") {
  const auto launch = [](Unfenced::Way way, uint64_t seed) {
    World world;
    const Unfenced::Params p{way, world.filled<uint32_t>("data", 1, 1),
                             world.filled<uint32_t>("flag", 1, 0),
                             world.allocate<uint32_t>("out", 1)};
    Outcome outcome{hw::launch<Unfenced>(world, 2, p, {.seed = seed}), 0};
    outcome.out = world.download(p.out, 1)[0];
    return outcome;
  };
  for_seeds(6, [&](uint64_t seed) { return passes(launch(Unfenced::kRight, seed).report); });
  for_seeds(6, [&](uint64_t seed) {
    return faults(launch(Unfenced::kFenceFirst, seed).report,
                  {"cluster 1", "ld.global at data+0, which cluster 0 cta 0 wrote (write, "});
  });
  on_some_seed(40, [&](uint64_t seed) {
    const Outcome outcome = launch(Unfenced::kOthersData, seed);
    return !outcome.report.ok || outcome.out == 1;
  });
}

// --- store buffering -------------------------------------------------------------------------------------

/// Two threads store, then look at the other's word.
struct Buffering : Kernel<1> {
  enum Way { kWeak, kWeakAndFence, kRelaxed };
  struct Params {
    Way way;
    Scope scope;
    hw::Global<uint32_t> words, seen;  // [2]
  };
  static void run(const Params& p, Smem&) {
    if (hw::lane() != 0) return;
    const int me = hw::cluster_id(), other = 1 - me;
    if (p.way == kRelaxed) {
      hw::st<Order::kRelaxed, Scope::kSys>(p.words + me, 1);
    } else {
      hw::st(p.words + me, 1);
    }
    if (p.way == kWeakAndFence) at_scope(p.scope, []<Scope kScope>() { hw::fence<kScope>(); });
    hw::st(p.seen + me, hw::ld<Order::kRelaxed, Scope::kSys>(p.words + other));
  }
};

TEST_CASE("store buffering: both may see the old words, unless both fence") {
  const auto both_old = [](Buffering::Way way, Scope scope, int ranks, uint64_t seed) {
    World world(ranks);
    const Buffering::Params p{way, scope, world.filled<uint32_t>("words", 2, 0),
                              world.filled<uint32_t>("seen", 2, 7)};
    const Report report =
        hw::launch<Buffering>(world, 2, p, {.seed = seed, .clusters_per_rank = 2 / ranks});
    REQUIRE_MESSAGE(report.ok, report.what);
    const auto seen = world.download(p.seen, 2);
    return seen[0] == 0 && seen[1] == 0;
  };
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    on_some_seed(
        60, [&](uint64_t seed) { return both_old(Buffering::kWeak, Scope::kSys, ranks, seed); });
    for_seeds(30, [&](uint64_t seed) -> std::string {
      return both_old(Buffering::kWeakAndFence, Scope::kSys, ranks, seed) ? "both are old" : "";
    });
    for_seeds(30, [&](uint64_t seed) -> std::string {
      return both_old(Buffering::kRelaxed, Scope::kSys, ranks, seed) ? "both are old" : "";
    });
  }
}

// --- chains ----------------------------------------------------------------------------------------------

/// Cluster 0 writes and raises the flag; cluster 1 raises it further; cluster 2 reads cluster 0's word.
struct Chain : Kernel<1> {
  enum Link { kAddRelaxed, kAddAcqRel, kStoreRelaxed, kStoreRelease, kAcquireAndRelease };
  struct Params {
    Link link;
    hw::Global<uint32_t> data, flag, out;
  };
  static void link(const Params& p) {
    switch (p.link) {
      case kAddRelaxed:
        hw::wait_flag<Order::kRelaxed, Scope::kSys>(p.flag, 1);
        hw::add<Order::kRelaxed, Scope::kSys>(p.flag, 1);
        return;
      case kAddAcqRel:
        hw::wait_flag<Order::kRelaxed, Scope::kSys>(p.flag, 1);
        hw::add<Order::kAcqRel, Scope::kSys>(p.flag, 1);
        return;
      case kStoreRelaxed:
        hw::wait_flag<Order::kAcquire, Scope::kSys>(p.flag, 1);
        return hw::st<Order::kRelaxed, Scope::kSys>(p.flag, 2);
      case kStoreRelease:
        hw::wait_flag<Order::kRelaxed, Scope::kSys>(p.flag, 1);
        return hw::st<Order::kRelease, Scope::kSys>(p.flag, 2);
      case kAcquireAndRelease:
        hw::wait_flag<Order::kAcquire, Scope::kSys>(p.flag, 1);
        return hw::st<Order::kRelease, Scope::kSys>(p.flag, 2);
    }
  }
  static void run(const Params& p, Smem&) {
    if (hw::lane() != 0) return;
    if (hw::cluster_id() == 0) {
      hw::st(p.data, 2);
      hw::st<Order::kRelease, Scope::kSys>(p.flag, 1);
    } else if (hw::cluster_id() == 1) {
      link(p);
    } else {
      hw::wait_flag<Order::kAcquire, Scope::kSys>(p.flag, 2);
      hw::st(p.out, hw::ld(p.data));
    }
  }
};

TEST_CASE("an addition continues a release, a store ends it") {
  struct Case {
    Chain::Link link;
    bool ordered;
  };
  for (const Case& each : {Case{Chain::kAddRelaxed, true},
                           {Chain::kAddAcqRel, true},
                           {Chain::kStoreRelaxed, false},
                           {Chain::kStoreRelease, false},
                           {Chain::kAcquireAndRelease, true}}) {
    for (const int ranks : {1, 3}) {
      CAPTURE(static_cast<int>(each.link));
      CAPTURE(ranks);
      expect_of<Chain>({.clusters = 3, .ranks = ranks},
                       each.ordered ? Words{} : Words{"cluster 2", "which cluster 0 cta 0 wrote"},
                       [&](World& world) {
                         return Chain::Params{each.link, world.filled<uint32_t>("data", 1, 1),
                                              world.filled<uint32_t>("flag", 1, 0),
                                              world.allocate<uint32_t>("out", 1)};
                       });
    }
  }
}

/// All CTAs add; the last one reads what all of them wrote, and opens the next epoch.
struct Epoch : Kernel<2, 2> {
  enum Flaw { kNone, kRelaxed, kFirstAdvances };
  struct Params {
    Flaw flaw;
    hw::Global<uint32_t> epoch, ended, parts, sum;
  };
  static void run(const Params& p, Smem&) {
    const uint32_t epoch =
        hw::ld(p.epoch);  // all threads, weakly: nobody writes it before all have
    const auto ctas = static_cast<uint32_t>(hw::cluster_count() * kCluster);
    if (hw::thread() == 0) {
      hw::st(p.parts + (hw::cluster_id() * kCluster + hw::cta_rank()), epoch + 1);
    }
    hw::cta_sync();
    if (hw::thread() != 0) return;
    const uint32_t earlier = p.flaw == kRelaxed ? hw::add<Order::kRelaxed, Scope::kGpu>(p.ended, 1)
                                                : hw::add<Order::kAcqRel, Scope::kGpu>(p.ended, 1);
    const uint32_t last = p.flaw == kFirstAdvances ? 1 : ctas;
    if (earlier + 1 != epoch * ctas + last) return;
    if (p.flaw != kFirstAdvances) {
      uint32_t sum = 0;
      for (uint32_t i = 0; i < ctas; ++i) sum += hw::ld(p.parts + i);
      hw::st(p.sum, sum);
    }
    hw::st<Order::kRelaxed, Scope::kGpu>(p.epoch, epoch + 1);
  }
};

TEST_CASE("the last CTA reads all parts and advances the epoch that all have read") {
  constexpr int kClusters = 3, kCtas = 6;
  const auto params = [](World& world, Epoch::Flaw flaw) {
    return Epoch::Params{
        flaw, world.filled<uint32_t>("epoch", 1, 0), world.filled<uint32_t>("ended", 1, 0),
        world.allocate<uint32_t>("parts", kCtas), world.allocate<uint32_t>("sum", 1)};
  };
  for_seeds(9, [&](uint64_t seed) -> std::string {
    World world;
    const Epoch::Params p = params(world, Epoch::kNone);
    for (uint32_t launch = 0; launch < 3; ++launch) {  // on the same words
      const Report report = hw::launch<Epoch>(world, kClusters, p, {.seed = seed + launch});
      if (!report.ok) return report.what;
      if (world.download(p.sum, 1)[0] != kCtas * (launch + 1)) return "sum of another epoch";
      if (world.download(p.epoch, 1)[0] != launch + 1) return "epoch";
    }
    return "";
  });
  expect_of<Epoch>({.clusters = kClusters, .seeds = 9},
                   {"ld.global at parts+", "wrote (run, ", "nothing orders this after that"},
                   [&](World& world) { return params(world, Epoch::kRelaxed); });
  on_some_seed(20, [&](uint64_t seed) {
    World world;
    return faults(hw::launch<Epoch>(world, kClusters, params(world, Epoch::kFirstAdvances),
                                    {.seed = seed}),
                  {"ld.global at epoch+0, which", "wrote (run, "})
        .empty();
  });
}

// --- other races -----------------------------------------------------------------------------------------

/// Cluster 0 does something with a word, cluster 1 something else after it has seen a flag.
struct Race : Kernel<1> {
  enum Act { kReads, kWrites, kAddsStrongly, kStoresStrongly };
  struct Params {
    Act first, second;
    bool ordered;
    hw::Global<uint32_t> word, flag, out;
  };
  static void act(const Params& p, Act act) {
    switch (act) {
      case kReads:
        return hw::st(p.out + hw::cluster_id(), hw::ld(p.word));
      case kWrites:
        return hw::st(p.word, 5);
      case kAddsStrongly:
        hw::add<Order::kRelaxed, Scope::kGpu>(p.word, 5);
        return;
      case kStoresStrongly:
        return hw::st<Order::kRelaxed, Scope::kGpu>(p.word, 5);
    }
  }
  static void run(const Params& p, Smem&) {
    if (hw::lane() != 0) return;
    if (hw::cluster_id() == 0) {
      act(p, p.first);
      if (p.ordered) return hw::st<Order::kRelease, Scope::kGpu>(p.flag, 1);
      return hw::st<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
    }
    hw::wait_flag<Order::kAcquire, Scope::kGpu>(p.flag, 1);
    act(p, p.second);
  }
};

TEST_CASE("two accesses of a word, one of them a weak write or after a strong one") {
  struct Case {
    Race::Act first, second;
    const char* what;  // null: no race
  };
  const Case cases[] = {
      {Race::kReads, Race::kReads, nullptr},
      {Race::kWrites, Race::kReads, "ld.global at word+0, which cluster 0 cta 0 wrote (act, "},
      {Race::kReads, Race::kWrites, "st.global at word+0, which cluster 0 cta 0 read (act, "},
      {Race::kWrites, Race::kWrites, "st.global at word+0, which cluster 0 cta 0 wrote (act, "},
      {Race::kAddsStrongly, Race::kReads,
       "ld.global at word+0, which cluster 0 cta 0 wrote (act, "},
      {Race::kStoresStrongly, Race::kReads,
       "ld.global at word+0, which cluster 0 cta 0 wrote (act, "},
      {Race::kAddsStrongly, Race::kWrites,
       "st.global at word+0, which cluster 0 cta 0 wrote (act, "},
      {Race::kAddsStrongly, Race::kAddsStrongly, nullptr},
      {Race::kStoresStrongly, Race::kAddsStrongly, nullptr},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.first));
    CAPTURE(static_cast<int>(each.second));
    const auto make = [&](bool ordered) {
      return [&, ordered](World& world) {
        return Race::Params{each.first,
                            each.second,
                            ordered,
                            world.filled<uint32_t>("word", 1, 1),
                            world.filled<uint32_t>("flag", 1, 0),
                            world.allocate<uint32_t>("out", 2)};
      };
    };
    expect_of<Race>({.clusters = 2}, {}, make(true));
    const Words words =
        each.what == nullptr
            ? Words{}
            : Words{"cluster 1 cta 0 warp 0 lane 0 (act, global_memory_test.cpp:", each.what,
                    "nothing orders this after that"};
    expect_of<Race>({.clusters = 2}, words, make(false));
  }
}

// --- counting --------------------------------------------------------------------------------------------

/// Every thread draws from counters of all widths.
struct Count : Kernel<2> {
  struct Params {
    hw::Global<uint32_t> words;
    hw::Global<int32_t> down;
    hw::Global<uint64_t> wide;
    hw::Global<uint32_t> drawn;
  };
  static void run(const Params& p, Smem&) {
    const uint32_t ticket = hw::add<Order::kRelaxed, Scope::kSys>(p.words, 1);
    hw::add<Order::kAcqRel, Scope::kGpu>(p.down, -3);
    hw::add<Order::kRelease, Scope::kSys>(p.wide, uint64_t{1} << 31);
    hw::st(p.drawn + ticket, 1);
  }
};

TEST_CASE("additions are atomic at every distance; each draws its own ticket") {
  for (const int ranks : {1, 3}) {
    for_seeds(6, [&](uint64_t seed) -> std::string {
      constexpr int kAll = 3 * Count::kThreads;
      World world(ranks);
      const Count::Params p{
          world.filled<uint32_t>("words", 1, 0), world.filled<int32_t>("down", 1, 7),
          world.filled<uint64_t>("wide", 1, 5), world.filled<uint32_t>("drawn", kAll, 0)};
      const Report report =
          hw::launch<Count>(world, 3, p, {.seed = seed, .clusters_per_rank = 3 / ranks});
      if (!report.ok) return report.what;
      if (world.download(p.words, 1)[0] != kAll) return "32 bits";
      if (world.download(p.down, 1)[0] != 7 - 3 * kAll) return "signed";
      if (world.download(p.wide, 1)[0] != 5 + (uint64_t{kAll} << 31)) return "64 bits";
      for (const uint32_t drawn : world.download(p.drawn, kAll)) {
        if (drawn != 1) return "two have drawn one ticket";
      }
      return "";
    });
  }
}

/// Flags count modulo 2^32.
struct Wrap : Kernel<1> {
  struct Params {
    hw::Global<uint32_t> flag, order;
  };
  static void run(const Params& p, Smem&) {
    if (hw::lane() != 0) return;
    if (hw::cluster_id() == 0) {
      hw::wait_flag<Order::kRelaxed, Scope::kGpu>(p.flag, 0xFFFFFFF0);  // long ago
      hw::wait_flag<Order::kRelaxed, Scope::kGpu>(p.flag, 0xFFFFFFFE);
      hw::add<Order::kRelaxed, Scope::kGpu>(p.order, 1);
      hw::wait_flag<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
      CHECK(hw::add<Order::kRelaxed, Scope::kGpu>(p.order, 0) == 11);
      return;
    }
    while (hw::add<Order::kRelaxed, Scope::kGpu>(p.order, 0) == 0) hw::pause();
    for (int i = 0; i < 100; ++i) hw::pause();
    hw::add<Order::kRelaxed, Scope::kGpu>(p.order, 10);
    for (int i = 0; i < 3; ++i) hw::add<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
  }
};

TEST_CASE("a flag has reached a value across the end of its range") {
  expect_of<Wrap>({.clusters = 2}, {}, [](World& world) {
    return Wrap::Params{world.filled<uint32_t>("flag", 1, 0xFFFFFFFE),
                        world.filled<uint32_t>("order", 1, 0)};
  });
}

// --- generic writes and asynchronous reads ---------------------------------------------------------------

/// Cluster 0 writes a line; cluster 1 acquires it and loads it with a copy.
struct Proxy : Kernel<1> {
  enum Way { kFence, kNoFence, kFenceFirst, kWriterFences, kTensor, kTensorNoFence, kGenericLoad };
  struct Params {
    Way way;
    hw::Global<uint32_t> line, flag, out;
    hw::TensorMap map;
  };
  struct Smem {
    hw::Buffer<128, 128> tile;
    hw::Barrier full;
  };
  static void write(const Params& p) {
    for (uint32_t i = 0; i < 32; ++i) hw::st(p.line + i, 100 + i);
    if (p.way == kWriterFences) hw::fence_proxy_async_global();
    hw::st<Order::kRelease, Scope::kSys>(p.flag, 1);
  }
  static void load(const Params& p, Smem& s) {
    hw::barrier_init(s.full, 1);
    hw::fence_barrier_init();
    if (p.way == kFenceFirst) hw::fence_proxy_async_global();
    hw::wait_flag<Order::kAcquire, Scope::kSys>(p.flag, 1);
    if (p.way == kFence || p.way == kTensor) hw::fence_proxy_async_global();
    hw::arrive_expect(s.full, 128);
    if (p.way == kTensor || p.way == kTensorNoFence) {
      hw::tma_load(hw::address(s.tile), p.map, 0, 0, hw::address(s.full));
    } else {
      hw::bulk_load(hw::address(s.tile), p.line, 128, hw::address(s.full));
    }
    hw::wait(s.full, 0);
    for (uint32_t i = 0; i < 32; ++i) {
      hw::st(p.out + i, hw::ld_shared<uint32_t>(hw::address(s.tile) + i * 4));
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    if (hw::cluster_id() == 0) {
      write(p);
    } else {
      load(p, s);
    }
  }
};

TEST_CASE("a copy sees generic writes of others after acquire and fence.proxy.async.global") {
  const auto run = [](Proxy::Way way, int ranks, uint64_t seed, const Words& words) -> std::string {
    World world(ranks);
    const auto line = world.filled<uint32_t>("line", 32, 1);
    const Proxy::Params p{way, line, world.filled<uint32_t>("flag", 1, 0),
                          world.allocate<uint32_t>("out", 32),
                          hw::tensor_map(line, {.element = hw::Element::kF32,
                                                .rows = 1,
                                                .columns = 32,
                                                .pitch_bytes = 128,
                                                .box_rows = 1,
                                                .box_columns = 32,
                                                .swizzle = hw::Swizzle::kNone})};
    const Report report =
        hw::launch<Proxy>(world, 2, p, {.seed = seed, .clusters_per_rank = 2 / ranks});
    if (!words.empty() || !report.ok) return verdict(report, words);
    const auto out = world.download(p.out, 32);
    for (uint32_t i = 0; i < 32; ++i) {
      if (out[i] != 100 + i) return "out[" + std::to_string(i) + "]: " + std::to_string(out[i]);
    }
    return "";
  };
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const std::string line = ranks == 1 ? "line+0" : "line[rank 0]+0";
    for (const auto way : {Proxy::kFence, Proxy::kTensor}) {
      for_seeds(6, [&](uint64_t seed) { return run(way, ranks, seed, {}); });
    }
    for (const auto way : {Proxy::kNoFence, Proxy::kFenceFirst, Proxy::kWriterFences}) {
      CAPTURE(static_cast<int>(way));
      for_seeds(6, [&](uint64_t seed) {
        return run(way, ranks, seed,
                   {"cluster 1 cta 0 warp 0 lane 0 (load, global_memory_test.cpp:",
                    "bulk load at " + line + ", which cluster 0 cta 0 wrote (write, ",
                    "nothing orders this after that"});
      });
    }
    for_seeds(6, [&](uint64_t seed) {
      return run(Proxy::kTensorNoFence, ranks, seed,
                 {"TMA load at " + line + ", which cluster 0 cta 0 wrote (write, "});
    });
  }
}

/// A thread writes a line and loads it itself.
struct OwnProxy : Kernel<1> {
  struct Params {
    bool fences;
    hw::Global<uint32_t> line, out;
  };
  using Smem = Proxy::Smem;
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    hw::barrier_init(s.full, 1);
    hw::fence_barrier_init();
    hw::st(p.line, 100);
    if (p.fences) hw::fence_proxy_async_global();
    hw::arrive_expect(s.full, 16);
    hw::bulk_load(hw::address(s.tile), p.line, 16, hw::address(s.full));
    hw::wait(s.full, 0);
    hw::st(p.out, hw::ld_shared<uint32_t>(hw::address(s.tile)));
  }
};

TEST_CASE("a copy sees what its own thread wrote before fence.proxy.async.global") {
  const auto seen = [](bool fences, uint64_t seed) {
    World world;
    const OwnProxy::Params p{fences, world.filled<uint32_t>("line", 4, 1),
                             world.allocate<uint32_t>("out", 1)};
    const Report report = hw::launch<OwnProxy>(world, 1, p, {.seed = seed});
    return report.ok ? world.download(p.out, 1)[0] : 0;
  };
  for_seeds(12, [&](uint64_t seed) -> std::string {
    const uint32_t got = seen(true, seed);
    return got == 100 ? "" : "expected 100, got " + std::to_string(got);
  });
  on_some_seed(40, [&](uint64_t seed) { return seen(false, seed) != 100; });
}

// --- widths and parts of words ---------------------------------------------------------------------------

/// CTA c writes halfwords c, c + 2, c + 4 ... of a line; a third cluster reads it whole.
struct Halves : Kernel<1> {
  static constexpr int kHalves = 32;
  struct Params {
    hw::Global<uint16_t> halves;
    hw::Global<uint32_t> written, out;
  };
  static void run(const Params& p, Smem&) {
    const int me = hw::cluster_id();
    if (me < 2) {
      if (hw::lane() < kHalves / 2) {
        const int i = hw::lane() * 2 + me;
        hw::st(p.halves + i, static_cast<uint16_t>(1000 * me + i));
      }
      hw::warp_sync();
      if (hw::lane() == 0) hw::add<Order::kRelease, Scope::kGpu>(p.written, 1);
      return;
    }
    if (hw::lane() != 0) return;
    hw::wait_flag<Order::kAcquire, Scope::kGpu>(p.written, 2);
    for (int i = 0; i < kHalves; ++i) hw::st(p.out + i, uint32_t{hw::ld(p.halves + i)});
  }
};

TEST_CASE("two CTAs write halves of the same words") {
  for_seeds(12, [](uint64_t seed) -> std::string {
    World world;
    const Halves::Params p{world.allocate<uint16_t>("halves", Halves::kHalves),
                           world.filled<uint32_t>("written", 1, 0),
                           world.allocate<uint32_t>("out", Halves::kHalves)};
    const Report report = hw::launch<Halves>(world, 3, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto out = world.download(p.out, Halves::kHalves);
    for (uint32_t i = 0; i < Halves::kHalves; ++i) {
      if (out[i] != 1000 * (i % 2) + i) return "half " + std::to_string(i);
    }
    return "";
  });
}

/// One thread writes and reads in all widths, over what it has just written.
struct Widths : Kernel<1> {
  struct Params {
    hw::Global<uint32_t> words;
  };
  template <class T>
  static hw::Global<T> as(hw::Global<uint32_t> p) {
    return hw::Global<T>(reinterpret_cast<T*>(p.address()));
  }
  static void run(const Params& p, Smem&) {
    if (hw::lane() != 0) return;
    hw::st(as<hw::Vec4>(p.words), hw::Vec4{1, 2, 3, 4});
    hw::st(as<hw::Vec2>(p.words) + 1, hw::Vec2{5, 6});
    hw::st(as<uint16_t>(p.words) + 1, uint16_t{7});
    hw::st(as<uint64_t>(p.words) + 2, uint64_t{8} << 32 | 9);
    hw::st(as<float>(p.words) + 6, 1.0F);
    const hw::Vec4 v = hw::ld(as<hw::Vec4>(p.words));
    CHECK(v.x == (7U << 16 | 1));
    CHECK(v.y == 2);
    CHECK(v.z == 5);
    CHECK(v.w == 6);
    CHECK(hw::ld(p.words + 4) == 9);
    CHECK(hw::ld(p.words + 5) == 8);
    CHECK(hw::ld(as<float>(p.words) + 6) == 1);
    CHECK(hw::ld(as<uint16_t>(p.words) + 13) == 0x3F80);
    // A strong access comes after this thread's own weak ones.
    CHECK(hw::ld<Order::kRelaxed, Scope::kGpu>(p.words + 5) == 8);
    CHECK(hw::add<Order::kRelaxed, Scope::kGpu>(p.words + 4, 1) == 9);
    CHECK(hw::ld(p.words + 4) == 10);
  }
};

TEST_CASE("widths of 2 to 16 bytes") {
  expect_of<Widths>(
      {}, {}, [](World& world) { return Widths::Params{world.allocate<uint32_t>("words", 8)}; });
}

// --- who may reach what ----------------------------------------------------------------------------------

/// One access that must not be.
struct Reach : Kernel<1> {
  enum Act {
    kRead,
    kReadAtEnd,
    kReadAcrossEnd,
    kReadNull,
    kWriteAtEnd,
    kReadUnwritten,
    kReadHalfWritten,
    kMisaligned,
    kStrongUnwritten,
    kAddUnwritten,
    kStoreUnwritten,
    kStrongMisaligned,
    kStrongAtEnd,
    kOtherRank,
    kOtherRankWrites,
    kOtherRankStrong,
    kOtherRankWaits
  };
  struct Params {
    Act act;
    hw::Global<uint32_t> x;      // [9], written
    hw::Global<uint32_t> fresh;  // [4], its first word written
    hw::Global<uint32_t> other;  // of another rank
  };
  template <class T>
  static hw::Global<T> as(hw::Global<uint32_t> p) {
    return hw::Global<T>(reinterpret_cast<T*>(p.address()));
  }
  static void act(const Params& p) {
    switch (p.act) {
      case kRead:
        return void(hw::ld(p.x + 8));
      case kReadAtEnd:
        return void(hw::ld(p.x + 9));
      case kReadAcrossEnd:
        return void(hw::ld(as<hw::Vec2>(p.x) + 4));
      case kReadNull:
        return void(hw::ld(hw::Global<uint32_t>(nullptr)));
      case kWriteAtEnd:
        return hw::st(p.x + 10, 1);
      case kReadUnwritten:
        return void(hw::ld(p.fresh + 1));
      case kReadHalfWritten:
        return void(hw::ld(as<hw::Vec4>(p.fresh)));
      case kMisaligned:
        return void(hw::ld(as<hw::Vec2>(p.x + 1)));
      case kStrongUnwritten:
        return void(hw::ld<Order::kAcquire, Scope::kGpu>(p.fresh + 1));
      case kAddUnwritten:
        return void(hw::add<Order::kRelaxed, Scope::kGpu>(p.fresh + 1, 1));
      case kStoreUnwritten:
        return hw::st<Order::kRelease, Scope::kGpu>(p.fresh + 1, 1);
      case kStrongMisaligned:
        return void(hw::add<Order::kRelaxed, Scope::kGpu>(as<uint64_t>(p.x + 1), 1));
      case kStrongAtEnd:
        return hw::st<Order::kRelease, Scope::kGpu>(p.x + 9, 1);
      case kOtherRank:
        return void(hw::ld(p.other));
      case kOtherRankWrites:
        return hw::st(p.other, 1);
      case kOtherRankStrong:
        return void(hw::add<Order::kRelaxed, Scope::kSys>(p.other, 1));
      case kOtherRankWaits:
        return hw::wait_flag<Order::kRelaxed, Scope::kSys>(p.other, 0);
    }
  }
  static void run(const Params& p, Smem&) {
    if (hw::cluster_id() == 0 && hw::lane() == 0) act(p);
  }
};

std::string reach(Reach::Act act, const std::vector<int>& hosts, const Words& words) {
  World world(2, hosts);
  const auto fresh = world.allocate<uint32_t>("fresh", 4);
  world.assign(fresh, std::vector<uint32_t>{1});
  const Reach::Params p{act, world.filled<uint32_t>("x", 9, 1), fresh,
                        world.filled<uint32_t>("other", 4, 1, 1)};
  return verdict(hw::launch<Reach>(world, 2, p, {.seed = 1, .clusters_per_rank = 1}), words);
}

TEST_CASE("accesses outside allocations, of what nobody has written, misaligned") {
  struct Case {
    Reach::Act act;
    Words words;
  };
  const Case cases[] = {
      {Reach::kRead, {}},
      {Reach::kReadAtEnd,
       {"cluster 0 cta 0 warp 0 lane 0 (act, global_memory_test.cpp:",
        "ld.global of 4 bytes at byte 36 of x[rank 0], which has 36: outside every allocation"}},
      {Reach::kReadAcrossEnd,
       {"ld.global of 8 bytes at byte 39 of x[rank 0], which has 36: outside every allocation"}},
      {Reach::kReadNull, {"ld.global of 4 bytes at a null address: outside every allocation"}},
      {Reach::kWriteAtEnd,
       {"st.global of 4 bytes at byte 40 of x[rank 0], which has 36: outside every allocation"}},
      {Reach::kReadUnwritten,
       {"ld.global of 4 bytes at fresh[rank 0]+4: nobody has written byte 0"}},
      {Reach::kReadHalfWritten,
       {"ld.global of 16 bytes at fresh[rank 0]+0: nobody has written byte 4"}},
      {Reach::kMisaligned, {"ld.global at x[rank 0]+4: not aligned to 8 bytes"}},
      {Reach::kStrongUnwritten, {"ld at fresh[rank 0]+4, which nobody has written"}},
      {Reach::kAddUnwritten, {"atom.add at fresh[rank 0]+4, which nobody has written"}},
      {Reach::kStoreUnwritten, {}},
      {Reach::kStrongMisaligned, {"atom.add at x[rank 0]+4: not aligned to 8 bytes"}},
      {Reach::kStrongAtEnd, {"st of 4 bytes at byte 36 of x[rank 0], which has 36"}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.act));
    CHECK(reach(each.act, {}, each.words) == "");
  }
}

TEST_CASE("the memory of another rank: on the same host only") {
  for (const auto act : {Reach::kOtherRank, Reach::kOtherRankWrites, Reach::kOtherRankStrong,
                         Reach::kOtherRankWaits}) {
    CAPTURE(static_cast<int>(act));
    CHECK(reach(act, {}, {}) == "");
    CHECK(reach(act, {3, 3}, {}) == "");
    CHECK(reach(act, {0, 1},
                {"cluster 0 cta 0",
                 "at other[rank 1]+0: rank 0 cannot reach the memory of rank 1, "
                 "which is on another host"}) == "");
  }
}

// --- the host's side -------------------------------------------------------------------------------------

template <class F>
std::string refusal(F f) {
  try {
    f();
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

TEST_CASE("a world refuses what it cannot be") {
  CHECK(refusal([] { World(0); }) == "World: expected ranks >= 1, got 0");
  CHECK(refusal([] { World(3, {0, 1}); }) == "World: expected a host for each of 3 ranks, got 2");
  World world(2);
  CHECK(refusal([&] { world.allocate<float>("x", 4, 2); }) ==
        "x: expected a rank in [0, 2), got 2");
  CHECK(refusal([&] { world.allocate<float>("x", 4, -1); }) ==
        "x: expected a rank in [0, 2), got -1");
  CHECK(world.ranks() == 2);
}

TEST_CASE("what a host writes and reads, and what nobody wrote") {
  World world(2);
  const auto x = world.allocate<uint32_t>("x", 3, 1);
  CHECK(world.download(x, 3) == std::vector<uint32_t>(3, 0xFFFFFFFF));
  world.assign(x + 1, std::vector<uint32_t>{7});
  CHECK(world.download(x, 3) == std::vector<uint32_t>{0xFFFFFFFF, 7, 0xFFFFFFFF});
  CHECK(world.download(x, 0).empty());
  CHECK(refusal([&] { world.download(x, 4); }) == "World: read outside an allocation: x[rank 1]+0");
  CHECK(refusal([&] { world.assign(x + 2, std::vector<uint32_t>{1, 2}); }) ==
        "World: write outside an allocation: x[rank 1]+8");
  CHECK(refusal([&] { world.assign(x + 3, std::vector<uint32_t>{1}); }) ==
        "World: write outside an allocation: byte 12 of x[rank 1], which has 12");
  const auto both = world.symmetric_filled<float>("both", 4, 2.0F);
  CHECK(both.size() == 2);
  CHECK(world.download(both[1], 4) == std::vector<float>(4, 2.0F));
}

}  // namespace
}  // namespace logitless::model_test
