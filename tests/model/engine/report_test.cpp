// SPDX-License-Identifier: Apache-2.0
// What a run says: who, in which role, at which line, about which buffer; and who waits for what.
#include <algorithm>

#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Order;
using hw::Scope;

// --- faults ----------------------------------------------------------------------------------------------

/// Threads of every kind make the same mistake, in roles of every kind.
struct Roles : Kernel<2, 2> {
  enum Role { kPlain, kTemplate, kMember, kLambda };
  struct Params {
    Role role;
    int cluster, cta, thread;
  };
  struct Smem {
    hw::Buffer<64, 16> tile;
    hw::Cell<uint32_t> cells[4];
  };
  static void describe(hw::Names& names) {
    names.add("tile", &Smem::tile);
    names.add("cells", &Smem::cells);
  }
  static constexpr int kLineOfLoad = __LINE__ + 1;
  static void load(const Smem& s) { s.cells[2].load(); }
  template <int kWhich>
  static void load_of(const Smem& s) {
    s.cells[kWhich].load();
  }
  struct Tile {
    const Smem* smem;
    void read(int cell) const { smem->cells[cell].load(); }
  };
  static void run(const Params& p, Smem& s) {
    const bool me =
        hw::cluster_id() == p.cluster && hw::cta_rank() == p.cta && hw::thread() == p.thread;
    if (!me) return;
    const auto from_lambda = [&](int cell) { s.cells[cell].load(); };
    switch (p.role) {
      case kPlain:
        return load(s);
      case kTemplate:
        return load_of<3>(s);
      case kMember:
        return Tile{&s}.read(0);
      case kLambda:
        return from_lambda(1);
    }
  }
};

std::string report_of(const Roles::Params& p) {
  World world;
  return hw::launch<Roles>(world, 2, p, {.seed = 3}).what;
}

TEST_CASE("a fault says who, in which role, at which line, and what") {
  const std::string line = std::to_string(Roles::kLineOfLoad);
  CHECK(report_of({Roles::kPlain, 0, 0, 0}) ==
        "cluster 0 cta 0 warp 0 lane 0 (load, report_test.cpp:" + line +
            "): ld.shared of cells[2], which nobody has written");
  CHECK(report_of({Roles::kPlain, 1, 0, 63}) ==
        "cluster 1 cta 0 warp 1 lane 31 (load, report_test.cpp:" + line +
            "): ld.shared of cells[2], which nobody has written");
  CHECK(report_of({Roles::kPlain, 0, 1, 33}).find("cluster 0 cta 1 warp 1 lane 1 (load, ") == 0);
}
TEST_CASE("a role is the name of the function that called") {
  CHECK(report_of({Roles::kTemplate, 0, 0, 0}).find("(load_of, report_test.cpp:") !=
        std::string::npos);
  CHECK(report_of({Roles::kTemplate, 0, 0, 0}).find("cells[3]") != std::string::npos);
  CHECK(report_of({Roles::kMember, 0, 0, 0}).find("(read, report_test.cpp:") != std::string::npos);
  // A lambda belongs to the function that it is written in.
  CHECK(report_of({Roles::kLambda, 0, 0, 0}).find("(run, report_test.cpp:") != std::string::npos);
}

/// The same for a kernel that is a template.
template <int kCells, class T>
struct Templated : Kernel<> {
  struct Smem {
    hw::Cell<T> cells[kCells];
  };
  static void epilogue(const Smem& s) { s.cells[kCells - 1].load(); }
  static void run(const typename Kernel<>::Params&, Smem& s) { epilogue(s); }
};

TEST_CASE("a role of a template; parts without a name are offsets") {
  World world;
  const Report report = hw::launch<Templated<9, float>>(world, 1, {}, {.seed = 1});
  CHECK(faults(report, {"(epilogue, report_test.cpp:", "ld.shared of smem+0x20, which nobody"}) ==
        "");
}

