// SPDX-License-Identifier: Apache-2.0
// Other GPUs: multicast memory, messages with a signal, waits that end softly.
#include <bit>
#include <set>

#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Order;
using hw::Scope;

// --- sums through the switch -----------------------------------------------------------------------------

/// Every rank writes its part, tells all, waits for all, and reads the sum of all.
struct AllSum : Kernel<> {
  enum Flaw {
    kNone,
    kNoAliasFence,
    kAliasFenceFirst,
    kCountRelaxed,
    kCountAtGpu,
    kReadsAlone,  // without waiting, while a rank's own write has not been released
    kReadsUnwritten
  };
  static constexpr int kMostRanks = 4;
  struct Params {
    Flaw flaw;
    int ranks;
    hw::Global<float> part[kMostRanks];      // [4], symmetric
    hw::Global<hw::Bf16> half[kMostRanks];   // [8], symmetric
    hw::Global<uint32_t> count[kMostRanks];  // symmetric
    hw::Multicast<float> parts;
    hw::Multicast<hw::Bf16> halves;
    hw::Multicast<uint32_t> counts;
    hw::Global<float> sum[kMostRanks];  // [4]
    hw::Global<hw::Vec4> halfsum[kMostRanks];
  };
  static void write(const Params& p, int rank) {
    for (int i = 0; i < 4; ++i) hw::st(p.part[rank] + i, static_cast<float>(10 * rank + i));
    for (int i = 0; i < 8; ++i) {
      hw::st(p.half[rank] + i,
             hw::Bf16{static_cast<uint16_t>(hw::bf16_bits(static_cast<float>(rank - i)))});
    }
  }
  static void read(const Params& p, int rank) {
    const hw::Float4 sum = hw::multimem_load_add(p.parts);
    hw::st(p.sum[rank], sum.x);
    hw::st(p.sum[rank] + 1, sum.y);
    hw::st(p.sum[rank] + 2, sum.z);
    hw::st(p.sum[rank] + 3, sum.w);
    hw::st(p.halfsum[rank], hw::multimem_load_add(p.halves));
  }
  static void run(const Params& p, Smem&) {
    if (hw::lane() != 0) return;
    const int rank = hw::cluster_id();
    if (p.flaw != kReadsUnwritten) write(p, rank);
    if (p.flaw == kReadsAlone || p.flaw == kReadsUnwritten) {
      hw::fence_proxy_alias();
      return read(p, rank);
    }
    if (p.flaw == kCountRelaxed) {
      hw::multimem_add<Order::kRelaxed, Scope::kSys>(p.counts, 1);
    } else if (p.flaw == kCountAtGpu) {
      hw::multimem_add<Order::kRelease, Scope::kGpu>(p.counts, 1);
    } else {
      hw::multimem_add<Order::kRelease, Scope::kSys>(p.counts, 1);
    }
    if (p.flaw == kAliasFenceFirst) hw::fence_proxy_alias();
    hw::wait_flag<Order::kAcquire, Scope::kSys>(p.count[rank], static_cast<uint32_t>(p.ranks));
    if (p.flaw != kNoAliasFence && p.flaw != kAliasFenceFirst) hw::fence_proxy_alias();
    read(p, rank);
  }
};

AllSum::Params all_sum(World& world, AllSum::Flaw flaw) {
  AllSum::Params p{};
  p.flaw = flaw;
  p.ranks = world.ranks();
  const auto part = world.symmetric<float>("part", 4);
  const auto half = world.symmetric<hw::Bf16>("half", 8);
  const auto count = world.symmetric_filled<uint32_t>("count", 4, 0);
  for (int r = 0; r < world.ranks(); ++r) {
    const auto at = static_cast<size_t>(r);
    p.part[r] = part[at];
    p.half[r] = half[at];
    p.count[r] = count[at];
    p.sum[r] = world.allocate<float>("sum", 4, r);
    p.halfsum[r] = world.allocate<hw::Vec4>("halfsum", 1, r);
  }
  p.parts = world.multicast(part);
  p.halves = world.multicast(half);
  p.counts = world.multicast(count);
  return p;
}

