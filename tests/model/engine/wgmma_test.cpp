// SPDX-License-Identifier: Apache-2.0
// wgmma: every layout against plain loops, what its fences, commits and waits promise, and the
// hardware's rule of sums against an implementation of its own.
#include <cmath>
#include <cstdio>

#include "operands.h"
#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::Major;
using hw::Swizzle;

constexpr int kM = 64, kK = 64;
constexpr Swizzle kSwizzles[] = {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128};

// --- layouts ---------------------------------------------------------------------------------------------

/// D = A B^T of one warpgroup, K = 64 in four steps.
template <int kN, Major kA, Major kB>
struct Product : Kernel<4> {
  struct Params {
    hw::Global<const hw::Bf16> a, b;  // [64, 64], [kN, 64]
    hw::Global<float> d;              // [64, kN]
    Swizzle swizzle_a, swizzle_b;
  };
  struct Smem {
    hw::Buffer<kM * kK * 2> a;
    hw::Buffer<kN * kK * 2> b;
  };
  static void run(const Params& p, Smem& s) {
    const auto a = TileLayout::of(kA, p.swizzle_a, kM, kK);
    const auto b = TileLayout::of(kB, p.swizzle_b, kN, kK);
    store_tile(hw::address(s.a), a, p.a, 0, Product::kThreads);
    store_tile(hw::address(s.b), b, p.b, 0, Product::kThreads);
    hw::fence_proxy_async();
    hw::cta_sync();
    float d[kN / 2];
    for (float& v : d) v = -1e9F;  // the first step does not accumulate
    hw::wgmma_fence();
    for (int k = 0; k < kK; k += 16) {
      hw::wgmma<kN, kA, kB>(d, hw::wgmma_operand(hw::address(s.a) + a.step(k), a.operand),
                            hw::wgmma_operand(hw::address(s.b) + b.step(k), b.operand), k > 0);
    }
    hw::wgmma_commit();
    hw::wgmma_wait<0>(d);
    for (int v = 0; v < kN / 2; ++v) {
      hw::st(p.d + (hw::wgmma_row(hw::thread(), v) * kN + hw::wgmma_column(hw::thread(), v)), d[v]);
    }
  }
};

std::string difference(const std::vector<float>& got, const std::vector<float>& expected, int n) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    return "d[" + std::to_string(i / static_cast<size_t>(n)) + "][" +
           std::to_string(i % static_cast<size_t>(n)) + "]: expected " +
           std::to_string(expected[i]) + ", got " + std::to_string(got[i]);
  }
  return "";
}

template <int kN, Major kA, Major kB>
void check_product(int seeds_each) {
  const auto a = whole_numbers(1, kM * kK), b = whole_numbers(2, kN * kK);
  const auto expected = plain_product(a, b, kM, kN, kK);
  for (const Swizzle swizzle_a : kSwizzles) {
    for (const Swizzle swizzle_b : kSwizzles) {
      CAPTURE(static_cast<int>(swizzle_a));
      CAPTURE(static_cast<int>(swizzle_b));
      for_seeds(seeds_each, [&](uint64_t seed) -> std::string {
        World world;
        const typename Product<kN, kA, kB>::Params p{upload(world, "a", a), upload(world, "b", b),
                                                     world.allocate<float>("d", kM * kN), swizzle_a,
                                                     swizzle_b};
        const Report report = hw::launch<Product<kN, kA, kB>>(world, 1, p, {.seed = seed});
        if (!report.ok) return report.what;
        return difference(world.download(p.d, kM * kN), expected, kN);
      });
    }
  }
}

TEST_CASE("wgmma: every swizzle of both operands, K-major and MN-major") {
  check_product<64, Major::kK, Major::kK>(1);
  check_product<64, Major::kMn, Major::kK>(1);
  check_product<64, Major::kK, Major::kMn>(1);
  check_product<64, Major::kMn, Major::kMn>(1);
}
TEST_CASE("wgmma: every N") {
  check_product<128, Major::kK, Major::kMn>(1);
  check_product<192, Major::kMn, Major::kK>(1);
  check_product<256, Major::kK, Major::kK>(1);
}

// --- order -----------------------------------------------------------------------------------------------

