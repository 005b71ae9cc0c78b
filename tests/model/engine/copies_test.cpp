// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies: where boxes land, edges of the matrix, who hears of them, what their waits promise.
#include <array>
#include <cstring>
#include <stdexcept>

#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Element;
using hw::Order;
using hw::Scope;
using hw::Swizzle;

// --- boxes in shared memory, byte by byte ----------------------------------------------------------------

using Bytes = std::vector<unsigned char>;

/// A matrix of bytes that are all different enough, between two guards of a row.
struct Matrix {
  hw::TensorShape shape;
  Bytes bytes;  // rows x pitch

  explicit Matrix(const hw::TensorShape& s, int salt = 0)
      : shape(s), bytes(s.rows * s.pitch_bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<unsigned char>(i * 7 + i / 251 * 3 + static_cast<size_t>(salt));
    }
  }
  uint32_t row_bytes() const {
    return shape.box_columns * static_cast<uint32_t>(hw::element_bytes(shape.element));
  }
  uint32_t box_bytes() const { return row_bytes() * shape.box_rows; }

  /// Calls f(byte of the box in shared memory, byte of the matrix or -1) for every byte of a box.
  template <class F>
  void each_byte(int column, int row, F f) const {
    const int width = hw::element_bytes(shape.element);
    for (uint32_t r = 0; r < shape.box_rows; ++r) {
      for (uint32_t b = 0; b < row_bytes(); ++b) {
        const int64_t y = row + static_cast<int64_t>(r);
        const int64_t x = column + static_cast<int64_t>(b) / width;
        const bool inside = y >= 0 && y < static_cast<int64_t>(shape.rows) && x >= 0 &&
                            x < static_cast<int64_t>(shape.columns);
        const int64_t at = y * static_cast<int64_t>(shape.pitch_bytes) + x * width + b % width;
        f(hw::swizzled(r * row_bytes() + b, shape.swizzle), inside ? at : -1);
      }
    }
  }
};

struct Place {
  int column, row;
};

/// Loads one box and writes out what lies in shared memory.
struct LoadBox : Kernel<4> {
  static constexpr uint32_t kMostBytes = 32 << 10;
  struct Params {
    hw::TensorMap map;
    Place at;
    uint32_t bytes;
    hw::Global<uint32_t> out;
  };
  struct Smem {
    hw::Buffer<kMostBytes> tile;
    hw::Barrier full;
  };
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.full, 1);
      hw::fence_barrier_init();
      hw::arrive_expect(s.full, p.bytes);
      hw::tma_load(hw::address(s.tile), p.map, p.at.column, p.at.row, hw::address(s.full));
    }
    hw::warp_sync();
    hw::cta_sync();
    hw::wait(s.full, 0);
    for (uint32_t i = static_cast<uint32_t>(hw::thread()); i < p.bytes / 4; i += kThreads) {
      hw::st(p.out + i, hw::ld_shared<uint32_t>(hw::address(s.tile) + i * 4));
    }
  }
};

std::string load_box(const Matrix& matrix, Place at, uint64_t seed) {
  World world;
  const auto source = world.upload("matrix", matrix.bytes);
  const uint32_t bytes = matrix.box_bytes();
  const LoadBox::Params p{hw::tensor_map(source, matrix.shape), at, bytes,
                          world.allocate<uint32_t>("out", bytes / 4)};
  const Report report = hw::launch<LoadBox>(world, 1, p, {.seed = seed});
  if (!report.ok) return report.what;
  const auto words = world.download(p.out, bytes / 4);
  Bytes got(bytes), expected(bytes, 0xEE);
  std::memcpy(got.data(), words.data(), bytes);
  matrix.each_byte(at.column, at.row, [&](uint32_t shared, int64_t global) {
    expected[shared] = global < 0 ? 0 : matrix.bytes[static_cast<size_t>(global)];
  });
  for (uint32_t i = 0; i < bytes; ++i) {
    if (got[i] != expected[i]) {
      return "byte " + std::to_string(i) + " of the box: expected " + std::to_string(expected[i]) +
             ", got " + std::to_string(got[i]);
    }
  }
  return "";
}

/// Fills shared memory and stores, or adds, one box.
struct StoreBox : Kernel<4> {
  struct Params {
    hw::TensorMap map;
    Place at;
    uint32_t bytes;
    bool add;
    hw::Global<uint32_t> in;
  };
  using Smem = LoadBox::Smem;
  static void run(const Params& p, Smem& s) {
    const uint32_t tile = hw::address(s.tile);
    for (uint32_t i = static_cast<uint32_t>(hw::thread()); i < p.bytes / 4; i += kThreads) {
      hw::st_shared(tile + i * 4, hw::ld(p.in + i));
    }
    hw::fence_proxy_async();
    hw::cta_sync();
    if (hw::thread() != 0) return;
    if (p.add) {
      hw::tma_reduce_add(p.map, p.at.column, p.at.row, tile);
    } else {
      hw::tma_store(p.map, p.at.column, p.at.row, tile);
    }
    hw::bulk_commit();
    hw::bulk_wait_read<0>();
  }
};

std::string store_box(const Matrix& matrix, Place at, uint64_t seed) {
  World world;
  const auto target = world.upload("matrix", matrix.bytes);
  const uint32_t bytes = matrix.box_bytes();
  std::vector<uint32_t> words(bytes / 4);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(i * 2654435761U + 99);
  Bytes box(bytes), expected = matrix.bytes;
  std::memcpy(box.data(), words.data(), bytes);
  matrix.each_byte(at.column, at.row, [&](uint32_t shared, int64_t global) {
    if (global >= 0) expected[static_cast<size_t>(global)] = box[shared];
  });
  const StoreBox::Params p{hw::tensor_map(target, matrix.shape), at, bytes, false,
                           world.upload("in", words)};
  const Report report = hw::launch<StoreBox>(world, 1, p, {.seed = seed});
  if (!report.ok) return report.what;
  const auto got = world.download(target, static_cast<int64_t>(matrix.bytes.size()));
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != expected[i]) {
      return "byte " + std::to_string(i) + " of the matrix: expected " +
             std::to_string(expected[i]) + ", got " + std::to_string(got[i]);
    }
  }
  return "";
}