TEST_CASE("multimem: every rank reads the sum of all ranks") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    for_seeds(9, [&](uint64_t seed) -> std::string {
      World world(ranks);
      const AllSum::Params p = all_sum(world, AllSum::kNone);
      const Report report =
          hw::launch<AllSum>(world, ranks, p, {.seed = seed, .clusters_per_rank = 1});
      if (!report.ok) return report.what;
      for (int r = 0; r < ranks; ++r) {
        const auto sum = world.download(p.sum[r], 4);
        const hw::Vec4 v = world.download(p.halfsum[r], 1)[0];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        const int all = ranks * (ranks - 1) / 2;  // 0 + 1 + ...
        for (int i = 0; i < 4; ++i) {
          if (sum[static_cast<size_t>(i)] != static_cast<float>(10 * all + i * ranks)) return "f32";
        }
        for (int i = 0; i < 8; ++i) {
          const float half = hw::bf16_value(words[i / 2] >> (i % 2 * 16) & 0xFFFF);
          if (half != static_cast<float>(all - i * ranks)) return "bf16";
        }
      }
      return "";
    });
  }
}

TEST_CASE("multimem: what is missing is said") {
  const auto fails = [](AllSum::Flaw flaw, const Words& words) {
    CAPTURE(static_cast<int>(flaw));
    for_seeds(9, [&](uint64_t seed) {
      World world(2);
      return faults(hw::launch<AllSum>(world, 2, all_sum(world, flaw),
                                       {.seed = seed, .clusters_per_rank = 1}),
                    words);
    });
  };
  const Words unordered = {"(read, peers_test.cpp:", "multimem.ld_reduce at part[rank ",
                           "wrote (write, ", "nothing orders this after that"};
  fails(AllSum::kNoAliasFence, unordered);
  fails(AllSum::kAliasFenceFirst, unordered);
  fails(AllSum::kCountRelaxed, {"multimem.ld_reduce at part[rank "});
  fails(AllSum::kCountAtGpu, {"multimem.ld_reduce at part[rank "});
  fails(AllSum::kReadsAlone, {"multimem.ld_reduce "});
  fails(AllSum::kReadsUnwritten,
        {"multimem.ld_reduce of 16 bytes at part[rank ", ": nobody has written byte 0"});
  on_some_seed(60, [](uint64_t seed) {
    World world(1);
    return faults(hw::launch<AllSum>(world, 1, all_sum(world, AllSum::kReadsAlone), {.seed = seed}),
                  {"multimem.ld_reduce at part+0: a write there has not been released at .sys"})
        .empty();
  });
}

/// The switch promises no order of its additions.
struct AnyOrder : Kernel<> {
  struct Params {
    hw::Multicast<float> parts;
    hw::Global<float> sum;
  };
  static void run(const Params& p, Smem&) {
    if (hw::thread() == 0 && hw::cluster_id() == 0) hw::st(p.sum, hw::multimem_load_add(p.parts).x);
  }
};

TEST_CASE("multimem: the switch adds in any order, bf16 in f32") {
  std::set<float> sums;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    World world(3);
    const auto parts = world.symmetric_filled<float>("parts", 4, 0);
    const float values[3] = {1e8F, 3, -1e8F};
    for (size_t r = 0; r < 3; ++r) world.assign(parts[r], std::vector<float>{values[r]});
    const AnyOrder::Params p{world.multicast(parts), world.allocate<float>("sum", 1)};
    const Report report = hw::launch<AnyOrder>(world, 3, p, {.seed = seed, .clusters_per_rank = 1});
    REQUIRE_MESSAGE(report.ok, report.what);
    sums.insert(world.download(p.sum, 1)[0]);
  }
  CHECK(sums == std::set<float>{0, 3});  // 3 is lost, or not
}

// --- stores through the switch ---------------------------------------------------------------------------

/// Rank 0 writes into every rank at once.
struct Broadcast : Kernel<> {
  enum Flaw { kNone, kNoAliasFence, kRelaxed, kAtGpu };
  struct Params {
    Flaw flaw;
    hw::Multicast<uint32_t> to;
    hw::Multicast<uint32_t> ready;
    hw::Global<uint32_t> own[3], flag[3], out[3];
  };
  static void run(const Params& p, Smem&) {
    if (hw::lane() != 0) return;
    const int rank = hw::cluster_id();
    if (rank == 0) {
      hw::multimem_store(p.to, hw::Vec4{5, 6, 7, 8});
      if (p.flaw == kRelaxed) {
        hw::multimem_add<Order::kRelaxed, Scope::kSys>(p.ready, 1);
      } else if (p.flaw == kAtGpu) {
        hw::multimem_add<Order::kRelease, Scope::kGpu>(p.ready, 1);
      } else {
        hw::multimem_add<Order::kRelease, Scope::kSys>(p.ready, 1);
      }
    }
    hw::wait_flag<Order::kAcquire, Scope::kSys>(p.flag[rank], 1);
    if (p.flaw != kNoAliasFence) hw::fence_proxy_alias();
    if (rank == 0) return;
    for (int i = 0; i < 4; ++i) hw::st(p.out[rank] + i, hw::ld(p.own[rank] + i));
  }
};