/// Two accumulators, two groups: the first is read while the second may still run.
struct Pipeline : Kernel<4> {
  enum Flaw {
    kNone,
    kNoFence,
    kNoFenceAgain,  // after the registers were read
    kNoCommit,
    kNoWait,
    kWaitsForOneTooFew,
    kReadsEarly,
    kUnfencedTile,
    kUnwrittenTile,
    kLeaves,
    kOneWarpLess,
    kOtherOperand,
    kOtherAccumulate,
    kOtherAccumulator,
    kOtherWay
  };
  static constexpr int kN = 64, kSteps = 3;
  struct Params {
    Flaw flaw;
    hw::Global<const hw::Bf16> a, b;  // [64, 16], [64, 16]
    hw::Global<float> d;              // [kSteps, 64, 64]: i + 1 times the product
  };
  struct Smem {
    hw::Buffer<kM * 32> a;
    hw::Buffer<kN * 32> b;
  };
  static void describe(hw::Names& names) {
    names.add("a", &Smem::a);
    names.add("b", &Smem::b);
  }
  static void write(const Params& p, int step, const float (&d)[kN / 2]) {
    for (int v = 0; v < kN / 2; ++v) {
      const int row = hw::wgmma_row(hw::thread(), v), column = hw::wgmma_column(hw::thread(), v);
      hw::st(p.d + ((step * kM + row) * kN + column), d[v]);
    }
  }
  static void multiply(const Params& p, Smem& s) {
    constexpr auto kTile = TileLayout::of(Major::kK, Swizzle::k32, kM, 16);
    const uint64_t a = hw::wgmma_operand(hw::address(s.a), kTile.operand);
    const uint64_t b = hw::wgmma_operand(hw::address(s.b), kTile.operand);
    const bool odd_one = hw::thread() == 77;
    float first[kN / 2] = {}, second[kN / 2] = {}, third[kN / 2] = {};
    if (p.flaw != kNoFence) hw::wgmma_fence();
    hw::wgmma<kN>(first, a, b, false);
    if (p.flaw != kNoCommit) hw::wgmma_commit();
    if (p.flaw == kReadsEarly) return write(p, 0, first);
    hw::wgmma<kN>(second, a, p.flaw == kOtherOperand && odd_one ? a : b, false);
    const bool otherwise = p.flaw == kOtherAccumulate && odd_one;
    hw::wgmma<kN>(p.flaw == kOtherAccumulator && odd_one ? first : second, a, b, !otherwise);
    if (p.flaw != kNoCommit) hw::wgmma_commit();
    if (p.flaw == kLeaves) return;
    if (p.flaw != kNoWait) hw::wgmma_wait<1>(first);
    if (p.flaw == kOtherWay && odd_one) hw::fence_proxy_async();
    write(p, 0, first);
    if (p.flaw == kWaitsForOneTooFew) hw::wgmma_wait<1>(second);
    if (p.flaw != kNoWait && p.flaw != kWaitsForOneTooFew) hw::wgmma_wait<0>(second);
    write(p, 1, second);
    if (p.flaw != kNoFenceAgain) hw::wgmma_fence();
    for (int v = 0; v < kN / 2; ++v) third[v] = second[v];
    hw::wgmma<kN>(third, a, b, true);
    hw::wgmma_commit();
    hw::wgmma_wait<0>(third);
    write(p, 2, third);
  }
  static void run(const Params& p, Smem& s) {
    constexpr auto kTile = TileLayout::of(Major::kK, Swizzle::k32, kM, 16);
    if (p.flaw != kUnwrittenTile) store_tile(hw::address(s.a), kTile, p.a, 0, kThreads);
    store_tile(hw::address(s.b), kTile, p.b, 0, kThreads);
    if (p.flaw != kUnfencedTile) hw::fence_proxy_async();
    hw::cta_sync();
    if (p.flaw == kOneWarpLess && hw::warp() == 2) return;
    multiply(p, s);
  }
};

struct Ran {
  Report report;
  std::string wrong;  // values
};
Ran run_pipeline(Pipeline::Flaw flaw, uint64_t seed) {
  constexpr int kN = Pipeline::kN, kSteps = Pipeline::kSteps;
  static const auto a = whole_numbers(5, kM * 16), b = whole_numbers(6, kN * 16);
  static const auto product = plain_product(a, b, kM, kN, 16);
  std::vector<float> expected;
  for (int step = 0; step < kSteps; ++step) {
    for (const float v : product) expected.push_back(v * static_cast<float>(step + 1));
  }
  World world;
  const Pipeline::Params p{flaw, upload(world, "a", a), upload(world, "b", b),
                           world.filled("d", kSteps * kM * kN, 0.5F)};
  Ran ran{hw::launch<Pipeline>(world, 1, p, {.seed = seed}), ""};
  ran.wrong = difference(world.download(p.d, kSteps * kM * kN), expected, kN);
  return ran;
}