/// Boxes of each swizzle and element type: as wide as the swizzle's pattern, 20 rows.
std::vector<Matrix> matrices() {
  std::vector<Matrix> all;
  for (const Element element : {Element::kBf16, Element::kF32}) {
    for (const Swizzle swizzle : {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128}) {
      const auto width = static_cast<uint32_t>(hw::element_bytes(element));
      // Without swizzle a row may be wider: 48 bytes.
      const uint32_t row = swizzle == Swizzle::kNone ? 48 : hw::swizzle_bytes(swizzle);
      // An odd number of columns, so that an edge cuts a word of bf16; padding up to the pitch.
      const uint64_t columns = row / width * 2 + 5;
      all.emplace_back(hw::TensorShape{.element = element,
                                       .rows = 45,
                                       .columns = columns,
                                       .pitch_bytes = (columns * width + 31) / 16 * 16,
                                       .box_rows = 20,
                                       .box_columns = row / width,
                                       .swizzle = swizzle});
    }
  }
  return all;
}
/// Inside, over each of the four edges and over two of them, outside on all four sides.
std::vector<Place> places(const hw::TensorShape& s) {
  const int columns = static_cast<int>(s.columns), rows = static_cast<int>(s.rows);
  const int width = static_cast<int>(s.box_columns), height = static_cast<int>(s.box_rows);
  return {{0, 0},        {1, 3},           {width, height},
          {-3, 5},       {columns - 3, 5}, {2, -7},
          {2, rows - 7}, {-1, -1},         {columns - 1, rows - 1},
          {-width, 0},   {columns, 0},     {0, -height},
          {0, rows},     {-1000, 100000}};
}

TEST_CASE("a box lands swizzled, with zeros where the matrix ends") {
  for (const Matrix& matrix : matrices()) {
    CAPTURE(static_cast<int>(matrix.shape.element));
    CAPTURE(static_cast<int>(matrix.shape.swizzle));
    for (const Place at : places(matrix.shape)) {
      CAPTURE(at.column);
      CAPTURE(at.row);
      for_seeds(2, [&](uint64_t seed) { return load_box(matrix, at, seed); });
    }
  }
}
TEST_CASE("a stored box leaves alone what lies outside it, and outside the matrix") {
  for (const Matrix& matrix : matrices()) {
    CAPTURE(static_cast<int>(matrix.shape.element));
    CAPTURE(static_cast<int>(matrix.shape.swizzle));
    for (const Place at : places(matrix.shape)) {
      CAPTURE(at.column);
      CAPTURE(at.row);
      for_seeds(2, [&](uint64_t seed) { return store_box(matrix, at, seed); });
    }
  }
}
TEST_CASE("the largest box") {
  const Matrix matrix(
      {.rows = 300, .columns = 100, .pitch_bytes = 208, .box_rows = 256, .box_columns = 64});
  for_seeds(2, [&](uint64_t seed) { return load_box(matrix, {40, 50}, seed); });
  for_seeds(2, [&](uint64_t seed) { return store_box(matrix, {40, 50}, seed); });
}

TEST_CASE("a reduction adds, from several CTAs at once") {
  for_seeds(6, [](uint64_t seed) -> std::string {
    constexpr int kRows = 30, kColumns = 50, kPitch = 52, kClusters = 3;
    constexpr uint32_t kWords = 20 * 32;
    World world;
    const auto target = world.filled("target", kRows * kPitch, 0.25F);
    const hw::TensorShape shape{.element = Element::kF32,
                                .rows = kRows,
                                .columns = kColumns,
                                .pitch_bytes = kPitch * 4,
                                .box_rows = 20,
                                .box_columns = 32};
    std::vector<uint32_t> words(kWords);
    for (uint32_t i = 0; i < kWords; ++i) words[i] = hw::as_bits(static_cast<float>(i % 97));
    const StoreBox::Params p{
        hw::tensor_map(target, shape), {-4, 15}, kWords * 4, true, world.upload("in", words)};
    const Report report = hw::launch<StoreBox>(world, kClusters, p, {.seed = seed});
    if (!report.ok) return report.what;
    std::vector<float> expected(kRows * kPitch, 0.25F);
    for (uint32_t r = 0; r < 20; ++r) {
      for (uint32_t c = 0; c < 32; ++c) {
        const int y = 15 + static_cast<int>(r), x = -4 + static_cast<int>(c);
        if (y >= kRows || x < 0) continue;
        const uint32_t word = hw::swizzled(r * 128 + c * 4) / 4;
        expected[static_cast<size_t>(y * kPitch + x)] += kClusters * static_cast<float>(word % 97);
      }
    }
    return world.download(target, kRows * kPitch) == expected ? "" : "another sum";
  });
}

TEST_CASE("a reduction: of f32, and never into another GPU's memory") {
  const auto launch = [](Element element, int rank, uint64_t seed) {
    World world(2);
    const auto target = world.filled<uint32_t>("target", 32 * 20, 0, rank);
    const StoreBox::Params p{
        hw::tensor_map(target, {.element = element,
                                .rows = 20,
                                .columns = 32,
                                .pitch_bytes = 128,
                                .box_rows = 4,
                                .box_columns = element == Element::kF32 ? 32U : 64U}),
        {0, 0},
        512,
        true,
        world.filled<uint32_t>("in", 128, 0)};
    return hw::launch<StoreBox>(world, 1, p, {.seed = seed});
  };
  for_seeds(6, [&](uint64_t seed) { return passes(launch(Element::kF32, 0, seed)); });
  for_seeds(6, [&](uint64_t seed) {
    return faults(launch(Element::kF32, 1, seed),
                  {"cluster 0 cta 0 warp 0 lane 0 (run, copies_test.cpp:",
                   "TMA reduction at target[rank 1]+0 by rank 0: its additions are .relaxed.gpu, "
                   "never for another GPU"});
  });
  for_seeds(6, [&](uint64_t seed) {
    return faults(launch(Element::kBf16, 0, seed), {"the model adds f32 only"});
  });
}