std::string broadcast(Broadcast::Flaw flaw, uint64_t seed, const Words& words) {
  World world(3);
  const auto to = world.symmetric_filled<uint32_t>("to", 4, 1);
  const auto flag = world.symmetric_filled<uint32_t>("flag", 4, 0);
  Broadcast::Params p{.flaw = flaw,
                      .to = world.multicast(to),
                      .ready = world.multicast(flag),
                      .own = {},
                      .flag = {},
                      .out = {}};
  for (int r = 0; r < 3; ++r) {
    p.own[r] = to[static_cast<size_t>(r)];
    p.flag[r] = flag[static_cast<size_t>(r)];
    p.out[r] = world.filled<uint32_t>("out", 4, 0, r);
  }
  const Report report = hw::launch<Broadcast>(world, 3, p, {.seed = seed, .clusters_per_rank = 1});
  if (!words.empty() || !report.ok) return verdict(report, words);
  for (int r = 1; r < 3; ++r) {
    if (world.download(p.out[r], 4) != std::vector<uint32_t>{5, 6, 7, 8}) {
      return "rank " + std::to_string(r);
    }
  }
  return "";
}

TEST_CASE("multimem: a store reaches every rank, after release and acquire at .sys") {
  for_seeds(9, [](uint64_t seed) { return broadcast(Broadcast::kNone, seed, {}); });
  const Words unordered = {"ld.global at to[rank ",
                           "which cluster 0 cta 0 wrote (run, peers_test.cpp:"};
  for_seeds(9, [&](uint64_t seed) { return broadcast(Broadcast::kRelaxed, seed, unordered); });
  for_seeds(9, [&](uint64_t seed) { return broadcast(Broadcast::kAtGpu, seed, unordered); });
}
TEST_CASE(
    "multimem: what came through the switch needs fence.proxy.alias before an ordinary load") {
  for_seeds(9, [](uint64_t seed) {
    return broadcast(Broadcast::kNoAliasFence, seed, {"ld.global at to[rank "});
  });
}

/// One access of a multicast address, or of one that is none.
struct Reach : Kernel<> {
  enum Act {
    kNone,
    kMisaligned,
    kOrdinaryAddress,
    kOrdinaryLoad,
    kBeyondEnd,
    kStoreMisaligned,
    kAddOrdinary,
    kAddMisaligned
  };
  struct Params {
    Act act;
    hw::Multicast<float> many;
    hw::Global<float> one;
  };
  static void act(const Params& p) {
    switch (p.act) {
      case kNone:
        return void(hw::multimem_load_add(p.many + 4));
      case kMisaligned:
        return void(hw::multimem_load_add(p.many + 1));
      case kOrdinaryAddress:
        return void(hw::multimem_load_add(hw::Multicast<float>(p.one.address())));
      case kOrdinaryLoad:
        return void(hw::ld(hw::Global<float>(p.many.address())));
      case kBeyondEnd:
        return void(hw::multimem_load_add(p.many + 8));
      case kStoreMisaligned:
        return hw::multimem_store(p.many + 2, hw::Vec4{});
      case kAddMisaligned:
        return hw::multimem_add<Order::kRelaxed, Scope::kSys>(
            hw::Multicast<uint32_t>(
                reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(p.many.address()) + 2)),
            1);
      case kAddOrdinary:
        return hw::multimem_add<Order::kRelaxed, Scope::kSys>(
            hw::Multicast<uint32_t>(reinterpret_cast<uint32_t*>(p.one.address())), 1);
    }
  }
  static void run(const Params& p, Smem&) {
    if (hw::thread() == 0 && hw::cluster_id() == 0) act(p);
  }
};