TEST_CASE("wgmma: two accumulators in flight") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    const Ran ran = run_pipeline(Pipeline::kNone, seed);
    return ran.report.ok ? ran.wrong : ran.report.what;
  });
}
TEST_CASE("wgmma: what is missing is said") {
  struct Case {
    Pipeline::Flaw flaw;
    Words words;
  };
  const Case cases[] = {
      {Pipeline::kNoFence,
       {"(multiply, wgmma_test.cpp:",
        "wgmma without wgmma.fence since its registers were last touched"}},
      {Pipeline::kNoFenceAgain,
       {"wgmma without wgmma.fence since its registers were last touched"}},
      {Pipeline::kUnfencedTile,
       {"wgmma ", "of CTA 0, but generic writes of it came without fence.proxy.async"}},
      {Pipeline::kUnwrittenTile, {"wgmma A reads a", "of CTA 0, but nobody has written it"}},
      {Pipeline::kOneWarpLess,
       {"deadlock:", "cluster 0 cta 0 warp 3 (multiply, wgmma_test.cpp:",
        "waits for the other warps of its warpgroup to issue wgmma [32 lanes]"}},
      {Pipeline::kOtherOperand, {"wgmma: the threads of the warpgroup disagree on its operands"}},
      {Pipeline::kOtherAccumulate,
       {"wgmma: the threads of the warpgroup disagree on its operands"}},
      {Pipeline::kOtherAccumulator,
       {"wgmma: the threads of the warpgroup disagree on the accumulator"}},
      {Pipeline::kOtherWay, {"is .aligned, but the lanes of the warp come by different ways"}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.flaw));
    for_seeds(
        4, [&](uint64_t seed) { return faults(run_pipeline(each.flaw, seed).report, each.words); });
  }
}
TEST_CASE("wgmma: registers are poison until the wait") {
  for (const auto flaw : {Pipeline::kNoCommit, Pipeline::kNoWait, Pipeline::kWaitsForOneTooFew,
                          Pipeline::kReadsEarly}) {
    CAPTURE(static_cast<int>(flaw));
    for_seeds(9, [&](uint64_t seed) -> std::string {
      const Ran ran = run_pipeline(flaw, seed);
      if (!ran.report.ok) return "";
      return ran.wrong.find("nan") != std::string::npos ? "" : "no poison: " + ran.wrong;
    });
  }
}
TEST_CASE("wgmma: a CTA must not leave with products in flight") {
  on_some_seed(60, [](uint64_t seed) {
    return faults(run_pipeline(Pipeline::kLeaves, seed).report,
                  {"CTA 0 exits with wgmma in flight"})
        .empty();
  });
}

/// The tile comes by a copy; the product does not wait for it.
struct FromCopy : Kernel<4> {
  struct Params {
    bool waits;
    hw::Global<const hw::Bf16> tile;  // [64, 16], as it lies in shared memory
    hw::Global<float> d;
  };
  struct Smem {
    hw::Buffer<kM * 32> tile;
    hw::Barrier full;
  };
  static void describe(hw::Names& names) { names.add("tile", &Smem::tile); }
  static void run(const Params& p, Smem& s) {
    constexpr auto kTile = TileLayout::of(Major::kK, Swizzle::kNone, kM, 16);
    if (hw::thread() == 0) {
      hw::barrier_init(s.full, 1);
      hw::fence_barrier_init();
      hw::arrive_expect(s.full, kM * 32);
      hw::bulk_load(hw::address(s.tile), p.tile, kM * 32, hw::address(s.full));
    }
    hw::warp_sync();
    hw::cta_sync();
    if (p.waits) hw::wait(s.full, 0);
    const uint64_t tile = hw::wgmma_operand(hw::address(s.tile), kTile.operand);
    float d[32] = {};
    hw::wgmma_fence();
    hw::wgmma<64>(d, tile, tile, false);
    hw::wgmma_commit();
    hw::wgmma_wait<0>(d);
    hw::st(p.d + hw::thread(), d[0]);
    if (!p.waits) hw::wait(s.full, 0);
  }
};