TEST_CASE("tensor maps refuse what the engine cannot do, with the values") {
  World world;
  const auto base = world.filled<hw::Bf16>("base", 64 * 64, {0});
  const hw::TensorShape good{
      .rows = 64, .columns = 60, .pitch_bytes = 128, .box_rows = 8, .box_columns = 64};
  const auto refusal = [&](const std::function<void(hw::TensorShape&)>& change, int64_t offset) {
    hw::TensorShape shape = good;
    change(shape);
    try {
      hw::tensor_map(base + offset, shape);
      return std::string();
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
  };
  using S = hw::TensorShape;
  CHECK(refusal([](S&) {}, 0) == "");
  CHECK(refusal([](S&) {}, 4) == "tensor map: expected a base address that is a multiple of 16");
  CHECK(refusal([](S& s) { s.pitch_bytes = 136; }, 0) ==
        "tensor map: expected a pitch in multiples of 16 bytes, got 136");
  CHECK(refusal([](S& s) { s.columns = 65; }, 0) ==
        "tensor map: expected rows >= 1 and columns that fit a pitch of 128 bytes, got 64 x 65");
  CHECK(refusal([](S& s) { s.rows = 0; }, 0) ==
        "tensor map: expected rows >= 1 and columns that fit a pitch of 128 bytes, got 0 x 60");
  CHECK(refusal([](S& s) { s.box_rows = 257; }, 0) ==
        "tensor map: expected a box of 1..256 x 1..256, got 257 x 64");
  CHECK(refusal([](S& s) { s.box_rows = 0; }, 0) ==
        "tensor map: expected a box of 1..256 x 1..256, got 0 x 64");
  CHECK(refusal([](S& s) { s.box_columns = 32; }, 0) ==
        "tensor map: expected box rows of 128 bytes, got 64");
  CHECK(refusal(
            [](S& s) {
              s.swizzle = Swizzle::kNone;
              s.box_columns = 20;
            },
            0) == "tensor map: expected box rows of 16 n bytes, got 40");
  try {
    hw::tensor_map(hw::Global<hw::Bf16>(nullptr), good);
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()) ==
          "tensor map: expected a base address that is a multiple of 16");
  }
}

// --- plain bytes -----------------------------------------------------------------------------------------

/// Bytes in, bytes out, bytes added.
struct Line : Kernel<> {
  struct Params {
    hw::Global<float> in, out, sum;
  };
  struct Smem {
    hw::Buffer<256, 128> line;
    hw::Barrier full;
  };
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    const uint32_t line = hw::address(s.line) + 16;
    hw::barrier_init(s.full, 1);
    hw::fence_barrier_init();
    hw::arrive_expect(s.full, 208);
    hw::bulk_load(line, p.in + 4, 208, hw::address(s.full));
    hw::wait(s.full, 0);
    hw::bulk_store(p.out + 8 + hw::cluster_id() * 64, line, 208);
    hw::bulk_reduce_add(p.sum, line, 208);
    hw::bulk_commit();
    hw::bulk_wait<0>();
  }
};

TEST_CASE("plain bytes: load, store, add") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    World world;
    std::vector<float> in(64);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
    const Line::Params p{world.upload("in", in), world.filled("out", 128, -1.0F),
                         world.filled("sum", 52, 0.5F)};
    const Report report = hw::launch<Line>(world, 2, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto out = world.download(p.out, 128);
    const auto sum = world.download(p.sum, 52);
    for (size_t i = 0; i < 128; ++i) {
      const bool inside = i % 64 >= 8 && i % 64 < 60;
      if (out[i] != (inside ? in[i % 64 - 4] : -1)) return "out[" + std::to_string(i) + "]";
    }
    for (size_t i = 0; i < 52; ++i) {
      if (sum[i] != 0.5F + 2 * in[i + 4]) return "sum[" + std::to_string(i) + "]";
    }
    return "";
  });
}

// --- who hears of a load ---------------------------------------------------------------------------------