std::string reach(Reach::Act act, const std::vector<int>& hosts, const Words& words) {
  World world(2, hosts);
  const auto all = world.symmetric_filled<float>("all", 8, 1);
  const Reach::Params p{act, world.multicast(all), all[0]};
  return verdict(hw::launch<Reach>(world, 2, p, {.seed = 1, .clusters_per_rank = 1}), words);
}

TEST_CASE("multimem: addresses") {
  CHECK(reach(Reach::kNone, {}, {}) == "");
  CHECK(reach(Reach::kMisaligned, {}, {"multimem.ld_reduce: not aligned to 16 bytes"}) == "");
  CHECK(reach(Reach::kStoreMisaligned, {}, {"multimem.st: not aligned to 16 bytes"}) == "");
  CHECK(reach(Reach::kAddMisaligned, {}, {"multimem.red: not aligned to 4 bytes"}) == "");
  CHECK(reach(Reach::kOrdinaryAddress, {},
              {"multimem.ld_reduce at all[rank 0]+0: not a multicast address"}) == "");
  CHECK(reach(Reach::kAddOrdinary, {},
              {"multimem.red at all[rank 0]+0: not a multicast address"}) == "");
  CHECK(reach(Reach::kOrdinaryLoad, {},
              {"ld.global of 4 bytes at the multicast address of all[rank 0]+0: outside every "
               "allocation"}) == "");
  CHECK(reach(Reach::kBeyondEnd, {}, {"multimem.ld_reduce at ", "not a multicast address"}) == "");
  CHECK(reach(Reach::kNone, {0, 1},
              {"multimem.ld_reduce at all[rank 1]+16: rank 0 cannot reach the memory of rank 1, "
               "which is on another host"}) == "");
}

// --- messages with a signal ------------------------------------------------------------------------------

/// Rank 0 sends a message in several parts to rank 1, which waits for its signal.
struct Send : Kernel<> {
  enum Flaw {
    kNone,
    kNoSyncBefore,  // the lanes meet in the message itself
    kReadsAtOnce,
    kWaitsRelaxed,
    kWaitsAtGpu,
    kOtherRank,
    kNotSymmetric,
    kSignalNotSymmetric,
    kTooLong,
    kLanesDisagree,
    kOverwrites,
    kOtherWay,
    kUnwritten
  };
  static constexpr int kWords = 200;  // 800 bytes: four parts
  struct Params {
    Flaw flaw;
    hw::Global<uint32_t> to[2];      // symmetric
    hw::Global<uint64_t> signal[2];  // symmetric
    hw::Global<uint32_t> from, out, plain;
    hw::Global<uint64_t> plain_signal;
  };
  static void send(const Params& p) {
    for (int i = hw::lane(); i < kWords; i += 32) {
      if (p.flaw != kUnwritten || i != 150) hw::st(p.from + i, static_cast<uint32_t>(1000 + i));
    }
    if (p.flaw != kNoSyncBefore) hw::warp_sync();
    if (p.flaw == kOtherWay && hw::lane() == 4) hw::fence<Scope::kGpu>();
    const int peer = p.flaw == kOtherRank ? 2 : p.flaw == kLanesDisagree && hw::lane() == 7 ? 0 : 1;
    hw::put_signal(p.flaw == kNotSymmetric ? p.plain : p.to[0], p.from,
                   p.flaw == kTooLong ? 900 : kWords * 4,
                   p.flaw == kSignalNotSymmetric ? p.plain_signal : p.signal[0], 7, peer);
    if (p.flaw != kOverwrites) return;
    hw::warp_sync();
    for (int i = hw::lane(); i < kWords; i += 32) hw::st(p.from + i, 5);
  }
  static void receive(const Params& p) {
    if (hw::lane() != 0) return;
    if (p.flaw == kWaitsRelaxed) {
      while (hw::ld<Order::kRelaxed, Scope::kSys>(p.signal[1]) != 7) hw::pause();
    } else if (p.flaw == kWaitsAtGpu) {
      while (hw::ld<Order::kAcquire, Scope::kGpu>(p.signal[1]) != 7) hw::pause();
    } else if (p.flaw != kReadsAtOnce) {
      while (hw::ld<Order::kAcquire, Scope::kSys>(p.signal[1]) != 7) hw::pause();
    }
    for (int i = 0; i < kWords; ++i) hw::st(p.out + i, hw::ld(p.to[1] + i));
  }
  static void run(const Params& p, Smem&) {
    if (hw::cluster_id() == 0) {
      send(p);
    } else {
      receive(p);
    }
  }
};