TEST_CASE("wgmma: a tile that a copy still writes") {
  const auto launch = [](bool waits, uint64_t seed) {
    World world;
    return hw::launch<FromCopy>(
        world, 1,
        {waits, upload(world, "tile", whole_numbers(7, kM * 16)), world.allocate<float>("d", 128)},
        {.seed = seed});
  };
  for_seeds(6, [&](uint64_t seed) { return passes(launch(true, seed)); });
  on_some_seed(60, [&](uint64_t seed) {
    return faults(launch(false, seed),
                  {"wgmma A reads tile", "of CTA 0, while an asynchronous copy writes it"})
        .empty();
  });
}

// --- descriptors -----------------------------------------------------------------------------------------

/// One product with the given descriptors; `a` and `b` are added to the address of the tile.
struct Described : Kernel<4> {
  struct Params {
    uint64_t a, b;
  };
  struct Smem {
    hw::Buffer<4096> tile;
  };
  static void describe(hw::Names& names) { names.add("tile", &Smem::tile); }
  static void run(const Params& p, Smem& s) {
    const uint32_t tile = hw::address(s.tile);
    for (uint32_t i = static_cast<uint32_t>(hw::thread()) * 4; i < 4096; i += kThreads * 4) {
      hw::st_shared(tile + i, 0U);
    }
    hw::fence_proxy_async();
    hw::cta_sync();
    float d[32] = {};
    hw::wgmma_fence();
    hw::wgmma<64>(d, (tile >> 4) + p.a, (tile >> 4) + p.b, false);
    hw::wgmma_commit();
    hw::wgmma_wait<0>(d);
  }
};

TEST_CASE("wgmma: descriptors, field by field") {
  using D = hw::WgmmaOperand;
  constexpr uint64_t kGood = D::Leading::put(1) | D::Stride::put(256 >> 4) | D::SwizzleMode::put(3);
  expect<Described>({kGood, kGood}, {});
  expect<Described>({kGood | 1ULL << 14, kGood},
                    {"wgmma A: descriptor 0x", "reserved bits 0x0000000000004000 are set"});
  expect<Described>({kGood, kGood | 1ULL << 30 | 1ULL << 53},
                    {"wgmma B: descriptor 0x", "reserved bits 0x0020000040000000 are set"});
  expect<Described>({kGood + (4096 >> 4), kGood}, {"wgmma A: bytes 0x1400 to 0x1402 are outside"});
  expect<Described>({kGood, kGood + D::Stride::put(2048 >> 4)},
                    {"wgmma B: bytes 0x", "are outside"});
}

/// Both operands start `rows` rows of 128 bytes into the swizzle's pattern, and their descriptors say so
/// with a base offset, or leave it 0.
struct BaseOffset : Kernel<4> {
  struct Params {
    uint32_t rows, base;
    hw::Global<const hw::Bf16> a, b;  // [64, 16]
    hw::Global<float> d;
  };
  struct Smem {
    hw::Buffer<kM * 128 + 1024> a, b;
  };
  static constexpr hw::OperandLayout kLayout{.leading_bytes = 16, .stride_bytes = 1024};

  /// With the base offset of its start a tile is swizzled as if the pattern began there; with none, by
  /// its addresses.
  static void store(uint32_t start, const Params& p, hw::Global<const hw::Bf16> from) {
    for (int i = hw::thread(); i < kM * 8; i += kThreads) {
      const int row = i / 8, k = i % 8 * 2;
      const uint32_t offset = hw::operand_offset(Major::kK, kLayout, row, k);
      hw::st_shared(p.base == p.rows ? start + hw::swizzled(offset) : hw::swizzled(start + offset),
                    uint32_t{hw::ld(from + (row * 16 + k)).bits} |
                        uint32_t{hw::ld(from + (row * 16 + k + 1)).bits} << 16);
    }
  }
  static void run(const Params& p, Smem& s) {
    const uint32_t a = hw::address(s.a) + p.rows * 128, b = hw::address(s.b) + p.rows * 128;
    store(a, p, p.a);
    store(b, p, p.b);
    hw::fence_proxy_async();
    hw::cta_sync();
    const uint64_t base = hw::WgmmaOperand::Base::put(p.base);
    float d[32];
    hw::wgmma_fence();
    hw::wgmma<64>(d, hw::wgmma_operand(a, kLayout) | base, hw::wgmma_operand(b, kLayout) | base,
                  false);
    hw::wgmma_commit();
    hw::wgmma_wait<0>(d);
    for (int v = 0; v < 32; ++v) {
      hw::st(p.d + (hw::wgmma_row(hw::thread(), v) * 64 + hw::wgmma_column(hw::thread(), v)), d[v]);
    }
  }
};