/// Every CTA of a cluster of four may get a box from CTA `from`.
struct Deal : Kernel<1, 4> {
  enum Way { kOwn, kMulticast, kPair, kPairMulticast };
  struct Params {
    Way way;
    int from;
    bool leader;  // the barrier of the pair's leader is told
    uint16_t mask;
    uint32_t expects[4];  // bytes at each CTA's barrier
    hw::TensorMap map;
    hw::Global<uint32_t> out;  // [4]: a word of each CTA's tile, or 0
  };
  static constexpr uint32_t kBytes = 8 * 128;
  struct Smem {
    hw::Buffer<kBytes> tile;
    hw::Barrier full;
  };
  static void describe(hw::Names& names) {
    names.add("tile", &Smem::tile);
    names.add("full", &Smem::full);
  }
  static void deal(const Params& p, Smem& s) {
    const uint32_t tile = hw::address(s.tile);
    const uint32_t own = hw::address(s.full);
    const uint32_t full = p.leader ? hw::leader_address(own) : own;
    switch (p.way) {
      case kOwn:
        return hw::tma_load(tile, p.map, 0, 0, full);
      case kMulticast:
        return hw::tma_load_multicast(tile, p.map, 0, 0, full, p.mask);
      case kPair:
        return hw::tma_load_pair(tile, p.map, 0, 0, full);
      case kPairMulticast:
        return hw::tma_load_pair_multicast(tile, p.map, 0, 0, full, p.mask);
    }
  }
  /// Who gets a box reads it when the barrier that was told says so; the others' tiles are untouched.
  static void run(const Params& p, Smem& s) {
    const int me = hw::cta_rank();
    if (hw::lane() == 0) {
      hw::barrier_init(s.full, 1);
      hw::fence_barrier_init();
      hw::arrive_expect(s.full, p.expects[me]);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::lane() == 0) {
      if (me == p.from) deal(p, s);
      hw::wait(s.full, 0);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    const bool gets =
        p.way == kMulticast || p.way == kPairMulticast ? (p.mask >> me & 1) != 0 : me == p.from;
    if (hw::lane() != 0) return;
    hw::st(p.out + me, gets ? hw::ld_shared<uint32_t>(hw::address(s.tile) + 8) : 0);
  }
};

std::string deal(Deal::Way way, int from, bool leader, uint16_t mask,
                 const std::array<uint32_t, 4>& boxes, const Words& words, uint64_t seed) {
  World world;
  const auto source = world.filled<uint32_t>("source", 256, 77);
  Deal::Params p{.way = way,
                 .from = from,
                 .leader = leader,
                 .mask = mask,
                 .expects = {},
                 .map = hw::tensor_map(source, {.element = Element::kF32,
                                                .rows = 8,
                                                .columns = 32,
                                                .pitch_bytes = 128,
                                                .box_rows = 8,
                                                .box_columns = 32}),
                 .out = world.filled<uint32_t>("out", 4, 9)};
  for (size_t i = 0; i < 4; ++i) p.expects[i] = boxes[i] * Deal::kBytes;
  const Report report = hw::launch<Deal>(world, 1, p, {.seed = seed});
  if (!words.empty() || !report.ok) return verdict(report, words);
  const auto out = world.download(p.out, 4);
  const bool many = way == Deal::kMulticast || way == Deal::kPairMulticast;
  for (int i = 0; i < 4; ++i) {
    const bool gets = many ? (mask >> i & 1) != 0 : i == from;
    if (out[static_cast<size_t>(i)] != (gets ? 77U : 0U))
      return "the tile of CTA " + std::to_string(i);
  }
  return "";
}

struct Dealt {
  Deal::Way way;
  int from;
  bool leader;
  uint16_t mask;
  std::array<uint32_t, 4> boxes;  // told to the barrier of each CTA
};
void check_dealt(std::initializer_list<Dealt> cases) {
  for (const Dealt& c : cases) {
    CAPTURE(static_cast<int>(c.way));
    CAPTURE(c.from);
    CAPTURE(c.leader);
    CAPTURE(c.mask);
    for_seeds(
        6, [&](uint64_t seed) { return deal(c.way, c.from, c.leader, c.mask, c.boxes, {}, seed); });
  }
}

TEST_CASE("multicast and pairs: where a box lands, and which barrier hears of it") {
  check_dealt({
      {Deal::kOwn, 2, false, 0, {0, 0, 1, 0}},
      {Deal::kMulticast, 0, false, 0b1010, {0, 1, 0, 1}},
      {Deal::kMulticast, 3, false, 0b1111, {1, 1, 1, 1}},
      {Deal::kMulticast, 1, false, 0b0001, {1, 0, 0, 0}},
      {Deal::kPair, 3, true, 0, {0, 0, 1, 0}},
      {Deal::kPair, 2, true, 0, {0, 0, 1, 0}},
      {Deal::kPair, 3, false, 0, {0, 0, 0, 1}},
      {Deal::kPairMulticast, 1, true, 0b1111, {2, 0, 2, 0}},
      {Deal::kPairMulticast, 3, true, 0b1010, {1, 0, 1, 0}},
      {Deal::kPairMulticast, 1, false, 0b1010, {0, 1, 0, 1}},
  });
}
TEST_CASE("multicast of a pair: an even CTA's barrier tells the even ones, an odd CTA's the odd") {
  check_dealt({
      {Deal::kPairMulticast, 0, false, 0b1111, {2, 0, 2, 0}},
      {Deal::kPairMulticast, 1, false, 0b0101, {0, 1, 0, 1}},
  });
}

TEST_CASE("multicast and pairs, misused") {
  const auto fails = [](Deal::Way way, int from, bool leader, uint16_t mask,
                        const std::array<uint32_t, 4>& boxes, const Words& words) {
    for_seeds(6, [&](uint64_t seed) { return deal(way, from, leader, mask, boxes, words, seed); });
  };
  fails(
      Deal::kOwn, 3, true, 0, {},
      {"cluster 0 cta 3 warp 0 lane 0 (deal, copies_test.cpp:",
       "TMA load: mbarrier full of CTA 2: another CTA's needs cta_group::2 and the pair's leader"});
  fails(Deal::kMulticast, 1, true, 0b1111, {}, {"TMA load: mbarrier full of CTA 0: another CTA's"});
  fails(Deal::kMulticast, 0, false, 0, {}, {"TMA load: multicast mask 0x0 in a cluster of 4"});
  fails(Deal::kPairMulticast, 0, false, 0b10001, {},
        {"TMA load: multicast mask 0x11 in a cluster of 4"});
  // CTA 1 expects its box at its own barrier, and only the leader's hears of it.
  fails(Deal::kPair, 1, true, 0, {0, 1, 0, 0}, {"full"});
  fails(Deal::kMulticast, 0, false, 0b0011, {1, 1, 1, 0},
        {"deadlock:", "cluster 0 cta 2 warp 0", "1024 bytes expected, 0 delivered"});
}

// --- misuse ----------------------------------------------------------------------------------------------

/// One thread starts one copy that must not be.
struct Misuse : Kernel<1, 2> {
  enum Act {
    kNone,
    kMisalignedTile,
    kMisalignedLine,
    kMisalignedSource,
    kOddSize,
    kNoSize,
    kPeersTile,
    kPeersLine,
    kPeersBarrier,
    kNoInitFence,
    kNoBarrier,
    kBeyondShared,
    kUnwritten,
    kBeyondSource,
    kStoreMisalignedTile,
    kStoreMisalignedLine,
    kStoreOddSize,
    kStoreMisalignedTarget,
    kStorePeersTile,
    kStoreBeyondShared,
    kStoreBeyondTarget,
    kNoCommit,
    kAloneThenAligned
  };
  struct Params {
    Act act;
    hw::TensorMap map, unwritten;
    hw::Global<uint32_t> line, out;
  };
  struct Smem {
    hw::Buffer<1024> tile;
    hw::Barrier full, other;
  };
  static void describe(hw::Names& names) {
    names.add("tile", &Smem::tile);
    names.add("full", &Smem::full);
    names.add("other", &Smem::other);
  }
  static void act(const Params& p, Smem& s) {
    const uint32_t tile = hw::address(s.tile), full = hw::address(s.full);
    const uint32_t peers_tile = hw::cta_address(tile, 1), peers_full = hw::cta_address(full, 1);
    switch (p.act) {
      case kMisalignedTile:
        return hw::tma_load(tile + 64, p.map, 0, 0, full);
      case kMisalignedLine:
        return hw::bulk_load(tile + 8, p.line, 16, full);
      case kMisalignedSource:
        return hw::bulk_load(tile, p.line + 1, 16, full);
      case kOddSize:
        return hw::bulk_load(tile, p.line, 24, full);
      case kNoSize:
        return hw::bulk_load(tile, p.line, 0, full);
      case kPeersTile:
        return hw::tma_load(peers_tile, p.map, 0, 0, full);
      case kPeersLine:
        return hw::bulk_load(peers_tile, p.line, 16, full);
      case kPeersBarrier:
        return hw::bulk_load(tile, p.line, 16, peers_full);
      case kNoInitFence:
      case kAloneThenAligned:
        return hw::tma_load(tile, p.map, 0, 0, full);
      case kNoBarrier:
        return hw::tma_load(tile, p.map, 0, 0, hw::address(s.other));
      case kBeyondShared:
        return hw::tma_load(tile + (8 << 10), p.map, 0, 0, full);
      case kUnwritten:
        hw::tma_load(tile, p.unwritten, 0, 0, full);
        return hw::wait(s.full, 0);
      case kBeyondSource:
        return hw::bulk_load(tile, p.line + 252, 32, full);
      case kStoreMisalignedTile:
        return hw::tma_store(p.map, 0, 0, tile + 16);
      case kStoreMisalignedLine:
        return hw::bulk_store(p.out, tile + 4, 16);
      case kStoreOddSize:
        return hw::bulk_store(p.out, tile, 20);
      case kStoreMisalignedTarget:
        return hw::bulk_store(p.out + 2, tile, 16);
      case kStorePeersTile:
        return hw::tma_store(p.map, 0, 0, peers_tile);
      case kStoreBeyondShared:
        return hw::bulk_store(p.out, tile + (2 << 10), 16);
      case kStoreBeyondTarget:
        return hw::bulk_store(p.out + 252, tile, 32);
      case kNoCommit:
        hw::st_shared(tile, hw::Vec4{});
        hw::fence_proxy_async();
        hw::bulk_store(p.out, tile, 16);
        return hw::bulk_wait<0>();  // waits for nothing
      case kNone:
        return;
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::cta_rank() == 0 && hw::lane() == 0) {
      hw::barrier_init(s.full, 1);
      if (p.act != kNoInitFence) hw::fence_barrier_init();
      act(p, s);
    }
    if (p.act != kAloneThenAligned) hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
  }
};

TEST_CASE("one copy that must not be") {
  struct Case {
    Misuse::Act act;
    Words words;
  };
  const char* multiples = ": address and size come in multiples of 16";
  const Case cases[] = {
      {Misuse::kNone, {}},
      {Misuse::kMisalignedTile,
       {"cluster 0 cta 0 warp 0 lane 0 (act, copies_test.cpp:",
        "TMA load at tile+64: not aligned to 128 bytes"}},
      {Misuse::kMisalignedLine, {"bulk load at tile+8: not aligned to 16 bytes"}},
      {Misuse::kMisalignedSource, {"bulk load of 16 bytes from line+4", multiples}},
      {Misuse::kOddSize, {"bulk load of 24 bytes from line+0", multiples}},
      {Misuse::kNoSize, {"bulk load of 0 bytes from line+0", multiples}},
      {Misuse::kPeersTile, {"TMA load: shared memory of CTA 1, the thread is in CTA 0"}},
      {Misuse::kPeersLine, {"bulk load: shared memory of CTA 1, the thread is in CTA 0"}},
      {Misuse::kPeersBarrier, {"bulk load: mbarrier of another CTA"}},
      {Misuse::kNoInitFence,
       {"TMA load: mbarrier full of CTA 0 was initialised without fence.mbarrier_init"}},
      {Misuse::kNoBarrier, {"TMA load: no mbarrier has been initialised at other of CTA 0"}},
      {Misuse::kBeyondShared,
       {"TMA load: bytes 0x2400 to 0x2800 are outside the kernel's shared memory"}},
      {Misuse::kUnwritten, {"TMA load of ", "at unwritten+0: nobody has written byte 0"}},
      {Misuse::kBeyondSource,
       {"bulk load of 32 bytes at byte 1039 of line, which has 1024: outside every allocation"}},
      {Misuse::kStoreMisalignedTile, {"TMA store at tile+16: not aligned to 128 bytes"}},
      {Misuse::kStoreMisalignedLine, {"TMA store at tile+4: not aligned to 16 bytes"}},
      {Misuse::kStoreOddSize, {"bulk store of 20 bytes to out+0", multiples}},
      {Misuse::kStoreMisalignedTarget, {"bulk store of 16 bytes to out+8", multiples}},
      {Misuse::kStorePeersTile, {"TMA store: shared memory of CTA 1, the thread is in CTA 0"}},
      {Misuse::kStoreBeyondShared, {"TMA store: bytes 0xc00 to 0xc10 are outside"}},
      {Misuse::kStoreBeyondTarget, {"of 32 bytes at byte 1039 of out, which has 1024"}},
      {Misuse::kNoCommit, {"exits with bulk stores that it has not committed"}},
      {Misuse::kAloneThenAligned, {"barrier.cluster.arrive is .aligned"}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.act));
    expect_of<Misuse>({.seeds = 3}, each.words, [&](World& world) {
      const hw::TensorShape shape{.element = Element::kF32,
                                  .rows = 8,
                                  .columns = 32,
                                  .pitch_bytes = 128,
                                  .box_rows = 8,
                                  .box_columns = 32};
      return Misuse::Params{
          each.act, hw::tensor_map(world.filled<uint32_t>("source", 256, 1), shape),
          hw::tensor_map(world.allocate<uint32_t>("unwritten", 256), shape),
          world.filled<uint32_t>("line", 256, 1), world.filled<uint32_t>("out", 256, 1)};
    });
  }
}