std::string send(Send::Flaw flaw, const std::vector<int>& hosts, uint64_t seed,
                 const Words& words) {
  World world(2, hosts);
  const auto to = world.symmetric_filled<uint32_t>("to", Send::kWords, 1);
  const auto signal = world.symmetric_filled<uint64_t>("signal", 1, 0);
  const Send::Params p{flaw,
                       {to[0], to[1]},
                       {signal[0], signal[1]},
                       world.allocate<uint32_t>("from", Send::kWords + 100, 0),
                       world.allocate<uint32_t>("out", Send::kWords, 1),
                       world.filled<uint32_t>("plain", Send::kWords, 0, 0),
                       world.filled<uint64_t>("plain_signal", 1, 0, 0)};
  const Report report = hw::launch<Send>(world, 2, p, {.seed = seed, .clusters_per_rank = 1});
  if (!words.empty() || !report.ok) return verdict(report, words);
  const auto out = world.download(p.out, Send::kWords);
  for (uint32_t i = 0; i < out.size(); ++i) {
    if (out[i] != 1000 + i) return "word " + std::to_string(i) + ": " + std::to_string(out[i]);
  }
  return "";
}

TEST_CASE("put with signal: the whole message is there when its signal is, on every host") {
  for (const auto& hosts : {std::vector<int>{}, std::vector<int>{0, 1}}) {
    CAPTURE(hosts.size());
    for (const auto right : {Send::kNone, Send::kNoSyncBefore}) {
      for_seeds(12, [&](uint64_t seed) { return send(right, hosts, seed, {}); });
    }
  }
}
TEST_CASE("put with signal, misused") {
  const auto fails = [](Send::Flaw flaw, const Words& words) {
    CAPTURE(static_cast<int>(flaw));
    for_seeds(6, [&](uint64_t seed) { return send(flaw, {0, 1}, seed, words); });
  };
  const Words unordered = {
      "(receive, peers_test.cpp:",
      "ld.global at to[rank 1]+0, which cluster 0 cta 0 wrote (send, peers_test.cpp:"};
  fails(Send::kWaitsRelaxed, unordered);
  fails(Send::kWaitsAtGpu, unordered);
  fails(Send::kOtherRank, {"put with signal: expected a rank in [0, 2), got 2"});
  fails(Send::kNotSymmetric, {"put with signal: plain[rank 0]+0 is not symmetric memory"});
  fails(Send::kSignalNotSymmetric,
        {"put with signal: plain_signal[rank 0]+0 is not symmetric memory"});
  fails(Send::kTooLong,
        {"put with signal: 900 bytes at to[rank 0]+0 are more than the allocation holds"});
  fails(Send::kLanesDisagree, {"put with signal: the lanes of the warp disagree on the operand, "});
  fails(Send::kOtherWay, {"put with signal is .aligned, but the lanes"});
  fails(Send::kUnwritten, {"put with signal of ", "nobody has written byte "});
  // Found by what is read: only this message's signal says that it is there.
  for (const auto flaw : {Send::kReadsAtOnce, Send::kOverwrites}) {
    CAPTURE(static_cast<int>(flaw));
    on_some_seed(60, [&](uint64_t seed) { return !send(flaw, {0, 1}, seed, {}).empty(); });
  }
}

// --- waits that end softly -------------------------------------------------------------------------------