TEST_CASE("wgmma: a start inside the swizzle's pattern, with and without a base offset") {
  const auto a = whole_numbers(3, kM * 16), b = whole_numbers(4, 64 * 16);
  const auto expected = plain_product(a, b, kM, 64, 16);
  for (uint32_t rows = 0; rows < 8; ++rows) {
    for (const uint32_t base : {0U, rows}) {
      CAPTURE(rows);
      CAPTURE(base);
      for_seeds(1, [&](uint64_t seed) -> std::string {
        World world;
        const BaseOffset::Params p{rows, base, upload(world, "a", a), upload(world, "b", b),
                                   world.allocate<float>("d", kM * 64)};
        const Report report = hw::launch<BaseOffset>(world, 1, p, {.seed = seed});
        if (!report.ok) return report.what;
        return difference(world.download(p.d, kM * 64), expected, 64);
      });
    }
  }
}

// --- the hardware's rule of sums -------------------------------------------------------------------------

/// The rule, in other words than the engine's: every term becomes a whole number of units of
/// 2^(top - 25), where 2^top is the largest power of two among the terms; the units are added, and the
/// sum is cut to f32. Subnormal numbers count as 2^-126, and top is never below -133.
class Rule {
 public:
  /// c + the sum of a[i] b[i].
  static float sum(float c, const float* a, const float* b) {
    if (const float special = not_finite(c, a, b); special != 0) return special;
    int top = -133;
    for (int i = 0; i < 16; ++i) {
      if (a[i] != 0 && b[i] != 0) top = std::max(top, power(a[i]) + power(b[i]));
    }
    if (c != 0) top = std::max(top, power(c));
    __int128 units = in_units(c, top - 25);
    for (int i = 0; i < 16; ++i) {
      // Exact: two bf16 have 16 bits together, a long double 64, and its exponent is wider.
      units += in_units(static_cast<long double>(a[i]) * static_cast<long double>(b[i]), top - 25);
    }
    return cut(units, top - 25);
  }

 private:
  static int power(float x) { return std::max(std::ilogb(x), -126); }
  /// Inf or NaN if one of the terms is; 0 otherwise.
  static float not_finite(float c, const float* a, const float* b) {
    bool nan = std::isnan(c), plus = std::isinf(c) && c > 0, minus = std::isinf(c) && c < 0;
    for (int i = 0; i < 16; ++i) {
      nan |= std::isnan(a[i]) || std::isnan(b[i]);
      if (!std::isinf(a[i]) && !std::isinf(b[i])) continue;
      nan |= a[i] == 0 || b[i] == 0;
      (std::signbit(a[i]) != std::signbit(b[i]) ? minus : plus) = true;
    }
    if (nan || (plus && minus)) return hw::as_float(0x7FFFFFFF);
    return plus ? INFINITY : minus ? -INFINITY : 0;
  }
  static __int128 in_units(long double value, int unit) {
    return static_cast<__int128>(std::trunc(std::ldexp(value, -unit)));
  }
  /// Toward zero to the 24 bits of an f32, or to 2^-149.
  static float cut(__int128 units, int unit) {
    const bool negative = units < 0;
    if (negative) units = -units;
    int bits = 0;
    for (__int128 rest = units; rest != 0; rest >>= 1) ++bits;
    const int last = std::max(unit + bits - 24, -149);  // the last bit that stays
    if (last > unit) units = last - unit > 100 ? 0 : units >> (last - unit);
    const auto magnitude = std::ldexp(static_cast<long double>(units), std::max(last, unit));
    const auto value = static_cast<float>(magnitude);
    return negative && value != 0 ? -value : value;  // no zero is negative
  }
};