// --- waits of stores -------------------------------------------------------------------------------------

/// Cluster 0 stores a box and raises a flag; cluster 1 reads what was stored.
struct Push : Kernel<> {
  enum Way {
    kFullWait,
    kReadWait,  // .read: the bytes have left shared memory, no more
    kNoWait,
    kSignalRelaxed,
    kSignalAtGpu,
    kCopyReads,  // the reader loads with a copy, after fence.proxy.async.global
    kCopyReadsUnfenced,
    kOldGroup  // waits for all but the last group, which is another
  };
  struct Params {
    Way way;
    hw::Global<uint32_t> to, flag, out;
  };
  struct Smem {
    hw::Buffer<128, 128> tile;
    hw::Barrier full;
  };
  static void describe(hw::Names& names) { names.add("tile", &Smem::tile); }
  static void push(const Params& p, Smem& s) {
    const uint32_t tile = hw::address(s.tile);
    for (uint32_t i = 0; i < 8; ++i) hw::st_shared(tile + i * 4, 50 + i);
    hw::fence_proxy_async();
    hw::bulk_store(p.to, tile, 16);
    hw::bulk_commit();
    if (p.way == kOldGroup) {
      hw::bulk_store(p.to + 4, tile + 16, 16);
      hw::bulk_commit();
      hw::bulk_wait<1>();
    } else if (p.way == kReadWait) {
      hw::bulk_wait_read<0>();
    } else if (p.way != kNoWait) {
      hw::bulk_wait<0>();
    }
    if (p.way == kSignalRelaxed) {
      hw::st<Order::kRelaxed, Scope::kSys>(p.flag, 1);
    } else if (p.way == kSignalAtGpu) {
      hw::st<Order::kRelease, Scope::kGpu>(p.flag, 1);
    } else {
      hw::st<Order::kRelease, Scope::kSys>(p.flag, 1);
    }
    hw::bulk_wait_read<0>();
  }
  static void read(const Params& p, Smem& s) {
    hw::barrier_init(s.full, 1);
    hw::fence_barrier_init();
    hw::wait_flag<Order::kAcquire, Scope::kSys>(p.flag, 1);
    if (p.way != kCopyReads && p.way != kCopyReadsUnfenced) {
      for (int i = 0; i < 4; ++i) hw::st(p.out + i, hw::ld(p.to + i));
      return;
    }
    if (p.way == kCopyReads) hw::fence_proxy_async_global();
    hw::arrive_expect(s.full, 16);
    hw::bulk_load(hw::address(s.tile), p.to, 16, hw::address(s.full));
    hw::wait(s.full, 0);
    for (int i = 0; i < 4; ++i) {
      hw::st(p.out + i,
             hw::ld_shared<uint32_t>(hw::address(s.tile) + static_cast<uint32_t>(i) * 4));
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    if (hw::cluster_id() == 0) {
      push(p, s);
    } else {
      read(p, s);
    }
  }
};

std::string push(Push::Way way, int ranks, uint64_t seed, const Words& words) {
  World world(ranks);
  const Push::Params p{way, world.filled<uint32_t>("to", 8, 1, ranks - 1),
                       world.filled<uint32_t>("flag", 1, 0, ranks - 1),
                       world.filled<uint32_t>("out", 4, 0, ranks - 1)};
  const Report report =
      hw::launch<Push>(world, 2, p, {.seed = seed, .clusters_per_rank = 2 / ranks});
  if (!words.empty() || !report.ok) return verdict(report, words);
  const auto out = world.download(p.out, 4);
  for (uint32_t i = 0; i < 4; ++i) {
    if (out[i] != 50 + i) return "out[" + std::to_string(i) + "]: " + std::to_string(out[i]);
  }
  return "";
}

TEST_CASE("only a full wait and a release show others what was stored") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const std::string to = ranks == 1 ? "to+0" : "to[rank 1]+0";
    const std::string wrote = to + ", which cluster 0 cta 0 wrote (push, copies_test.cpp:";
    for (const auto way : {Push::kFullWait, Push::kCopyReads, Push::kOldGroup}) {
      CAPTURE(static_cast<int>(way));
      for_seeds(9, [&](uint64_t seed) { return push(way, ranks, seed, {}); });
    }
    for (const auto way : {Push::kReadWait, Push::kNoWait}) {
      CAPTURE(static_cast<int>(way));
      for_seeds(9, [&](uint64_t seed) {
        return push(
            way, ranks, seed,
            {"ld.global at " + wrote, " by an asynchronous copy that nobody has waited for"});
      });
    }
    for_seeds(9, [&](uint64_t seed) {
      return push(Push::kSignalRelaxed, ranks, seed, {"ld.global at " + wrote});
    });
    for_seeds(9, [&](uint64_t seed) {
      return push(Push::kCopyReadsUnfenced, ranks, seed, {"bulk load at " + wrote});
    });
  }
  for_seeds(9, [](uint64_t seed) { return push(Push::kSignalAtGpu, 1, seed, {}); });
  for_seeds(9, [](uint64_t seed) {
    return push(Push::kSignalAtGpu, 2, seed,
                {"ld.global at to[rank 1]+0, which cluster 0 cta 0 wrote"});
  });
}