/// Every rank but the absent ones tells each; each warp of every rank waits for one rank.
struct Meet : Kernel<4> {
  static constexpr uint32_t kWhat = 42;
  struct Params {
    int ranks;
    uint32_t absent;                  // a bit for each rank
    hw::Global<uint32_t> arrived[4];  // [4]: by the rank that has arrived
    hw::Global<uint64_t> wide[4];     // [4]: the same in 64 bits
    hw::Global<uint32_t> data[4], came[4];
    hw::Abort abort[4];
  };
  static bool wait(const Params& p, int rank, int peer) {
    const hw::PeerWait who{static_cast<uint32_t>(rank), static_cast<uint32_t>(peer), kWhat};
    const bool came = hw::wait_peer(p.arrived[rank] + peer, 3, p.abort[rank], who) &&
                      hw::wait_peer(p.wide[rank] + peer, uint64_t{1} << 40, p.abort[rank], who);
    return came && hw::ld(p.data[peer]) == 9;
  }
  static void run(const Params& p, Smem&) {
    const int rank = hw::cluster_id();
    if ((p.absent >> rank & 1) != 0) return;
    if (hw::thread() == 0) {
      hw::st(p.data[rank], 9);
      for (int peer = 0; peer < p.ranks; ++peer) {
        hw::st<Order::kRelease, Scope::kSys>(p.arrived[peer] + rank, 3);
        hw::st<Order::kRelease, Scope::kSys>(p.wide[peer] + rank, uint64_t{1} << 40);
      }
    }
    const int peer = hw::warp();
    if (hw::lane() != 0 || peer >= p.ranks) return;
    hw::st(p.came[rank] + peer, wait(p, rank, peer) ? 1 : 0);
  }
};

struct Met {
  Report report;
  std::vector<hw::PeerFailure> failures;
  std::vector<std::vector<uint32_t>> came;
  std::vector<uint32_t> raised;
};
Met meet(int ranks, uint32_t absent, uint64_t seed) {
  World world(ranks);
  Meet::Params p{};
  p.ranks = ranks;
  p.absent = absent;
  for (int r = 0; r < ranks; ++r) {
    p.arrived[r] = world.filled<uint32_t>("arrived", ranks, 2, r);
    p.wide[r] = world.filled<uint64_t>("wide", ranks, (uint64_t{1} << 40) - 1, r);
    p.data[r] = world.filled<uint32_t>("data", 1, 0, r);
    p.came[r] = world.filled<uint32_t>("came", ranks, 7, r);
    p.abort[r] = {world.filled<uint32_t>("raised", 1, 0, r),
                  world.filled<hw::PeerFailure>("failure", 1, {}, r), 1000};
  }
  Met met{hw::launch<Meet>(world, ranks, p, {.seed = seed, .clusters_per_rank = 1}), {}, {}, {}};
  for (int r = 0; r < ranks; ++r) {
    met.failures.push_back(world.download(p.abort[r].failure, 1)[0]);
    met.came.push_back(world.download(p.came[r], ranks));
    met.raised.push_back(world.download(p.abort[r].raised, 1)[0]);
  }
  return met;
}

TEST_CASE("wait_peer: all come, nobody gives up") {
  for (const int ranks : {1, 2, 4}) {
    for_seeds(9, [&](uint64_t seed) -> std::string {
      const Met met = meet(ranks, 0, seed);
      if (!met.report.ok) return met.report.what;
      if (met.report.peer_timeouts != 0) return "a wait gave up";
      for (const auto& came : met.came) {
        if (came != std::vector<uint32_t>(static_cast<size_t>(ranks), 1)) return "not all came";
      }
      for (const auto& failure : met.failures) {
        if (failure.state != 0) return "a failure is told";
      }
      return "";
    });
  }
}
TEST_CASE("wait_peer: who does not come is told once by each rank, and all waits of the rank end") {
  for (const uint32_t absent : {0b0100U, 0b1010U}) {
    for_seeds(12, [&](uint64_t seed) -> std::string {
      constexpr int kRanks = 4;
      const Met met = meet(kRanks, absent, seed);
      if (!met.report.ok) return met.report.what;
      if (met.report.peer_timeouts != kRanks - std::popcount(absent)) {
        return std::to_string(met.report.peer_timeouts) + " waits gave up";
      }
      for (uint32_t r = 0; r < kRanks; ++r) {
        const bool here = (absent >> r & 1) == 0;
        const hw::PeerFailure f = met.failures[r];
        if (!here) {
          if (f.state != 0 || met.raised[r] != 0) return "an absent rank tells something";
          continue;
        }
        if (met.raised[r] != 1 || f.state != 1 || f.rank != r || f.what != Meet::kWhat ||
            (absent >> f.peer & 1) == 0 || f.expected != 3 || f.seen != 2) {
          return "rank " + std::to_string(r) + ": peer " + std::to_string(f.peer) + " expected " +
                 std::to_string(f.expected) + " seen " + std::to_string(f.seen);
        }
        for (uint32_t peer = 0; peer < kRanks; ++peer) {
          const bool came = met.came[r][peer] == 1;
          if ((absent >> peer & 1) != 0 ? met.came[r][peer] != 0 : !came) {
            return "rank " + std::to_string(r) + " of peer " + std::to_string(peer);
          }
        }
      }
      return "";
    });
  }
}