/// D = C + A B^T, one step of K = 16.
struct Sums : Kernel<4> {
  static constexpr int kN = 64;
  struct Params {
    hw::Global<const hw::Bf16> a, b;
    hw::Global<float> d;  // C before
    bool accumulate;
  };
  using Smem = Pipeline::Smem;
  static void run(const Params& p, Smem& s) {
    constexpr auto kTile = TileLayout::of(Major::kK, Swizzle::k32, kM, 16);
    store_tile(hw::address(s.a), kTile, p.a, 0, kThreads);
    store_tile(hw::address(s.b), kTile, p.b, 0, kThreads);
    hw::fence_proxy_async();
    hw::cta_sync();
    float d[kN / 2];
    const auto place = [&](int v) {
      return p.d + (hw::wgmma_row(hw::thread(), v) * kN + hw::wgmma_column(hw::thread(), v));
    };
    for (int v = 0; v < kN / 2; ++v) d[v] = hw::ld(place(v));
    hw::wgmma_fence();
    hw::wgmma<kN>(d, hw::wgmma_operand(hw::address(s.a), kTile.operand),
                  hw::wgmma_operand(hw::address(s.b), kTile.operand), p.accumulate);
    hw::wgmma_commit();
    hw::wgmma_wait<0>(d);
    for (int v = 0; v < kN / 2; ++v) hw::st(place(v), d[v]);
  }
};

/// Rows of A and of B of one kind, and accumulators.
struct Inputs {
  std::vector<hw::Bf16> a, b;
  std::vector<float> c;

  Inputs() : a(kM * 16), b(Sums::kN * 16), c(kM * Sums::kN) {}
};
hw::Bf16 bf16_of_bits(uint32_t bits) { return {static_cast<uint16_t>(bits)}; }

template <class A, class B, class C>
Inputs inputs_of(const A& of_a, const B& of_b, C of_c) {
  Inputs in;
  for (auto& v : in.a) v = of_a();
  for (auto& v : in.b) v = of_b();
  for (auto& v : in.c) v = of_c();
  return in;
}

/// Every element of D, bit for bit.
std::string check_sums(const Inputs& in, bool accumulate = true) {
  World world;
  const Sums::Params p{upload(world, "a", in.a), upload(world, "b", in.b), world.upload("d", in.c),
                       accumulate};
  const Report report = hw::launch<Sums>(world, 1, p, {.seed = 1, .exact = true});
  if (!report.ok) return report.what;
  const auto d = world.download(p.d, kM * Sums::kN);
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < Sums::kN; ++j) {
      float a[16], b[16];
      for (int k = 0; k < 16; ++k) {
        a[k] = static_cast<float>(value_of(in.a[static_cast<size_t>(i * 16 + k)]));
        b[k] = static_cast<float>(value_of(in.b[static_cast<size_t>(j * 16 + k)]));
      }
      const size_t at = static_cast<size_t>(i * Sums::kN + j);
      const float expected = Rule::sum(accumulate ? in.c[at] : 0, a, b), got = d[at];
      if (hw::as_bits(expected) == hw::as_bits(got)) continue;
      char text[160];
      std::snprintf(text, sizeof text, "d[%d][%d]: expected %a, got %a; c was %a", i, j,
                    static_cast<double>(expected), static_cast<double>(got),
                    static_cast<double>(in.c[at]));
      return text;
    }
  }
  return "";
}