/// The pushing thread itself reads after its wait.
struct ReadBack : Kernel<> {
  struct Params {
    bool full;
    hw::Global<uint32_t> to, out;
  };
  using Smem = Push::Smem;
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    const uint32_t tile = hw::address(s.tile);
    hw::st_shared(tile, hw::Vec4{5, 5, 5, 5});
    hw::fence_proxy_async();
    hw::bulk_store(p.to, tile, 16);
    hw::bulk_commit();
    if (p.full) {
      hw::bulk_wait<0>();
    } else {
      hw::bulk_wait_read<0>();
    }
    hw::st(p.out, hw::ld(p.to));
  }
};

TEST_CASE("a full wait shows the thread itself what was stored") {
  const auto seen = [](bool full, uint64_t seed) {
    World world;
    const ReadBack::Params p{full, world.filled<uint32_t>("to", 4, 1),
                             world.filled<uint32_t>("out", 1, 0)};
    const Report report = hw::launch<ReadBack>(world, 1, p, {.seed = seed});
    return report.ok ? world.download(p.out, 1)[0] : 0;
  };
  for_seeds(12, [&](uint64_t seed) -> std::string {
    return seen(true, seed) == 5 ? "" : "the old word";
  });
  on_some_seed(40, [&](uint64_t seed) { return seen(false, seed) != 5; });
}