/// A wait whose rank has already given up, one at a scope that is too small, one without its words.
struct Soft : Kernel<> {
  enum Way { kRaised, kRaisedButThere, kAtGpu, kAtSys, kNoRaised, kNoFlag, kToldBefore };
  struct Params {
    Way way;
    hw::Global<uint32_t> flag, data, out;
    hw::Abort abort;
  };
  static void run(const Params& p, Smem&) {
    if (hw::thread() != 0) return;
    if (hw::cluster_id() == 0) {
      hw::st(p.data, 5);
      if (p.way == kAtGpu || p.way == kAtSys) hw::st<Order::kRelease, Scope::kSys>(p.flag, 1);
      return;
    }
    const bool came = p.way == kAtGpu
                          ? hw::wait_peer<Scope::kGpu>(p.flag, 1, p.abort, hw::PeerWait{1, 0, 2})
                          : hw::wait_peer(p.flag, 1, p.abort, hw::PeerWait{1, 0, 2});
    hw::st(p.out, came ? 1 : 0);
    if (p.way == kAtGpu || p.way == kAtSys) hw::st(p.out, hw::ld(p.data));
  }
};

TEST_CASE("wait_peer: raised, scopes, words that nobody has written") {
  const auto run = [](Soft::Way way, uint64_t seed, const Words& words, uint32_t out,
                      int timeouts) -> std::string {
    World world(2);
    const bool raised = way == Soft::kRaised || way == Soft::kRaisedButThere;
    const hw::PeerFailure before =
        way == Soft::kToldBefore ? hw::PeerFailure{1, 9, 8, 7, 6, 5} : hw::PeerFailure{};
    const Soft::Params p{
        way,
        way == Soft::kNoFlag
            ? world.allocate<uint32_t>("flag", 1, 1)
            : world.filled<uint32_t>("flag", 1, way == Soft::kRaisedButThere ? 1 : 0, 1),
        world.filled<uint32_t>("data", 1, 0, 0),
        world.filled<uint32_t>("out", 1, 9, 1),
        {way == Soft::kNoRaised ? world.allocate<uint32_t>("raised", 1, 1)
                                : world.filled<uint32_t>("raised", 1, raised ? 1 : 0, 1),
         world.upload("failure", std::vector<hw::PeerFailure>{before}, 1), 1000}};
    const Report report = hw::launch<Soft>(world, 2, p, {.seed = seed, .clusters_per_rank = 1});
    if (!words.empty() || !report.ok) return verdict(report, words);
    if (report.peer_timeouts != timeouts)
      return std::to_string(report.peer_timeouts) + " time-outs";
    const hw::PeerFailure after = world.download(p.abort.failure, 1)[0];
    if (after.state != before.state || after.rank != before.rank || after.seen != before.seen) {
      return "another failure is told";
    }
    const uint32_t got = world.download(p.out, 1)[0];
    return got == out ? "" : "out: " + std::to_string(got);
  };
  for_seeds(6, [&](uint64_t seed) { return run(Soft::kRaised, seed, {}, 0, 0); });
  for_seeds(6, [&](uint64_t seed) { return run(Soft::kRaisedButThere, seed, {}, 1, 0); });
  for_seeds(6, [&](uint64_t seed) { return run(Soft::kAtSys, seed, {}, 5, 0); });
  for_seeds(6, [&](uint64_t seed) {
    return run(Soft::kAtGpu, seed, {"ld.global at data[rank 0]+0, which cluster 0 cta 0 wrote"}, 0,
               0);
  });
  // A failure that the host has not taken is not overwritten.
  for_seeds(6, [&](uint64_t seed) { return run(Soft::kToldBefore, seed, {}, 0, 1); });
  for_seeds(3, [&](uint64_t seed) {
    return run(Soft::kNoRaised, seed, {"ld at raised[rank 1]+0, which nobody has written"}, 0, 0);
  });
  for_seeds(3, [&](uint64_t seed) {
    return run(Soft::kNoFlag, seed, {"ld at flag[rank 1]+0, which nobody has written"}, 0, 0);
  });
}

}  // namespace
}  // namespace logitless::model_test