TEST_CASE("exact sums: numbers of one size") {
  Random random(1);
  const auto uniform = [&] { return to_bf16(static_cast<float>(random())); };
  const auto wide = [&] { return static_cast<float>(random() * 4); };
  CHECK(check_sums(inputs_of(uniform, uniform, wide)) == "");
  CHECK(check_sums(inputs_of(uniform, uniform, wide), false) == "");
}
TEST_CASE("exact sums: of very different sizes, each bit that falls off") {
  Random random(2);
  for (const int range : {4, 12, 25, 26, 40, 100}) {
    CAPTURE(range);
    const auto spread = [&] {
      return to_bf16(static_cast<float>(std::ldexp(random(), random.below(range) - range / 2)));
    };
    const auto spread_c = [&] {
      return static_cast<float>(std::ldexp(random(), random.below(2 * range) - range));
    };
    CHECK(check_sums(inputs_of(spread, spread, spread_c)) == "");
  }
}
TEST_CASE("exact sums: what cancels leaves what was cut") {
  Random random(3);
  Inputs in = inputs_of([&] { return to_bf16(static_cast<float>(random())); },
                        [&] { return to_bf16(static_cast<float>(random())); }, [] { return 0.0F; });
  // Every second k takes back what the one before gave, up to one small term.
  for (size_t i = 0; i < in.a.size(); i += 2) {
    in.a[i + 1] = {static_cast<uint16_t>(in.a[i].bits ^ 0x8000)};
    in.b[i + 1] = in.b[i];
  }
  for (size_t row = 0; row < in.a.size(); row += 16) {
    in.a[row] = to_bf16(static_cast<float>(std::ldexp(random(), -random.below(40))));
  }
  for (auto& c : in.c) c = static_cast<float>(std::ldexp(random(), -random.below(40)));
  CHECK(check_sums(in) == "");
  // The accumulator itself cancels the products.
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < Sums::kN; ++j) {
      double sum = 0;
      for (size_t k = 0; k < 16; ++k) {
        sum += value_of(in.a[static_cast<size_t>(i) * 16 + k]) *
               value_of(in.b[static_cast<size_t>(j) * 16 + k]);
      }
      in.c[static_cast<size_t>(i * Sums::kN + j)] = static_cast<float>(-sum);
    }
  }
  CHECK(check_sums(in) == "");
}
TEST_CASE("exact sums: zeros of both signs, subnormal inputs and results") {
  Random random(4);
  const auto zero_or = [&] {
    return random() < 0 ? bf16_of_bits(random() < 0 ? 0 : 0x8000)
                        : to_bf16(static_cast<float>(random()));
  };
  CHECK(check_sums(inputs_of(zero_or, zero_or, [] { return -0.0F; })) == "");
  const auto tiny = [&] {  // a subnormal bf16, or one of the smallest normal ones
    return bf16_of_bits(static_cast<uint32_t>(random.below(512)) | (random() < 0 ? 0x8000U : 0U));
  };
  const auto near_one = [&] { return to_bf16(static_cast<float>(random())); };
  const auto tiny_c = [&] { return hw::as_float(static_cast<uint32_t>(random.below(1 << 25))); };
  CHECK(check_sums(inputs_of(tiny, near_one, tiny_c)) == "");
  CHECK(check_sums(inputs_of(near_one, tiny, [] { return 0.0F; })) == "");
  CHECK(check_sums(inputs_of(tiny, tiny, tiny_c)) == "");
  // Products at the lower end of f32, from both sides.
  const auto small = [&] {
    return to_bf16(static_cast<float>(std::ldexp(random(), -60 - random.below(20))));
  };
  CHECK(check_sums(inputs_of(small, small, tiny_c)) == "");
}
TEST_CASE("exact sums: powers of two where the alignment ends, and below every bit of f32") {
  Random random(6);
  // Products of 2^-132 ... 2^-160: whether the smallest are cut decides where the sum is rounded to.
  const auto power = [&] {
    const double sign = random() < 0 ? -1 : 1;
    return to_bf16(static_cast<float>(std::ldexp(sign, -66 - random.below(15))));
  };
  CHECK(check_sums(inputs_of(power, power, [] { return 0.0F; })) == "");
  CHECK(check_sums(inputs_of(power, power, [] { return 0.0F; }), false) == "");
}
TEST_CASE("exact sums: inf and NaN, and finite sums that are too large") {
  Random random(5);
  const auto with = [&](std::initializer_list<uint32_t> special, int one_in) {
    const std::vector<uint32_t> bits(special);
    return [&random, bits, one_in] {
      if (random.below(one_in) != 0) return to_bf16(static_cast<float>(random()));
      return bf16_of_bits(bits[static_cast<size_t>(random.below(static_cast<int>(bits.size())))]);
    };
  };
  const auto c = [&] { return static_cast<float>(random()); };
  const auto special_c = [&] {
    constexpr float kSpecial[] = {INFINITY, -INFINITY, NAN, 0};
    return random.below(4) != 0 ? static_cast<float>(random()) : kSpecial[random.below(4)];
  };
  CHECK(check_sums(inputs_of(with({0x7F80}, 40), with({0x3F80}, 8), c)) == "");
  CHECK(check_sums(inputs_of(with({0x7F80, 0xFF80}, 20), with({0, 0x8000}, 20), c)) == "");
  CHECK(check_sums(inputs_of(with({0x7FC0, 0xFFFF}, 60), with({0x3F80}, 8), c)) == "");
  CHECK(check_sums(inputs_of(with({0x3F80}, 8), with({0x3F80}, 8), special_c)) == "");
  // Finite, but too large for f32; and beside an infinity of the other sign, which decides.
  const auto huge = [&] { return to_bf16(static_cast<float>(std::ldexp(random(), 120))); };
  CHECK(check_sums(inputs_of(huge, huge, c)) == "");
  CHECK(check_sums(inputs_of(huge, huge, special_c)) == "");
}

}  // namespace
}  // namespace logitless::model_test