/// Another thread of the CTA reads after a flag that orders nothing.
struct ReadBeside : Kernel<2> {
  struct Params {
    bool ordered;
    hw::Global<uint32_t> to, flag, out;
  };
  using Smem = Push::Smem;
  static void store(const Params& p, Smem& s) {
    const uint32_t tile = hw::address(s.tile);
    hw::st_shared(tile, hw::Vec4{5, 5, 5, 5});
    hw::fence_proxy_async();
    hw::bulk_store(p.to, tile, 16);
    hw::bulk_commit();
    hw::bulk_wait<0>();
    if (p.ordered) {
      hw::st<Order::kRelease, Scope::kCta>(p.flag, 1);
    } else {
      hw::st<Order::kRelaxed, Scope::kCta>(p.flag, 1);
    }
    hw::pause();
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) store(p, s);
    if (hw::thread() != 32) return;
    hw::wait_flag<Order::kAcquire, Scope::kCta>(p.flag, 1);
    hw::st(p.out, hw::ld(p.to));
  }
};

TEST_CASE("a full wait shows what was stored to the thread that waits, its release to others") {
  const auto seen = [](bool ordered, uint64_t seed) {
    World world;
    const ReadBeside::Params p{ordered, world.filled<uint32_t>("to", 4, 1),
                               world.filled<uint32_t>("flag", 1, 0),
                               world.filled<uint32_t>("out", 1, 0)};
    const Report report = hw::launch<ReadBeside>(world, 1, p, {.seed = seed});
    return report.ok ? world.download(p.out, 1)[0] : 0;
  };
  for_seeds(
      9, [&](uint64_t seed) -> std::string { return seen(true, seed) == 5 ? "" : "the old word"; });
  on_some_seed(60, [&](uint64_t seed) { return seen(false, seed) == 1; });
}

/// A store that is left alone: its thread ends first.
struct Abandon : Kernel<> {
  struct Params {
    hw::Global<uint32_t> to;
  };
  using Smem = Push::Smem;
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    const uint32_t tile = hw::address(s.tile);
    hw::st_shared(tile, hw::Vec4{5, 5, 5, 5});
    hw::fence_proxy_async();
    hw::bulk_store(p.to, tile, 16);
    hw::bulk_commit();
  }
};

TEST_CASE("shared memory must live until stores have read it") {
  on_some_seed(60, [](uint64_t seed) {
    World world;
    return faults(
               hw::launch<Abandon>(world, 1, {world.filled<uint32_t>("to", 4, 1)}, {.seed = seed}),
               {"cluster 0 cta 0 warp 0 lane 0", "exits while a bulk store (run, copies_test.cpp:",
                "has still to read shared memory: a bulk wait is missing"})
        .empty();
  });
}

// --- loads against later writes --------------------------------------------------------------------------

/// Cluster 0 loads a line; cluster 1 overwrites it once it has been told.
struct Overwrite : Kernel<> {
  enum Way { kAfterWait, kAfterWaitForBox, kBeforeWait, kRelaxed };
  struct Params {
    Way way;
    hw::Global<uint32_t> line, flag;
    hw::TensorMap map;  // of the line
  };
  using Smem = Push::Smem;
  static void load(const Params& p, Smem& s) {
    hw::barrier_init(s.full, 1);
    hw::fence_barrier_init();
    hw::arrive_expect(s.full, 16);
    if (p.way == kAfterWaitForBox) {
      hw::tma_load(hw::address(s.tile), p.map, 0, 0, hw::address(s.full));
    } else {
      hw::bulk_load(hw::address(s.tile), p.line, 16, hw::address(s.full));
    }
    if (p.way == kBeforeWait) hw::st<Order::kRelease, Scope::kGpu>(p.flag, 1);
    hw::wait(s.full, 0);
    if (p.way == kAfterWait || p.way == kAfterWaitForBox) {
      hw::st<Order::kRelease, Scope::kGpu>(p.flag, 1);
    }
    if (p.way == kRelaxed) hw::st<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
    CHECK(hw::ld_shared<uint32_t>(hw::address(s.tile)) == 1);
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    if (hw::cluster_id() == 0) return load(p, s);
    hw::wait_flag<Order::kAcquire, Scope::kGpu>(p.flag, 1);
    hw::st(p.line, 2);
  }
};