/// Work that happens later has no thread of its own.
struct Later : Kernel<> {
  struct Params {
    hw::Global<uint32_t> line;
  };
  struct Smem {
    hw::Buffer<64, 128> tile;
    hw::Barrier full;
  };
  static void describe(hw::Names& names) { names.add("tile", &Smem::tile); }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() != 0) return;
    hw::barrier_init(s.full, 1);
    hw::fence_barrier_init();
    hw::arrive_expect(s.full, 64);
    hw::bulk_load(hw::address(s.tile), p.line, 64, hw::address(s.full));
    hw::wait(s.full, 0);
  }
};

TEST_CASE("a fault of asynchronous work ends the run, and the next run is none the worse") {
  for_seeds(6, [](uint64_t seed) -> std::string {
    World world;
    const auto unwritten = world.allocate<uint32_t>("unwritten", 16);
    const Report report = hw::launch<Later>(world, 1, {unwritten}, {.seed = seed});
    if (auto wrong =
            faults(report, {"bulk load of 64 bytes at unwritten+0: nobody has written byte 0"});
        !wrong.empty()) {
      return wrong;
    }
    world.assign(unwritten, std::vector<uint32_t>(16, 1));
    return passes(hw::launch<Later>(world, 1, {unwritten}, {.seed = seed}));
  });
}

TEST_CASE("names of any length") {
  World world;
  const std::string name(5000, 'x');
  const auto unwritten = world.allocate<uint32_t>(name, 16);
  const Report report = hw::launch<Later>(world, 1, {unwritten}, {.seed = 1});
  CHECK(!report.ok);
  CHECK(report.what.find("bulk load of 64 bytes at xxxx") != std::string::npos);
}

/// The first fault is told, whatever follows.
struct Everyone : Kernel<4, 2> {
  static void run(const Params&, Smem& s) { s.unused.load(); }
};

TEST_CASE("one fault is told, the first") {
  std::vector<std::string> told;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    World world;
    const Report report = hw::launch<Everyone>(world, 2, {}, {.seed = seed});
    const std::string what = report.what;
    CHECK(faults(report, {"ld.shared of smem+0x0, which nobody has written"}) == "");
    CHECK(std::count(what.begin(), what.end(), ':') == 2);  // one place, one sentence
    told.push_back(what);
  }
  std::sort(told.begin(), told.end());
  CHECK(std::unique(told.begin(), told.end()) - told.begin() > 4);  // of many threads
}

// --- a run that goes well --------------------------------------------------------------------------------

TEST_CASE("a run says how much it did") {
  World world;
  const Later::Params p{world.filled<uint32_t>("line", 16, 1)};
  const Report report = hw::launch<Later>(world, 3, p, {.seed = 1});
  CHECK(report.ok);
  CHECK(report.what.empty());
  CHECK(report.async_operations == 3);
  CHECK(report.switches >= 96);
  CHECK(report.peer_timeouts == 0);
  CHECK(report.seconds >= 0);
}

// --- deadlocks -------------------------------------------------------------------------------------------

