// SPDX-License-Identifier: Apache-2.0
// Schedules: a seed is one, seeds differ, who polls does not keep others from running.
#include <algorithm>
#include <set>
#include <stdexcept>

#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Order;
using hw::Scope;

/// Every thread draws a ticket, after a copy that only some wait for.
struct Tickets : Kernel<2, 2> {
  struct Params {
    hw::Global<uint32_t> next, order, line;
  };
  struct Smem {
    hw::Buffer<16, 16> landed;
    hw::Barrier arrived;
  };
  static int number() {
    return (hw::cluster_id() * kCluster + hw::cta_rank()) * kThreads + hw::thread();
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.arrived, 1);
      hw::fence_barrier_init();
      hw::arrive_expect(s.arrived, 16);
      hw::bulk_load(hw::address(s.landed), p.line, 16, hw::address(s.arrived));
      hw::wait(s.arrived, 0);
    }
    const uint32_t ticket = hw::add<Order::kRelaxed, Scope::kGpu>(p.next, 1);
    hw::st(p.order + ticket, static_cast<uint32_t>(number()));
  }
};

struct Drawn {
  Report report;
  std::vector<uint32_t> order;

  size_t place(uint32_t thread) const {
    return static_cast<size_t>(std::find(order.begin(), order.end(), thread) - order.begin());
  }
};
Drawn draw(uint64_t seed) {
  constexpr int kClusters = 2, kAll = kClusters * Tickets::kCluster * Tickets::kThreads;
  World world;
  const Tickets::Params params{.next = world.filled<uint32_t>("next", 1, 0),
                               .order = world.allocate<uint32_t>("order", kAll),
                               .line = world.filled<uint32_t>("line", 4, 0)};
  Drawn drawn{hw::launch<Tickets>(world, kClusters, params, {.seed = seed}), {}};
  drawn.order = world.download(params.order, kAll);
  return drawn;
}

TEST_CASE("a seed is one schedule") {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    CAPTURE(seed);
    const Drawn first = draw(seed), again = draw(seed);
    REQUIRE_MESSAGE(first.report.ok, first.report.what);
    CHECK(first.order == again.order);
    CHECK(first.report.switches == again.report.switches);
    CHECK(first.report.async_operations == again.report.async_operations);
    CHECK(first.report.async_operations == 4);  // one copy of each CTA
  }
}

TEST_CASE("seeds are different schedules") {
  std::set<std::vector<uint32_t>> orders;
  std::set<uint64_t> switches;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const Drawn drawn = draw(seed);
    orders.insert(drawn.order);
    switches.insert(drawn.report.switches);
  }
  CHECK(orders.size() == 12);
  CHECK(switches.size() > 6);
}

TEST_CASE("whoever starts first, each may be first") {
  struct Pair {
    const char* of;
    uint32_t first, second;
  };
  constexpr Pair kPairs[] = {
      {"lanes", 1, 30}, {"warps", 1, 33}, {"CTAs", 1, 65}, {"clusters", 1, 129}};
  int before[4] = {}, after[4] = {};
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Drawn drawn = draw(seed);
    for (int i = 0; i < 4; ++i) {
      ++(drawn.place(kPairs[i].first) < drawn.place(kPairs[i].second) ? before : after)[i];
    }
  }
  for (int i = 0; i < 4; ++i) {
    CAPTURE(kPairs[i].of);
    CHECK(before[i] > 4);
    CHECK(after[i] > 4);
  }
}

/// How often a thread finds its copy still under way.
struct Poll : Kernel<> {
  struct Params {
    hw::Global<uint32_t> line, polls;
  };
  using Smem = Tickets::Smem;
  static void run(const Params& p, Smem& s) {
    if (hw::thread() != 0) return;
    hw::barrier_init(s.arrived, 1);
    hw::fence_barrier_init();
    hw::arrive_expect(s.arrived, 16);
    hw::bulk_load(hw::address(s.landed), p.line, 16, hw::address(s.arrived));
    uint32_t polls = 0;
    while (!hw::test(s.arrived, 0)) ++polls;
    hw::st(p.polls, polls);
  }
};

TEST_CASE("asynchronous work is early, late or in between, as the seed says") {
  uint64_t polls[3] = {};
  for (uint64_t seed = 0; seed < 30; ++seed) {
    World world;
    const Poll::Params params{world.filled<uint32_t>("line", 4, 0),
                              world.allocate<uint32_t>("polls", 1)};
    const Report report = hw::launch<Poll>(world, 1, params, {.seed = seed});
    REQUIRE_MESSAGE(report.ok, report.what);
    polls[seed % 3] += world.download(params.polls, 1)[0];
  }
  const auto of = [&](hw::model::Timing timing) { return polls[static_cast<int>(timing)]; };
  CHECK(of(hw::model::Timing::kEarly) < 100);
  CHECK(of(hw::model::Timing::kMixed) > of(hw::model::Timing::kEarly));
  CHECK(of(hw::model::Timing::kLate) > of(hw::model::Timing::kMixed));
}