TEST_CASE("a line may be overwritten when its load has been waited for") {
  const auto make = [](Overwrite::Way way) {
    return [way](World& world) {
      const auto line = world.filled<uint32_t>("line", 4, 1);
      return Overwrite::Params{way, line, world.filled<uint32_t>("flag", 1, 0),
                               hw::tensor_map(line, {.element = Element::kF32,
                                                     .rows = 1,
                                                     .columns = 4,
                                                     .pitch_bytes = 16,
                                                     .box_rows = 1,
                                                     .box_columns = 4,
                                                     .swizzle = Swizzle::kNone})};
    };
  };
  expect_of<Overwrite>({.clusters = 2, .seeds = 9}, {}, make(Overwrite::kAfterWait));
  expect_of<Overwrite>({.clusters = 2, .seeds = 9}, {}, make(Overwrite::kAfterWaitForBox));
  on_some_seed(60, [&](uint64_t seed) {
    World world;
    const auto params = make(Overwrite::kBeforeWait)(world);
    return faults(hw::launch<Overwrite>(world, 2, params, {.seed = seed}),
                  {"cluster 1", "st.global at line+0, which cluster 0 cta 0 read (load, ",
                   " by an asynchronous copy that nobody has waited for"})
        .empty();
  });
  expect_of<Overwrite>({.clusters = 2, .seeds = 9},
                       {"cluster 1", "st.global at line+0, which cluster 0 cta 0 read (load, ",
                        "nothing orders this after that"},
                       make(Overwrite::kRelaxed));
}

/// Cluster 0 and cluster 1 touch a word in turn, one of them by a reduction, and nothing orders them.
struct AddRace : Kernel<> {
  enum Act { kReads, kWrites, kAdds, kStores };
  struct Params {
    Act first, second;
    hw::Global<float> word;  // [4]
    hw::Global<uint32_t> flag;
  };
  using Smem = Push::Smem;
  static void act(const Params& p, Smem& s, Act act) {
    const uint32_t tile = hw::address(s.tile);
    if (act == kReads) return void(hw::ld(p.word));
    if (act == kWrites) return hw::st(p.word, 2);
    hw::st_shared(tile, hw::Vec4{});
    hw::fence_proxy_async();
    if (act == kAdds) {
      hw::bulk_reduce_add(p.word, tile, 16);
    } else {
      hw::bulk_store(p.word, tile, 16);
    }
    hw::bulk_commit();
    hw::bulk_wait<0>();
  }
  static void run(const Params& p, Smem& s) {
    if (hw::lane() != 0) return;
    if (hw::cluster_id() == 0) {
      act(p, s, p.first);
      return hw::st<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
    }
    hw::wait_flag<Order::kRelaxed, Scope::kGpu>(p.flag, 1);
    act(p, s, p.second);
  }
};

TEST_CASE("only reductions may overlap") {
  struct Case {
    AddRace::Act first, second;
    Words words;
  };
  const std::string wrote = " at word+0, which cluster 0 cta 0 wrote (act, copies_test.cpp:";
  const std::string read = " at word+0, which cluster 0 cta 0 read (act, copies_test.cpp:";
  const Case cases[] = {
      {AddRace::kAdds, AddRace::kAdds, {}},
      {AddRace::kWrites, AddRace::kAdds, {"TMA reduction" + wrote}},
      {AddRace::kReads, AddRace::kAdds, {"TMA reduction" + read}},
      {AddRace::kStores, AddRace::kAdds, {"TMA reduction" + wrote}},
      {AddRace::kAdds, AddRace::kStores, {"TMA store" + wrote}},
      {AddRace::kAdds, AddRace::kWrites, {"st.global" + wrote}},
      {AddRace::kAdds, AddRace::kReads, {"ld.global" + wrote}},
      {AddRace::kReads, AddRace::kStores, {"TMA store" + read}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.first));
    CAPTURE(static_cast<int>(each.second));
    expect_of<AddRace>({.clusters = 2}, each.words, [&](World& world) {
      return AddRace::Params{each.first, each.second, world.filled("word", 4, 1.0F),
                             world.filled<uint32_t>("flag", 1, 0)};
    });
  }
}

/// Two buffers: a store is under way while the next one is filled.
struct TwoBuffers : Kernel<> {
  static constexpr int kRounds = 9;
  struct Params {
    int buffers;  // 1 is one too few
    hw::Global<uint32_t> out;
  };
  struct Smem {
    hw::Buffer<128, 128> buffer[2];
  };
  static void run(const Params& p, Smem& s) {
    for (int round = 0; round < kRounds; ++round) {
      const uint32_t buffer = hw::address(s.buffer[round % p.buffers]);
      if (hw::lane() == 0) hw::bulk_wait_read<1>();  // the store before last has left this buffer
      hw::warp_sync();
      hw::st_shared(buffer + hw::lane() * 4, static_cast<uint32_t>(round * 32 + hw::lane()));
      hw::fence_proxy_async();
      hw::warp_sync();
      if (hw::lane() == 0) {
        hw::bulk_store(p.out + round * 32, buffer, 128);
        hw::bulk_commit();
      }
    }
    if (hw::lane() == 0) hw::bulk_wait_read<0>();
  }
};

std::string two_buffers(int buffers, uint64_t seed) {
  World world;
  const TwoBuffers::Params p{buffers, world.filled<uint32_t>("out", TwoBuffers::kRounds * 32, 0)};
  const Report report = hw::launch<TwoBuffers>(world, 1, p, {.seed = seed});
  if (!report.ok) return report.what;
  const auto out = world.download(p.out, TwoBuffers::kRounds * 32);
  for (uint32_t i = 0; i < out.size(); ++i) {
    if (out[i] != i) return "out[" + std::to_string(i) + "]: " + std::to_string(out[i]);
  }
  return "";
}

TEST_CASE("stores of several groups: a wait leaves the last N alone") {
  for_seeds(9, [](uint64_t seed) { return two_buffers(2, seed); });
  on_some_seed(20, [](uint64_t seed) { return !two_buffers(1, seed).empty(); });
}

}  // namespace
}  // namespace logitless::model_test