/// Every warp waits for something else, for ever.
struct Stuck : Kernel<8, 2> {
  struct Params {
    hw::Global<uint32_t> flag;
  };
  struct Smem {
    hw::Barrier pair[2], lonely;
    hw::Buffer<64, 128> tile;
  };
  static void describe(hw::Names& names) {
    names.add("pair", &Smem::pair);
    names.add("lonely", &Smem::lonely);
  }
  static void wait_for_barrier(Smem& s) { hw::wait(s.pair[1], 0); }
  static void wait_for_bytes(const Params& p, Smem& s) {
    if (hw::lane() != 3) return hw::warp_sync();
    hw::arrive_expect(s.lonely, 192);
    hw::bulk_load(hw::address(s.tile), p.flag, 64, hw::address(s.lonely));
    hw::wait(s.lonely, 0);
  }
  static void wait_for_flag(const Params& p) {
    if (hw::lane() % 2 != 0) return hw::warp_sync();
    hw::wait_flag<Order::kAcquire, Scope::kGpu>(p.flag + 1, 6);
  }
  static void wait_for_name() { hw::named_sync(7, 64); }
  static void wait_for_warp() {
    if (hw::lane() == 9) hw::named_sync(8, 64);
    hw::warp_sync();
  }
  static void wait_for_cta() { hw::cta_sync(); }
  static void wait_for_cluster() {
    hw::cluster_arrive();
    hw::cluster_wait();
  }
  static void wait_for_shuffle() {
    if (hw::lane() < 30) hw::shfl(1U, 0);
    if (hw::lane() == 30) hw::named_sync(9, 64);
    if (hw::lane() == 31) hw::named_sync(10, 64);
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.pair[1], 5);
      hw::barrier_init(s.lonely, 1);
      hw::fence_barrier_init();
      hw::arrive(s.pair[1]);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::cta_rank() == 1) return wait_for_cta();  // all of them: they go on, and leave
    switch (hw::warp()) {
      case 0:
        return wait_for_barrier(s);
      case 1:
        return wait_for_bytes(p, s);
      case 2:
        return wait_for_flag(p);
      case 3:
        return wait_for_name();
      case 4:
        return wait_for_warp();
      case 5:
        return wait_for_cta();
      case 6:
        return wait_for_cluster();
      default:
        return wait_for_shuffle();
    }
  }
};

TEST_CASE("a deadlock lists who waits for what, warp by warp") {
  for_seeds(6, [](uint64_t seed) -> std::string {
    World world;
    const Stuck::Params p{world.upload<uint32_t>("flag", std::vector<uint32_t>(16, 4))};
    const Report report = hw::launch<Stuck>(world, 1, p, {.seed = seed});
    if (auto wrong = faults(
            report,
            {"deadlock:\n  cluster 0 cta 0 warp 0 (wait_for_barrier, report_test.cpp:",
             ") waits for pair[1], parity 0: phase 0 is open, 4 of 5 arrivals missing [32 lanes]",
             "cluster 0 cta 0 warp 1 (wait_for_bytes, report_test.cpp:",
             ") waits for lonely, parity 0: phase 0 is open, 0 of 1 arrivals missing, 192 bytes "
             "expected, 64 delivered [1 lane]",
             "cluster 0 cta 0 warp 2 (wait_for_flag, report_test.cpp:",
             ") waits for flag+4 to reach 6, it holds 4 [16 lanes]",
             "cluster 0 cta 0 warp 3 (wait_for_name, report_test.cpp:",
             ") waits at a named barrier (id 7, 64 threads) [32 lanes]",
             "cluster 0 cta 0 warp 4 (wait_for_warp, report_test.cpp:",
             ") waits at warp sync [31 lanes]",
             ") waits at a named barrier (id 8, 64 threads) [1 lane]",
             "cluster 0 cta 0 warp 5 (wait_for_cta, report_test.cpp:",
             ") waits at the CTA's barrier [32 lanes]",
             "cluster 0 cta 0 warp 6 (wait_for_cluster, report_test.cpp:",
             ") waits at the cluster's barrier [32 lanes]",
             "cluster 0 cta 0 warp 7 (wait_for_shuffle, report_test.cpp:",
             ") waits at shfl [30 lanes]"});
        !wrong.empty()) {
      return wrong;
    }
    return report.what.find("cta 1") == std::string::npos ? "" : "who has left is listed";
  });
}

/// More waits than a report should be long.
struct Crowd : Kernel<32> {
  static void run(const Params&, Smem&) { hw::named_sync(1 + hw::warp() % 15, 1024); }
};

TEST_CASE("a long list is cut; clusters that have not started are counted") {
  World world;
  const Report report = hw::launch<Crowd>(world, 5, {}, {.seed = 2, .resident_clusters = 2});
  CHECK(faults(report, {"deadlock:", "\n  and 40 more",
                        "\n  3 of 5 clusters have not started: 2 fit at once"}) == "");
  CHECK(std::count(report.what.begin(), report.what.end(), '\n') == 26);
}

}  // namespace
}  // namespace logitless::model_test