/// The last cluster, and only it, raises a flag for which the first one polls.
struct PollFlag : Kernel<> {
  enum Means { kLoad, kLoadAndPause, kAdd, kWait };
  struct Params {
    Means means;
    hw::Global<uint32_t> flag, data, seen;
  };
  static void poll(const Params& p) {
    if (p.means == kWait) return hw::wait_flag<Order::kRelaxed, Scope::kSys>(p.flag, 1);
    while ((p.means == kAdd ? hw::add<Order::kRelaxed, Scope::kSys>(p.flag, 0)
                            : hw::ld<Order::kRelaxed, Scope::kSys>(p.flag)) == 0) {
      if (p.means == kLoadAndPause) hw::pause();
    }
  }
  static void run(const Params& p, Smem&) {
    if (hw::thread() != 0) return;
    if (hw::cluster_id() == hw::cluster_count() - 1) {
      hw::st(p.data, 7);
      hw::fence<Scope::kSys>();
      hw::st<Order::kRelaxed, Scope::kSys>(p.flag, 1);
    } else if (hw::cluster_id() == 0) {
      poll(p);
      hw::fence<Scope::kSys>();
      hw::st(p.seen, hw::ld(p.data));
    }
  }
};

TEST_CASE("who polls a flag comes on") {
  for (const int ranks : {1, 3}) {
    for (int means = PollFlag::kLoad; means <= PollFlag::kWait; ++means) {
      CAPTURE(ranks);
      CAPTURE(means);
      for_seeds(9, [&](uint64_t seed) -> std::string {
        World world(ranks);
        const PollFlag::Params params{
            static_cast<PollFlag::Means>(means), world.filled<uint32_t>("flag", 1, 0),
            world.allocate<uint32_t>("data", 1), world.allocate<uint32_t>("seen", 1)};
        const Report report =
            hw::launch<PollFlag>(world, 3, params, {.seed = seed, .clusters_per_rank = 3 / ranks});
        if (!report.ok) return report.what;
        return world.download(params.seen, 1)[0] == 7 ? "" : "the data is old";
      });
    }
  }
}

TEST_CASE("clusters start as they fit; who waits for one that does not is told") {
  const auto launch = [](PollFlag::Means means, int resident, uint64_t seed) {
    World world;
    const PollFlag::Params params{means, world.filled<uint32_t>("flag", 1, 0),
                                  world.allocate<uint32_t>("data", 1),
                                  world.allocate<uint32_t>("seen", 1)};
    return hw::launch<PollFlag>(world, 3, params, {.seed = seed, .resident_clusters = resident});
  };
  // Cluster 1 ends at once and makes room for cluster 2.
  for_seeds(6, [&](uint64_t seed) { return passes(launch(PollFlag::kWait, 2, seed)); });
  for_seeds(6, [&](uint64_t seed) {
    return faults(launch(PollFlag::kWait, 1, seed),
                  {"deadlock:", "cluster 0 cta 0 warp 0 (poll, scheduler_test.cpp:",
                   "waits for flag+0 to reach 1, it holds 0 [1 lane]",
                   "2 of 3 clusters have not started: 1 fit at once"});
  });
}

/// Clusters that need nobody.
struct Alone : Kernel<> {
  struct Params {
    hw::Global<uint32_t> ran;
  };
  static void run(const Params& p, Smem&) {
    if (hw::thread() == 0) hw::add<Order::kRelaxed, Scope::kGpu>(p.ran, 1);
  }
};

TEST_CASE("one cluster after the other") {
  for_seeds(6, [](uint64_t seed) -> std::string {
    World world;
    const Alone::Params params{world.filled<uint32_t>("ran", 1, 0)};
    const Report report =
        hw::launch<Alone>(world, 5, params, {.seed = seed, .resident_clusters = 1});
    if (!report.ok) return report.what;
    return world.download(params.ran, 1)[0] == 5 ? "" : "not every cluster ran";
  });
}

// --- launches that cannot be ---------------------------------------------------------------------------

template <int kThreadCount, int kCtas = 1, int kSharedBytes = 64>
struct Shaped {
  struct Params {};
  struct Smem {
    hw::Buffer<kSharedBytes, 16> bytes;
  };
  static constexpr int kThreads = kThreadCount, kCluster = kCtas;
  static void run(const Params&, Smem&) {}
};

template <class K>
std::string refusal(int clusters, Options options = {}, int ranks = 1) {
  World world(ranks);
  try {
    const Report report = hw::launch<K>(world, clusters, {}, options);
    return report.ok ? "" : report.what;
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

TEST_CASE("a launch that the hardware cannot do is refused, with the values") {
  CHECK(refusal<Shaped<32>>(1) == "");
  CHECK(refusal<Shaped<1024>>(1) == "");
  CHECK(refusal<Shaped<40>>(1) == "launch: expected 32 to 1024 threads in whole warps, got 40");
  CHECK(refusal<Shaped<1056>>(1) == "launch: expected 32 to 1024 threads in whole warps, got 1056");
  CHECK(refusal<Shaped<32, 17>>(1) == "launch: expected a cluster of 1 to 16 CTAs, got 17");
  CHECK(refusal<Shaped<32, 16>>(4) == "");
  CHECK(refusal<Shaped<32, 16>>(5) == "launch: expected 1 to 64 CTAs, got 5 clusters of 16");
  CHECK(refusal<Shaped<32>>(0) == "launch: expected 1 to 64 CTAs, got 0 clusters of 1");
  CHECK(refusal<Shaped<32>>(4, {.clusters_per_rank = 2}, 2) == "");
  CHECK(refusal<Shaped<32>>(5, {.clusters_per_rank = 2}, 2) ==
        "launch: 5 clusters, 2 for each rank, need more than the world's 2 ranks");
  CHECK(refusal<Shaped<32, 1, 227 << 10>>(1) == "");
  CHECK(refusal<Shaped<32, 1, (227 << 10) + 16>>(1) ==
        "launch: expected at most 232448 bytes of shared memory, got 232464");
}

}  // namespace
}  // namespace logitless::model_test
