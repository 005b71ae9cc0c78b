// SPDX-License-Identifier: Apache-2.0
// Shared memory: who may touch what, and what asynchronous engines see of generic writes.
#include "runs.h"

namespace logitless::model_test {
namespace {

/// One thread of CTA 0 does one thing.
struct Touch : Kernel<1, 2> {
  enum Act {
    kRight,
    kStoreAtPeer,
    kLoadAtPeer,
    kStoreBeyondCluster,
    kMisalignedStore,
    kMisalignedLoad,
    kStoreBeyondEnd,
    kLoadBeyondEnd,
    kStoreBelowBase,
    kLoadUnwritten,
    kLoadHalfWritten,
    kStoreOnBarrier,
    kStoreOnSecondHalf,
    kCopyOnBarrier,
    kCopyBeyondEnd,
    kCopyOnUnfenced,
    kForeignObject
  };
  struct Params {
    Act act;
    hw::Global<uint32_t> line;
  };
  struct Smem {
    hw::Buffer<1024> cells;
    hw::Barrier arrived;
    hw::Cell<uint64_t> pair;
  };
  static void describe(hw::Names& names) {
    names.add("cells", offsetof(Smem, cells), 1024, 16);
    names.add("arrived", &Smem::arrived);
    names.add("pair", &Smem::pair);
  }
  static void copy(const Params& p, Smem& s, uint32_t to) {
    hw::bulk_load(to, p.line, 16, hw::address(s.arrived));
  }
  static void act(const Params& p, Smem& s) {
    const uint32_t cells = hw::address(s.cells), arrived = hw::address(s.arrived);
    hw::Cell<uint32_t> outside;
    switch (p.act) {
      case kRight:
        hw::st_shared(cells, hw::Vec4{1, 2, 3, 4});
        hw::st_shared(cells + 16, 5U);
        hw::st_shared(cells + 20, 6.0F);
        hw::st_shared(cells + 24, hw::Vec2{7, 8});
        s.pair.store(9);
        CHECK(hw::ld_shared<hw::Vec4>(cells).w == 4);
        CHECK(hw::ld_shared<hw::Vec4>(cells + 16).x == 5);
        CHECK(hw::ld_shared<float>(cells + 20) == 6);
        CHECK(hw::ld_shared<hw::Vec2>(cells + 24).y == 8);
        CHECK(s.pair.load() == 9);
        return;
      case kStoreAtPeer:
        return hw::st_shared(hw::cta_address(cells, 1), 1U);
      case kLoadAtPeer:
        hw::ld_shared<uint32_t>(hw::cta_address(cells, 1));
        return;
      case kStoreBeyondCluster:
        return hw::st_shared(hw::cta_address(cells, 5), 1U);
      case kMisalignedStore:
        return hw::st_shared(cells + 24, hw::Vec4{});
      case kMisalignedLoad:
        hw::ld_shared<uint32_t>(cells + 2);
        return;
      case kStoreBeyondEnd:
        return hw::st_shared(cells + (64 << 10), 1U);
      case kLoadBeyondEnd:
        hw::ld_shared<uint32_t>(cells + (64 << 10));
        return;
      case kStoreBelowBase:
        return hw::st_shared(16, 1U);
      case kLoadUnwritten:
        hw::ld_shared<uint32_t>(cells + 40);
        return;
      case kLoadHalfWritten:
        hw::st_shared(cells + 32, hw::Vec2{});
        hw::ld_shared<hw::Vec4>(cells + 32);
        return;
      case kStoreOnBarrier:
        return hw::st_shared(arrived, 1U);
      case kStoreOnSecondHalf:
        return hw::st_shared(arrived + 4, 1U);
      case kCopyOnBarrier:
        return copy(p, s, arrived & ~15U);
      case kCopyBeyondEnd:
        return copy(p, s, cells + (64 << 10));
      case kCopyOnUnfenced:
        hw::st_shared(cells + 20, 1U);
        return copy(p, s, cells + 16);
      case kForeignObject:
        hw::address(outside);
        return;
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::cta_rank() == 0 && hw::lane() == 0) {
      hw::barrier_init(s.arrived, 1);
      hw::fence_barrier_init();
      act(p, s);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();  // CTA 1 stays until the end
  }
};

TEST_CASE("one access of shared memory") {
  struct Case {
    Touch::Act act;
    Words words;
  };
  const Case cases[] = {
      {Touch::kRight, {}},
      {Touch::kStoreAtPeer,
       {"cluster 0 cta 0 warp 0 lane 0 (act, shared_memory_test.cpp:",
        "st.shared in the shared memory of CTA 1"}},
      {Touch::kLoadAtPeer, {"ld.shared in the shared memory of CTA 1"}},
      {Touch::kStoreBeyondCluster, {"st.shared: address 0x05000400 names CTA 5 of a cluster of 2"}},
      {Touch::kMisalignedStore, {"st.shared at cells[1]+8: not aligned to 16 bytes"}},
      {Touch::kMisalignedLoad, {"ld.shared at cells[0]+2: not aligned to 4 bytes"}},
      {Touch::kStoreBeyondEnd,
       {"st.shared: bytes 0x10400 to 0x10404 are outside the kernel's shared memory (0x400 to "
        "0xc00)"}},
      {Touch::kLoadBeyondEnd, {"ld.shared: bytes 0x10400 to 0x10404 are outside"}},
      {Touch::kStoreBelowBase, {"st.shared: bytes 0x10 to 0x14 are outside"}},
      {Touch::kLoadUnwritten, {"ld.shared of cells[2]+8, which nobody has written"}},
      {Touch::kLoadHalfWritten, {"ld.shared of cells[2]+8, which nobody has written"}},
      {Touch::kStoreOnBarrier, {"st.shared overwrites mbarrier arrived"}},
      {Touch::kStoreOnSecondHalf, {"st.shared overwrites mbarrier arrived"}},
      {Touch::kCopyOnBarrier, {"bulk load overwrites mbarrier arrived"}},
      {Touch::kCopyBeyondEnd, {"bulk load: bytes 0x10400 to 0x10410 are outside"}},
      {Touch::kCopyOnUnfenced,
       {"bulk load to cells[1]+4 of CTA 0 after generic writes without fence.proxy.async"}},
      {Touch::kForeignObject, {"the address of something that is not in this CTA's shared memory"}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.act));
    expect_of<Touch>({.seeds = 3}, each.words, [&](World& world) {
      return Touch::Params{each.act, world.filled<uint32_t>("line", 4, 0)};
    });
  }
}

// --- words that a copy is writing ------------------------------------------------------------------------

/// Touches a buffer before its copy has been waited for.
struct TooEarly : Kernel<> {
  enum Act { kWaits, kLoads, kStores, kCopiesAgain, kStoresOut };
  struct Params {
    Act act;
    hw::Global<uint32_t> line, out;
  };
  struct Smem {
    hw::Buffer<64, 128> tile;
    hw::Barrier arrived;
  };
  static void describe(hw::Names& names) {
    names.add("tile", &Smem::tile);
    names.add("arrived", &Smem::arrived);
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    const uint32_t tile = hw::address(s.tile);
    hw::barrier_init(s.arrived, 1);
    hw::fence_barrier_init();
    hw::arrive_expect(s.arrived, p.act == kCopiesAgain ? 128 : 64);
    hw::bulk_load(tile, p.line, 64, hw::address(s.arrived));
    switch (p.act) {
      case kWaits:
        break;
      case kLoads:
        hw::ld_shared<uint32_t>(tile + 8);
        break;
      case kStores:
        hw::st_shared(tile + 12, 1U);
        break;
      case kCopiesAgain:
        hw::bulk_load(tile, p.line, 64, hw::address(s.arrived));
        break;
      case kStoresOut:
        hw::bulk_store(p.out, tile, 64);
        hw::bulk_commit();
        hw::bulk_wait<0>();
        break;
    }
    hw::wait(s.arrived, 0);
    CHECK(hw::ld_shared<uint32_t>(tile + 8) == 5);
  }
};

TEST_CASE("a word that a copy writes belongs to the copy until the wait") {
  const auto launch = [](TooEarly::Act act, uint64_t seed) {
    World world;
    return hw::launch<TooEarly>(
        world, 1,
        {act, world.filled<uint32_t>("line", 16, 5), world.filled<uint32_t>("out", 16, 0)},
        {.seed = seed});
  };
  for_seeds(9, [&](uint64_t seed) { return passes(launch(TooEarly::kWaits, seed)); });
  struct Case {
    TooEarly::Act act;
    std::string what;
  };
  for (const Case& each :
       {Case{TooEarly::kLoads, "ld.shared of tile+8 while an asynchronous copy writes it"},
        {TooEarly::kStores, "st.shared to tile+12 while an asynchronous copy writes it"},
        {TooEarly::kCopiesAgain, "bulk load to tile of CTA 0 while another copy writes it"},
        {TooEarly::kStoresOut,
         "TMA store reads tile of CTA 0, while an asynchronous copy writes it"}}) {
    CAPTURE(each.what);
    // Late timing: the copy has hardly ever landed.
    on_some_seed(9, [&](uint64_t seed) {
      return faults(launch(each.act, 3 * seed + 1), {each.what}).empty();
    });
  }
}

// --- two views of the same bytes -------------------------------------------------------------------------

/// All threads write a tile, one sends it out.
struct SendTile : Kernel<4> {
  enum Way {
    kFenceThenSync,
    kSyncThenFence,
    kNoFence,
    kNoSync,
    kOnlySenderFences,  // and has not met the others
    kFencesTooEarly,
    kWritesAfterFence,
    kUnwritten
  };
  struct Params {
    Way way;
    hw::Global<uint32_t> out;
  };
  struct Smem {
    hw::Buffer<512, 128> tile;
  };
  static void describe(hw::Names& names) { names.add("tile", &Smem::tile); }
  static void fill(uint32_t tile, Way way) {
    const bool skips = way == kUnwritten && hw::thread() == 77;
    if (!skips) hw::st_shared(tile + hw::thread() * 4, static_cast<uint32_t>(hw::thread()) * 3);
  }
  static void send(const Params& p, uint32_t tile) {
    hw::bulk_store(p.out, tile, 512);
    hw::bulk_commit();
    hw::bulk_wait<0>();
  }
  static void run(const Params& p, Smem& s) {
    const uint32_t tile = hw::address(s.tile);
    const bool sender = hw::thread() == 64;
    if (p.way == kFencesTooEarly) hw::fence_proxy_async();
    fill(tile, p.way);
    if (p.way == kFenceThenSync || p.way == kNoSync || p.way == kWritesAfterFence) {
      hw::fence_proxy_async();
    }
    if (p.way == kWritesAfterFence) fill(tile, p.way);
    if (p.way != kNoSync && p.way != kOnlySenderFences) hw::cta_sync();
    if (!sender) return;
    if (p.way == kSyncThenFence || p.way == kOnlySenderFences || p.way == kUnwritten) {
      hw::fence_proxy_async();
    }
    send(p, tile);
  }
};

Report send_tile(World& world, SendTile::Way way, uint64_t seed) {
  return hw::launch<SendTile>(world, 1, {way, world.filled<uint32_t>("out", 128, 0)},
                              {.seed = seed});
}

TEST_CASE("generic writes reach a copy after fence.proxy.async") {
  for (const auto way : {SendTile::kFenceThenSync, SendTile::kSyncThenFence}) {
    CAPTURE(static_cast<int>(way));
    for_seeds(9, [&](uint64_t seed) -> std::string {
      World world;
      const SendTile::Params p{way, world.filled<uint32_t>("out", 128, 0)};
      const Report report = hw::launch<SendTile>(world, 1, p, {.seed = seed});
      if (!report.ok) return report.what;
      const auto out = world.download(p.out, 128);
      for (uint32_t i = 0; i < 128; ++i) {
        if (out[i] != i * 3) return "out[" + std::to_string(i) + "]: " + std::to_string(out[i]);
      }
      return "";
    });
  }
}

TEST_CASE("a copy reads what was not fenced, or not written") {
  const auto fails = [](SendTile::Way way, const Words& words) {
    CAPTURE(static_cast<int>(way));
    for_seeds(9, [&](uint64_t seed) {
      World world;
      return faults(send_tile(world, way, seed), words);
    });
  };
  const char* unfenced = "of CTA 0, but generic writes of it came without fence.proxy.async";
  fails(SendTile::kNoFence, {"TMA store reads tile", unfenced});
  fails(SendTile::kFencesTooEarly, {"TMA store reads tile", unfenced});
  fails(SendTile::kWritesAfterFence, {"TMA store reads tile", unfenced});
  fails(SendTile::kUnwritten, {"TMA store reads tile+308 of CTA 0, but nobody has written it"});
  // Who has not met the others cannot know that they have written, or fence for them.
  for (const auto way : {SendTile::kNoSync, SendTile::kOnlySenderFences}) {
    on_some_seed(20, [&](uint64_t seed) {
      World world;
      return faults(send_tile(world, way, seed), {"TMA store reads tile"}).empty();
    });
  }
}

/// A tile in shared memory is overwritten while a store still reads it, or too early.
struct Reuse : Kernel<> {
  enum Way { kWaitsForRead, kWaitsInFull, kDoesNotWait };
  struct Params {
    Way way;
    hw::Global<uint32_t> out;  // [2, 16]
  };
  using Smem = TooEarly::Smem;
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    const uint32_t tile = hw::address(s.tile);
    for (uint32_t i = 0; i < 2; ++i) {
      for (uint32_t word = 0; word < 16; ++word) hw::st_shared(tile + word * 4, i + 1);
      hw::fence_proxy_async();
      hw::bulk_store(p.out + i * 16, tile, 64);
      hw::bulk_commit();
      if (p.way == kWaitsForRead) hw::bulk_wait_read<0>();
      if (p.way == kWaitsInFull) hw::bulk_wait<0>();
    }
    hw::bulk_wait_read<0>();
  }
};

std::string reuse(Reuse::Way way, uint64_t seed) {
  World world;
  const Reuse::Params p{way, world.filled<uint32_t>("out", 32, 0)};
  const Report report = hw::launch<Reuse>(world, 1, p, {.seed = seed});
  if (!report.ok) return report.what;
  const auto out = world.download(p.out, 32);
  for (uint32_t i = 0; i < 32; ++i) {
    if (out[i] != i / 16 + 1) return "out[" + std::to_string(i) + "]: " + std::to_string(out[i]);
  }
  return "";
}

TEST_CASE("a buffer is free when its store has read it") {
  for_seeds(9, [](uint64_t seed) { return reuse(Reuse::kWaitsForRead, seed); });
  for_seeds(9, [](uint64_t seed) { return reuse(Reuse::kWaitsInFull, seed); });
  on_some_seed(20, [](uint64_t seed) { return !reuse(Reuse::kDoesNotWait, seed).empty(); });
}

// --- stmatrix --------------------------------------------------------------------------------------------

/// Four 8x8 blocks of 16-bit elements, stored with the rows of the blocks at any place.
struct StoreMatrix : Kernel<> {
  enum Flaw { kNone, kMisaligned, kOtherWay, kOnBarrier };
  struct Params {
    Flaw flaw;
    hw::Global<uint32_t> out;
  };
  struct Smem {
    hw::Buffer<512, 128> tile;
    hw::Barrier barrier;
  };
  static void describe(hw::Names& names) {
    names.add("tile", &Smem::tile);
    names.add("barrier", &Smem::barrier);
  }
  /// Element (row, column) of a block, as a number that says which it is.
  static uint32_t element(uint32_t block, uint32_t row, uint32_t column) {
    return block * 64 + row * 8 + column;
  }
  static uint32_t pair(uint32_t block) {
    const auto lane = static_cast<uint32_t>(hw::lane());
    const uint32_t row = lane / 4, column = 2 * (lane % 4);
    return element(block, row, column) | element(block, row, column + 1) << 16;
  }
  static void run(const Params& p, Smem& s) {
    const auto lane = static_cast<uint32_t>(hw::lane());
    const uint32_t tile = hw::address(s.tile);
    if (lane == 0) hw::barrier_init(s.barrier, 1);
    hw::warp_sync();
    // Row i of all blocks lies at 31 - i: the addresses decide.
    uint32_t row = tile + (31 - lane) * 16;
    if (p.flaw == kMisaligned && lane == 6) row += 8;
    if (p.flaw == kOnBarrier && lane == 6) row = hw::address(s.barrier) & ~15U;
    if (p.flaw == kOtherWay && lane == 6) hw::fence_proxy_async();
    hw::store_matrix(row, pair(0), pair(1), pair(2), pair(3));
    hw::warp_sync();
    for (uint32_t i = 0; i < 4; ++i) {
      hw::st(p.out + lane * 4 + i, hw::ld_shared<uint32_t>(tile + lane * 16 + i * 4));
    }
  }
};

TEST_CASE("stmatrix puts row i % 8 of block i / 8 where lane i says") {
  for_seeds(6, [](uint64_t seed) -> std::string {
    World world;
    const StoreMatrix::Params p{StoreMatrix::kNone, world.allocate<uint32_t>("out", 128)};
    const Report report = hw::launch<StoreMatrix>(world, 1, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto out = world.download(p.out, 128);
    for (uint32_t place = 0; place < 32; ++place) {
      for (uint32_t column = 0; column < 8; ++column) {
        const uint32_t row = 31 - place;
        const uint32_t got = out[place * 4 + column / 2] >> (column % 2 * 16) & 0xFFFF;
        if (got != StoreMatrix::element(row / 8, row % 8, column)) {
          return "row " + std::to_string(row) + " column " + std::to_string(column) + ": " +
                 std::to_string(got);
        }
      }
    }
    return "";
  });
  const auto make = [](StoreMatrix::Flaw flaw) {
    return [flaw](World& world) {
      return StoreMatrix::Params{flaw, world.allocate<uint32_t>("out", 128)};
    };
  };
  expect_of<StoreMatrix>({}, {"stmatrix at tile+408: not aligned to 16 bytes"},
                         make(StoreMatrix::kMisaligned));
  expect_of<StoreMatrix>({}, {"stmatrix overwrites mbarrier barrier"},
                         make(StoreMatrix::kOnBarrier));
  expect_of<StoreMatrix>({}, {"stmatrix is .aligned, but the lanes"}, make(StoreMatrix::kOtherWay));
}

// --- names -----------------------------------------------------------------------------------------------

TEST_CASE("names of the parts of shared memory") {
  struct Inner {
    hw::Barrier arrived[2], finished[2];
  };
  struct Smem {
    hw::Buffer<256, 128> tile[2];
    Inner ring;
    hw::Cell<uint32_t> cell;
  };
  hw::Names names;
  names.add("tile", &Smem::tile);
  names.add("ring.finished", &Inner::finished, hw::Names::offset_of(&Smem::ring));
  names.add("cell", &Smem::cell);
  CHECK(names.at(0) == "tile[0]");
  CHECK(names.at(20) == "tile[0]+20");
  CHECK(names.at(256 + 16) == "tile[1]+16");
  CHECK(names.at(512) == "smem+0x200");  // ring.arrived has no name
  CHECK(names.at(512 + 16) == "ring.finished[0]");
  CHECK(names.at(512 + 24) == "ring.finished[1]");
  CHECK(names.at(512 + 32) == "cell");
  CHECK(names.at(512 + 34) == "cell+2");
  CHECK(names.at(0x1234) == "smem+0x1234");
  CHECK(hw::Names().at(0) == "smem+0x0");
}

}  // namespace
}  // namespace logitless::model_test
