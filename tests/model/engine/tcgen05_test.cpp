// SPDX-License-Identifier: Apache-2.0
// tcgen05: every accumulator in TMEM against plain loops, who owns its columns, and each fence, commit
// and wait that may be missing.
#include <bit>
#include <set>

#include "operands.h"
#include "runs.h"

namespace logitless::model_test {
namespace {

using hw::CtaGroup;
using hw::Major;
using hw::Swizzle;

constexpr Swizzle kSwizzles[] = {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128};

constexpr uint32_t columns_for(int width) {
  return std::bit_ceil(static_cast<uint32_t>(width < 32 ? 32 : width));
}

// --- where accumulators lie ------------------------------------------------------------------------------

/// D = A B^T, K = 32 in two steps; then the whole of D's columns in TMEM, as they are.
template <CtaGroup kGroup, int kM, int kN, Major kA = Major::kK, Major kB = Major::kK>
struct Product : Kernel<4, static_cast<int>(kGroup)> {
  static constexpr int kK = 32, kCtas = static_cast<int>(kGroup);
  static constexpr int kRowsA = kM / kCtas, kRowsB = kN / kCtas;
  static constexpr int kWidth = kCtas == 2 && kM == 128 ? kN / 2 : kN;  // columns of TMEM
  static constexpr int kMmaWarp = 0, kAllocWarp = 2;
  struct Params {
    hw::Global<const hw::Bf16> a, b;  // [kM, kK], [kN, kK]
    hw::Global<uint32_t> tmem;        // [kCtas, 128 lanes, kWidth]
    Swizzle swizzle_a, swizzle_b;
  };
  struct Smem {
    hw::Buffer<kRowsA * kK * 2> a;
    hw::Buffer<kRowsB * kK * 2> b;
    hw::Barrier done;
    hw::Cell<uint32_t> tmem;
  };
  static void multiply(const Params& p, Smem& s) {
    const auto a = TileLayout::of(kA, p.swizzle_a, kRowsA, kK);
    const auto b = TileLayout::of(kB, p.swizzle_b, kRowsB, kK);
    hw::tcgen05_after_sync();
    for (int k = 0; k < kK; k += 16) {
      hw::tcgen05_mma<kGroup>(s.tmem.load(),
                              hw::umma_operand(hw::address(s.a) + a.step(k), a.operand),
                              hw::umma_operand(hw::address(s.b) + b.step(k), b.operand),
                              hw::umma_instruction(kM, kN, kA, kB), k > 0);
    }
    if constexpr (kCtas == 2) {
      hw::tcgen05_commit_multicast<kGroup>(s.done, 0b11);
    } else {
      hw::tcgen05_commit<kGroup>(s.done);
    }
  }
  static void write(const Params& p, Smem& s) {
    const int lane = hw::thread();
    for (int column = 0; column < kWidth; column += 8) {
      uint32_t v[8];
      hw::tmem_ld(hw::tmem_address(s.tmem.load(), hw::warp() * 32, column), v);
      hw::tmem_wait_ld(v);
      for (int i = 0; i < 8; ++i) {
        hw::st(p.tmem + ((hw::cta_rank() * 128 + lane) * kWidth + column + i), v[i]);
      }
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.done, 1);
      hw::fence_barrier_init();
    }
    if (hw::warp() == kAllocWarp) {
      hw::tmem_alloc<kGroup>(s.tmem, columns_for(kWidth));
      hw::tmem_relinquish<kGroup>();
    }
    store_tile(hw::address(s.a), TileLayout::of(kA, p.swizzle_a, kRowsA, kK), p.a,
               hw::cta_rank() * kRowsA, Product::kThreads);
    store_tile(hw::address(s.b), TileLayout::of(kB, p.swizzle_b, kRowsB, kK), p.b,
               hw::cta_rank() * kRowsB, Product::kThreads);
    hw::fence_proxy_async();
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();  // both CTAs' tiles, barriers and columns
    if (hw::cta_rank() == 0 && hw::warp() == kMmaWarp && hw::lane() == 0) multiply(p, s);
    hw::wait(s.done, 0);
    hw::tcgen05_after_sync();
    hw::warp_sync();
    write(p, s);
    hw::tcgen05_before_sync();
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::warp() == kAllocWarp) {
      hw::tcgen05_after_sync();
      hw::tmem_dealloc<kGroup>(s.tmem.load(), columns_for(kWidth));
    }
  }
};

template <CtaGroup kGroup, int kM, int kN, Major kA = Major::kK, Major kB = Major::kK>
std::string multiply(Swizzle swizzle_a, Swizzle swizzle_b, uint64_t seed) {
  using P = Product<kGroup, kM, kN, kA, kB>;
  constexpr int kWords = P::kCtas * 128 * P::kWidth;
  static const auto a = whole_numbers(1, kM * P::kK), b = whole_numbers(2, kN * P::kK);
  static const auto expected = plain_product(a, b, kM, kN, P::kK);
  World world;
  const typename P::Params p{upload(world, "a", a), upload(world, "b", b),
                             world.allocate<uint32_t>("tmem", kWords), swizzle_a, swizzle_b};
  const Report report = hw::launch<P>(world, 1, p, {.seed = seed});
  if (!report.ok) return report.what;
  const auto tmem = world.download(p.tmem, kWords);
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      const hw::TmemPlace at = hw::tmem_place(kGroup, kM, kN, m, n);
      const float got =
          hw::as_float(tmem[static_cast<size_t>((at.cta * 128 + at.lane) * P::kWidth + at.column)]);
      const float want = expected[static_cast<size_t>(m * kN + n)];
      if (got == want) continue;
      return "d[" + std::to_string(m) + "][" + std::to_string(n) + "]: expected " +
             std::to_string(want) + ", got " + std::to_string(got);
    }
  }
  return "";
}

template <CtaGroup kGroup, int kM, int kN>
void check_accumulator() {
  CAPTURE(static_cast<int>(kGroup));
  CAPTURE(kM);
  CAPTURE(kN);
  for_seeds(
      3, [](uint64_t seed) { return multiply<kGroup, kM, kN>(Swizzle::k64, Swizzle::k64, seed); });
}

TEST_CASE("tcgen05: every shape of accumulator lies where tmem_place says") {
  check_accumulator<CtaGroup::kOne, 64, 8>();
  check_accumulator<CtaGroup::kOne, 64, 72>();
  check_accumulator<CtaGroup::kOne, 64, 256>();
  check_accumulator<CtaGroup::kOne, 128, 16>();
  check_accumulator<CtaGroup::kOne, 128, 48>();
  check_accumulator<CtaGroup::kOne, 128, 256>();
  check_accumulator<CtaGroup::kTwo, 128, 32>();
  check_accumulator<CtaGroup::kTwo, 128, 96>();
  check_accumulator<CtaGroup::kTwo, 128, 256>();
  check_accumulator<CtaGroup::kTwo, 256, 32>();
  check_accumulator<CtaGroup::kTwo, 256, 160>();
  check_accumulator<CtaGroup::kTwo, 256, 256>();
}

template <CtaGroup kGroup, int kM, int kN, Major kA, Major kB>
void check_layouts() {
  CAPTURE(static_cast<int>(kA));
  CAPTURE(static_cast<int>(kB));
  for (const Swizzle a : kSwizzles) {
    for (const Swizzle b : kSwizzles) {
      CAPTURE(static_cast<int>(a));
      CAPTURE(static_cast<int>(b));
      // A row of 128 bytes is 64 of k: wider than this tile.
      if ((kA == Major::kK && a == Swizzle::k128) || (kB == Major::kK && b == Swizzle::k128))
        continue;
      for_seeds(1, [&](uint64_t seed) { return multiply<kGroup, kM, kN, kA, kB>(a, b, seed); });
    }
  }
}

TEST_CASE("tcgen05: every layout of both operands") {
  check_layouts<CtaGroup::kOne, 128, 64, Major::kK, Major::kK>();
  check_layouts<CtaGroup::kOne, 64, 64, Major::kMn, Major::kK>();
  check_layouts<CtaGroup::kTwo, 256, 128, Major::kK, Major::kMn>();
  check_layouts<CtaGroup::kTwo, 128, 128, Major::kMn, Major::kMn>();
}

// --- order -----------------------------------------------------------------------------------------------

/// Two products in one accumulator: warp 4 multiplies, warps 0 ... 3 read.
///
///   mma:   wait(finished) -> product -> commit(arrived)
///   reads: wait(arrived) -> tcgen05.ld -> arrive(finished)
struct TwoProducts : Kernel<5> {
  enum Flaw {
    kNone,
    kNoCommit,
    kOtherCommits,
    kNoWaitForProduct,
    kNoAfterInReaders,
    kNoAfterInMma,
    kNoWaitLd,
    kWaitsForStores,  // which are others
    kReadsEarly,
    kNoBefore,
    kNoWaitForReaders,
    kArrivesBeforeFence,
    kNoInitFence,
    kUnfencedTile,
    kUnwrittenTile,
    kNoSyncBeforeDealloc,
    kNoAfterBeforeDealloc,
    kLeaks,
    kDeallocDuringProduct,
    kOtherWay
  };
  static constexpr int kN = 32, kMmaWarp = 4, kReaders = 128;
  struct Params {
    Flaw flaw;
    hw::Global<const hw::Bf16> a, b;  // [128, 16], [32, 16]
    hw::Global<float> d;              // [2, 128, 32]
  };
  struct Smem {
    hw::Buffer<128 * 32> a;
    hw::Buffer<kN * 32> b;
    hw::Barrier arrived, finished;
    hw::Cell<uint32_t> tmem;
  };
  static void describe(hw::Names& names) {
    names.add("a", &Smem::a);
    names.add("b", &Smem::b);
    names.add("arrived", &Smem::arrived);
    names.add("finished", &Smem::finished);
  }
  static constexpr TileLayout kTileA = TileLayout::of(Major::kK, Swizzle::k32, 128, 16);
  static constexpr TileLayout kTileB = TileLayout::of(Major::kK, Swizzle::k32, kN, 16);

  static void commit(const Params& p, Smem& s) {
    if (p.flaw != kNoCommit && p.flaw != kOtherCommits) {
      hw::tcgen05_commit<CtaGroup::kOne>(s.arrived);
    }
  }
  static void mma(const Params& p, Smem& s) {
    const uint32_t tmem = s.tmem.load();
    const uint64_t a = hw::umma_operand(hw::address(s.a), kTileA.operand);
    const uint64_t b = hw::umma_operand(hw::address(s.b), kTileB.operand);
    constexpr uint32_t kInstruction = hw::umma_instruction(128, kN, Major::kK, Major::kK);
    hw::tcgen05_after_sync();
    hw::tcgen05_mma<CtaGroup::kOne>(tmem, a, b, kInstruction, false);
    commit(p, s);
    if (p.flaw == kDeallocDuringProduct) return;
    if (p.flaw != kNoWaitForReaders) hw::wait(s.finished, 0);
    if (p.flaw != kNoAfterInMma) hw::tcgen05_after_sync();
    hw::tcgen05_mma<CtaGroup::kOne>(tmem, a, b, kInstruction, false);
    hw::tcgen05_mma<CtaGroup::kOne>(tmem, a, b, kInstruction, true);
    commit(p, s);
  }
  static bool waits_for_loads(Flaw flaw) { return flaw != kNoWaitLd && flaw != kWaitsForStores; }
  static void write(const Params& p, uint32_t round, const uint32_t (&v)[kN]) {
    for (int i = 0; i < kN; ++i) {
      hw::st(p.d + ((static_cast<int>(round) * 128 + hw::thread()) * kN + i), hw::as_float(v[i]));
    }
  }
  static void read(const Params& p, Smem& s, uint32_t round) {
    uint32_t v[kN] = {};
    if (p.flaw != kNoWaitForProduct) hw::wait(s.arrived, round);
    if (p.flaw != kNoAfterInReaders) hw::tcgen05_after_sync();
    if (p.flaw == kOtherWay && hw::thread() == 9) hw::fence_proxy_async();
    hw::tmem_ld(hw::tmem_address(s.tmem.load(), hw::warp() * 32, 0), v);
    if (p.flaw == kReadsEarly) write(p, round, v);
    if (p.flaw == kWaitsForStores) hw::tmem_wait_st();
    if (waits_for_loads(p.flaw)) hw::tmem_wait_ld(v);
    if (p.flaw == kArrivesBeforeFence) hw::arrive(s.finished);
    if (p.flaw != kNoBefore) hw::tcgen05_before_sync();
    if (p.flaw != kArrivesBeforeFence) hw::arrive(s.finished);
    if (p.flaw != kReadsEarly) write(p, round, v);
    // Without a wait the registers stay in flight: the frame must outlive that.
    if (!waits_for_loads(p.flaw)) hw::wait(s.arrived, 1);
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.arrived, 1);
      hw::barrier_init(s.finished, kReaders);
      if (p.flaw != kNoInitFence) hw::fence_barrier_init();
    }
    if (hw::warp() == kMmaWarp) hw::tmem_alloc<CtaGroup::kOne>(s.tmem, 32);
    if (p.flaw != kUnwrittenTile) store_tile(hw::address(s.a), kTileA, p.a, 0, kThreads);
    store_tile(hw::address(s.b), kTileB, p.b, 0, kThreads);
    if (p.flaw != kUnfencedTile) hw::fence_proxy_async();
    hw::warp_sync();
    hw::cta_sync();
    if (hw::warp() == kMmaWarp) {
      if (hw::lane() == 0) mma(p, s);
      if (p.flaw == kOtherCommits && hw::lane() == 1) hw::tcgen05_commit<CtaGroup::kOne>(s.arrived);
    } else if (p.flaw != kDeallocDuringProduct) {
      read(p, s, 0);
      read(p, s, 1);
    }
    hw::warp_sync();
    if (p.flaw != kNoSyncBeforeDealloc) hw::cta_sync();
    if (hw::warp() == kMmaWarp && p.flaw != kLeaks) {
      if (p.flaw != kNoAfterBeforeDealloc) hw::tcgen05_after_sync();
      hw::tmem_dealloc<CtaGroup::kOne>(s.tmem.load(), 32);
    }
  }
};

struct Ran {
  Report report;
  std::string wrong;
};
Ran two_products(TwoProducts::Flaw flaw, uint64_t seed) {
  constexpr int kN = TwoProducts::kN;
  static const auto a = whole_numbers(5, 128 * 16), b = whole_numbers(6, kN * 16);
  static const auto product = plain_product(a, b, 128, kN, 16);
  World world;
  const TwoProducts::Params p{flaw, upload(world, "a", a), upload(world, "b", b),
                              world.filled("d", 2 * 128 * kN, 0.5F)};
  Ran ran{hw::launch<TwoProducts>(world, 1, p, {.seed = seed}), ""};
  const auto d = world.download(p.d, 2 * 128 * kN);
  for (size_t i = 0; i < d.size() && ran.wrong.empty(); ++i) {
    const float expected = product[i % product.size()] * (i < product.size() ? 1.0F : 2.0F);
    if (d[i] != expected) ran.wrong = "d[" + std::to_string(i) + "]: " + std::to_string(d[i]);
  }
  return ran;
}

TEST_CASE("tcgen05: an accumulator goes back and forth") {
  for_seeds(12, [](uint64_t seed) -> std::string {
    const Ran ran = two_products(TwoProducts::kNone, seed);
    return ran.report.ok ? ran.wrong : ran.report.what;
  });
}
TEST_CASE("tcgen05: what is missing is said") {
  struct Case {
    TwoProducts::Flaw flaw;
    Words words;
  };
  const char* unread =
      "nothing orders it after the write (commit or fence::before, wait, then "
      "fence::after_thread_sync)";
  const Case cases[] = {
      {TwoProducts::kNoCommit,
       {"deadlock:", "cluster 0 cta 0 warp 3 (read, tcgen05_test.cpp:",
        "waits for arrived, parity 0: phase 0 is open, 1 of 1 arrivals missing [32 lanes]"}},
      {TwoProducts::kNoWaitForProduct, {"tcgen05."}},
      {TwoProducts::kOtherCommits, {"tcgen05."}},
      {TwoProducts::kNoAfterInReaders,
       {"(read, tcgen05_test.cpp:",
        "tcgen05.ld after a wait without fence::after_thread_sync: it is not ordered after what "
        "was "
        "waited for"}},
      {TwoProducts::kNoAfterInMma,
       {"cluster 0 cta 0 warp 4 lane 0 (mma, tcgen05_test.cpp:",
        "tcgen05.mma after a wait without fence::after_thread_sync"}},
      {TwoProducts::kNoWaitLd,
       {"(mma, tcgen05_test.cpp:", "tcgen05.mma: column ",
        "of CTA 0 is still read or stored by warp ",
        "of its quarter (wait::ld or wait::st, then fence::before_thread_sync, are missing)"}},
      {TwoProducts::kWaitsForStores, {"tcgen05.mma: column ", "is still read or stored by warp "}},
      {TwoProducts::kNoBefore, {"tcgen05.mma: column ", "is still read or stored by warp 0"}},
      {TwoProducts::kArrivesBeforeFence, {"tcgen05.mma: column "}},
      {TwoProducts::kNoInitFence,
       {"tcgen05.commit: mbarrier arrived of CTA 0 was initialised without fence.mbarrier_init"}},
      {TwoProducts::kUnfencedTile,
       {"tcgen05.mma ", "of CTA 0, but generic writes of it came without fence.proxy.async"}},
      {TwoProducts::kUnwrittenTile, {"tcgen05.mma A reads a", "but nobody has written it"}},
      {TwoProducts::kNoSyncBeforeDealloc, {"tcgen05."}},
      {TwoProducts::kLeaks, {"CTA 0 exits with 32 columns of TMEM allocated at column "}},
      {TwoProducts::kOtherWay, {"tcgen05.ld is .aligned, but the lanes of the warp come"}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.flaw));
    for_seeds(
        4, [&](uint64_t seed) { return faults(two_products(each.flaw, seed).report, each.words); });
  }
  struct Sometimes {
    TwoProducts::Flaw flaw;
    std::string what;
  };
  for (const Sometimes& each :
       {Sometimes{TwoProducts::kNoWaitForProduct, "tcgen05.mma or tcgen05.st is still writing it"},
        {TwoProducts::kNoWaitForProduct, "nothing was ever written there"},
        {TwoProducts::kNoWaitForProduct, unread},
        {TwoProducts::kOtherCommits, "the product is not committed"},
        {TwoProducts::kNoWaitForReaders, "is still read or stored by warp"},
        {TwoProducts::kArrivesBeforeFence,
         "of CTA 0 was read or stored, and nothing orders this product after that "
         "(wait, then fence::after_thread_sync)"},
        {TwoProducts::kDeallocDuringProduct, "while tcgen05.mma or tcgen05.st writes it"},
        {TwoProducts::kNoSyncBeforeDealloc, "tcgen05.dealloc of column "}}) {
    CAPTURE(each.what);
    on_some_seed(90, [&](uint64_t seed) {
      return faults(two_products(each.flaw, seed).report, {each.what}).empty();
    });
  }
}
TEST_CASE("tcgen05: a product that does not wait for the readers of the one before") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    // Commits arrive in any order: readers may find the second product where they expect the first.
    const Ran ran = two_products(TwoProducts::kNoWaitForReaders, seed);
    return !ran.report.ok || !ran.wrong.empty() ? "" : "expected a fault or wrong values";
  });
}
TEST_CASE("tcgen05: registers are poison until wait::ld") {
  on_some_seed(20, [](uint64_t seed) {
    const Ran ran = two_products(TwoProducts::kReadsEarly, seed);
    return ran.report.ok && ran.wrong.find("nan") != std::string::npos;
  });
}
TEST_CASE("tcgen05: a dealloc is ordered after the reads of other warps") {
  for_seeds(6, [](uint64_t seed) {
    return faults(two_products(TwoProducts::kNoAfterBeforeDealloc, seed).report,
                  {"tcgen05.dealloc of column ", ": not ordered after its reads"});
  });
}

/// The same for a pair: the readers of both CTAs hand the accumulator back at the leader's barrier.
struct PairHandsBack : Kernel<5, 2> {
  enum Flaw { kNone, kOddDoesNotFence, kLeaderDoesNotFence };
  static constexpr int kN = 32, kMmaWarp = 4, kReaders = 2 * 128;
  static constexpr uint16_t kBothCtas = 0b11;
  struct Params {
    Flaw flaw;
  };
  struct Smem {
    hw::Buffer<4096> tile;  // zeros, of both operands
    hw::Barrier arrived, finished;
    hw::Cell<uint32_t> tmem;
  };
  static void mma(const Params& p, Smem& s) {
    const uint64_t tile = hw::umma_operand(
        hw::address(s.tile), {.leading_bytes = 16, .stride_bytes = 256, .swizzle = Swizzle::k32});
    for (uint32_t round = 0; round < 2; ++round) {
      hw::wait(s.finished, round ^ 1);  // the first passes: nobody has read yet
      if (p.flaw != kLeaderDoesNotFence || round == 0) hw::tcgen05_after_sync();
      hw::tcgen05_mma<CtaGroup::kTwo>(s.tmem.load(), tile, tile,
                                      hw::umma_instruction(256, kN, Major::kK, Major::kK), false);
      hw::tcgen05_commit_multicast<CtaGroup::kTwo>(s.arrived, kBothCtas);
    }
  }
  static void read(const Params& p, Smem& s) {
    for (uint32_t round = 0; round < 2; ++round) {
      uint32_t v[kN];
      hw::wait(s.arrived, round);
      hw::tcgen05_after_sync();
      hw::tmem_ld(hw::tmem_address(s.tmem.load(), hw::warp() * 32, 0), v);
      hw::tmem_wait_ld(v);
      CHECK(hw::as_float(v[kN - 1]) == 0);
      if (p.flaw != kOddDoesNotFence || hw::cta_rank() == 0) hw::tcgen05_before_sync();
      hw::arrive_at(hw::leader_address(hw::address(s.finished)));
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.arrived, 1);
      hw::barrier_init(s.finished, kReaders);
      hw::fence_barrier_init();
    }
    for (uint32_t i = static_cast<uint32_t>(hw::thread()) * 16; i < 4096; i += kThreads * 16) {
      hw::st_shared(hw::address(s.tile) + i, hw::Vec4{});
    }
    hw::fence_proxy_async();
    if (hw::warp() == kMmaWarp) {
      hw::warp_sync();
      hw::tmem_alloc<CtaGroup::kTwo>(s.tmem, kN);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::warp() != kMmaWarp) {
      read(p, s);
    } else if (hw::cta_rank() == 0 && hw::lane() == 0) {
      hw::tcgen05_after_sync();
      mma(p, s);
    }
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    if (hw::warp() == kMmaWarp) {
      hw::tcgen05_after_sync();
      hw::tmem_dealloc<CtaGroup::kTwo>(s.tmem.load(), kN);
    }
  }
};

TEST_CASE("tcgen05: an accumulator of a pair goes back and forth") {
  expect<PairHandsBack>({PairHandsBack::kNone}, {}, {.seeds = 9});
  expect<PairHandsBack>({PairHandsBack::kOddDoesNotFence},
                        {"cluster 0 cta 0 warp 4 lane 0 (mma, ", "tcgen05.mma: column ",
                         "of CTA 1 is still read or stored by warp 0"});
  expect<PairHandsBack>({PairHandsBack::kLeaderDoesNotFence},
                        {"tcgen05.mma after a wait without fence::after_thread_sync"});
}

// --- stores into TMEM ------------------------------------------------------------------------------------

/// Warps 0 ... 3 store an accumulator, which warp 4 adds a product to; or they read it back themselves.
struct StoreThenAdd : Kernel<5> {
  enum Flaw {
    kNone,
    kNoWaitSt,
    kWaitsForLoads,  // which are others
    kNoBefore,
    kNoAfterInMma,
    kNoSync,
    kReadsBack,
    kReadsBackUnwaited,
    kStoresAgainUnordered,  // over the product
    kStoresDuringProduct
  };
  static constexpr int kN = 32, kMmaWarp = 4;
  struct Params {
    Flaw flaw;
    hw::Global<const hw::Bf16> a, b;
    hw::Global<float> d;  // [128, 32]
  };
  struct Smem {
    hw::Buffer<128 * 32> a;
    hw::Buffer<kN * 32> b;
    hw::Barrier stored, arrived;
    hw::Cell<uint32_t> tmem;
  };
  static constexpr TileLayout kTileA = TwoProducts::kTileA, kTileB = TwoProducts::kTileB;

  static void mma(const Params& p, Smem& s) {
    if (p.flaw != kNoSync && p.flaw != kStoresDuringProduct) hw::wait(s.stored, 0);
    if (p.flaw != kNoAfterInMma) hw::tcgen05_after_sync();
    hw::tcgen05_mma<CtaGroup::kOne>(
        s.tmem.load(), hw::umma_operand(hw::address(s.a), kTileA.operand),
        hw::umma_operand(hw::address(s.b), kTileB.operand),
        hw::umma_instruction(128, kN, Major::kK, Major::kK), p.flaw != kStoresDuringProduct);
    hw::tcgen05_before_sync();
    hw::arrive(s.arrived);  // the product is under way, no more
    hw::tcgen05_commit<CtaGroup::kOne>(s.arrived);
  }
  static void store(const Params& p, Smem& s, uint32_t place) {
    uint32_t v[kN];
    for (int i = 0; i < kN; ++i) v[i] = hw::as_bits(static_cast<float>(hw::thread() * kN + i));
    hw::tmem_st(place, v);
    if (p.flaw == kReadsBack) hw::tmem_wait_st();
    if (p.flaw == kReadsBack || p.flaw == kReadsBackUnwaited) {
      uint32_t back[kN];
      hw::tmem_ld(place, back);
      hw::tmem_wait_ld(back);
      for (int i = 0; i < kN; ++i) CHECK(back[i] == v[i]);
    }
    if (p.flaw == kWaitsForLoads) hw::tmem_wait_ld(v);
    if (p.flaw != kNoWaitSt && p.flaw != kWaitsForLoads) hw::tmem_wait_st();
    if (p.flaw != kNoBefore) hw::tcgen05_before_sync();
    hw::arrive(s.stored);
  }
  static void read(const Params& p, uint32_t place) {
    uint32_t v[kN];
    hw::tmem_ld(place, v);
    hw::tmem_wait_ld(v);
    for (int i = 0; i < kN; ++i) hw::st(p.d + (hw::thread() * kN + i), hw::as_float(v[i]));
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.stored, 128);
      hw::barrier_init(s.arrived, 2 /* the product's issue and its commit */);
      hw::fence_barrier_init();
    }
    if (hw::warp() == kMmaWarp) hw::tmem_alloc<CtaGroup::kOne>(s.tmem, 32);
    store_tile(hw::address(s.a), kTileA, p.a, 0, kThreads);
    store_tile(hw::address(s.b), kTileB, p.b, 0, kThreads);
    hw::fence_proxy_async();
    hw::warp_sync();
    hw::cta_sync();
    const uint32_t place = hw::tmem_address(s.tmem.load(), hw::warp() % 4 * 32, 0);
    if (hw::warp() == kMmaWarp) {
      if (hw::lane() == 0) mma(p, s);
    } else {
      hw::tcgen05_after_sync();
      store(p, s, place);
      if (p.flaw == kStoresAgainUnordered) store(p, s, place);
      hw::wait(s.arrived, 0);
      hw::tcgen05_after_sync();
      read(p, place);
      hw::tcgen05_before_sync();
    }
    hw::warp_sync();
    hw::cta_sync();
    if (hw::warp() == kMmaWarp) {
      hw::tcgen05_after_sync();
      hw::tmem_dealloc<CtaGroup::kOne>(s.tmem.load(), 32);
    }
  }
};

Ran store_then_add(StoreThenAdd::Flaw flaw, uint64_t seed) {
  constexpr int kN = StoreThenAdd::kN;
  static const auto a = whole_numbers(5, 128 * 16), b = whole_numbers(6, kN * 16);
  static const auto product = plain_product(a, b, 128, kN, 16);
  World world;
  const StoreThenAdd::Params p{flaw, upload(world, "a", a), upload(world, "b", b),
                               world.filled("d", 128 * kN, 0.5F)};
  Ran ran{hw::launch<StoreThenAdd>(world, 1, p, {.seed = seed}), ""};
  const auto d = world.download(p.d, 128 * kN);
  for (size_t i = 0; i < d.size() && ran.wrong.empty(); ++i) {
    if (d[i] != product[i] + static_cast<float>(i)) ran.wrong = "d[" + std::to_string(i) + "]";
  }
  return ran;
}

TEST_CASE("tcgen05.st: an accumulator that warps have stored") {
  for (const auto flaw : {StoreThenAdd::kNone, StoreThenAdd::kReadsBack}) {
    for_seeds(9, [&](uint64_t seed) -> std::string {
      const Ran ran = store_then_add(flaw, seed);
      return ran.report.ok ? ran.wrong : ran.report.what;
    });
  }
}
TEST_CASE("tcgen05.st: what is missing is said") {
  struct Case {
    StoreThenAdd::Flaw flaw;
    Words words;
  };
  const Case cases[] = {
      {StoreThenAdd::kNoWaitSt,
       {"(mma, tcgen05_test.cpp:", "tcgen05.mma: column ", "is still read or stored by warp 0"}},
      {StoreThenAdd::kWaitsForLoads, {"tcgen05.mma: column ", "is still read or stored by warp 0"}},
      {StoreThenAdd::kNoBefore, {"tcgen05.mma: column ", "is still read or stored by warp 0"}},
      {StoreThenAdd::kNoAfterInMma, {"tcgen05.mma after a wait without fence::after_thread_sync"}},
      {StoreThenAdd::kNoSync, {"tcgen05."}},
      {StoreThenAdd::kStoresAgainUnordered, kAnything},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.flaw));
    for_seeds(9, [&](uint64_t seed) {
      return faults(store_then_add(each.flaw, seed).report, each.words);
    });
  }
  struct Sometimes {
    StoreThenAdd::Flaw flaw;
    std::string what;
  };
  for (const Sometimes& each :
       {Sometimes{StoreThenAdd::kReadsBackUnwaited,
                  "(CTA 0 warp 0): tcgen05.mma or tcgen05.st is still writing it"},
        {StoreThenAdd::kNoSync, "is accumulated on, and nothing was ever written there"},
        {StoreThenAdd::kStoresDuringProduct, "a product there is not committed"},
        {StoreThenAdd::kStoresDuringProduct,
         "nothing orders it after the product that wrote there"}}) {
    CAPTURE(each.what);
    on_some_seed(90, [&](uint64_t seed) {
      return faults(store_then_add(each.flaw, seed).report, {each.what}).empty();
    });
  }
}

TEST_CASE("tcgen05.st: while a product writes the same columns") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    const Ran ran = store_then_add(StoreThenAdd::kStoresDuringProduct, seed);
    return !ran.report.ok || !ran.wrong.empty() ? "" : "expected a fault or wrong values";
  });
}

/// Warp 0 stores what warp 4, which reaches the same lanes, loads.
struct StoreForOther : Kernel<5> {
  enum Flaw { kNone, kNoWaitSt, kNoBefore, kNoWait, kNoAfter };
  struct Params {
    Flaw flaw;
  };
  struct Smem {
    hw::Barrier stored;
    hw::Cell<uint32_t> tmem;
  };
  static void give(const Params& p, Smem& s) {
    uint32_t v[8];
    for (uint32_t i = 0; i < 8; ++i) v[i] = static_cast<uint32_t>(hw::lane()) * 100 + i;
    hw::tmem_st(s.tmem.load(), v);
    if (p.flaw != kNoWaitSt) hw::tmem_wait_st();
    if (p.flaw != kNoBefore) hw::tcgen05_before_sync();
    hw::arrive(s.stored);
  }
  static void take(const Params& p, Smem& s) {
    uint32_t v[8];
    if (p.flaw != kNoWait) hw::wait(s.stored, 0);
    if (p.flaw != kNoAfter) hw::tcgen05_after_sync();
    hw::tmem_ld(s.tmem.load(), v);
    hw::tmem_wait_ld(v);
    CHECK(v[7] == static_cast<uint32_t>(hw::lane()) * 100 + 7);
    hw::tcgen05_before_sync();
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) hw::barrier_init(s.stored, 32);
    if (hw::warp() == 2) hw::tmem_alloc<CtaGroup::kOne>(s.tmem, 32);
    hw::warp_sync();
    hw::cta_sync();
    hw::tcgen05_after_sync();
    if (hw::warp() == 0) give(p, s);
    if (hw::warp() == 4) take(p, s);
    hw::warp_sync();
    hw::cta_sync();
    hw::tcgen05_after_sync();
    if (hw::warp() == 2) hw::tmem_dealloc<CtaGroup::kOne>(s.tmem.load(), 32);
  }
};

TEST_CASE("tcgen05.st: for another warp that reaches the same lanes") {
  expect<StoreForOther>({StoreForOther::kNone}, {}, {.seeds = 9});
  for (const auto flaw :
       {StoreForOther::kNoWaitSt, StoreForOther::kNoBefore, StoreForOther::kNoWait}) {
    CAPTURE(static_cast<int>(flaw));
    expect<StoreForOther>({flaw}, {"tcgen05.ld of column ", "(CTA 0 warp 4): "});
  }
  expect<StoreForOther>({StoreForOther::kNoAfter},
                        {"tcgen05.ld after a wait without fence::after_thread_sync"});
}

// --- allocation, addresses, descriptors ------------------------------------------------------------------

/// One instruction that must not be, by warp 1 of a CTA with 64 columns.
template <int kCtaCount>
struct Misuse : Kernel<2, kCtaCount> {
  enum Act {
    kNone,
    kAllocNoPowerOfTwo,
    kAllocTooFew,
    kAllocTooMany,
    kAllocAfterRelinquish,
    kAllocNoRoom,
    kDeallocOther,
    kDeallocElsewhere,
    kDeallocTwice,
    kOtherGroup,
    kGroupOfOne,
    kOddCta,
    kForeignLanes,
    kNotAllocated,
    kBeyondColumns,
    kReadsUnwritten,
    kAddressesDiffer,
    kStoresForeignLanes,
    kStoresNotAllocated,
    kProductNotAllocated,
    kProductBeyondColumns,
    kProductAtLane,
    kProductOnUnwritten,
    kCommitToNobody,
    kCommitTooFar,
    kDescribed
  };
  struct Params {
    Act act;
    uint64_t a = 0, b = 0;  // what is added to the descriptors
    uint32_t instruction = 0;
  };
  struct Smem {
    hw::Buffer<4096> tile;
    hw::Barrier done;
    hw::Cell<uint32_t> tmem, more;
  };
  static void describe(hw::Names& names) {
    names.add("tile", &Smem::tile);
    names.add("done", &Smem::done);
  }
  static constexpr CtaGroup kGroup = kCtaCount == 2 ? CtaGroup::kTwo : CtaGroup::kOne;
  static constexpr CtaGroup kOther = kCtaCount == 2 ? CtaGroup::kOne : CtaGroup::kTwo;
  static constexpr uint32_t kTake = 64;

  static void product(const Params& p, Smem& s, uint32_t d, bool accumulate) {
    if (hw::lane() != 0) return;
    const uint64_t tile = hw::umma_operand(
        hw::address(s.tile), {.leading_bytes = 16, .stride_bytes = 256, .swizzle = Swizzle::k32});
    const uint32_t instruction =
        p.instruction != 0 ? p.instruction : hw::umma_instruction(128, 64, Major::kK, Major::kK);
    hw::tcgen05_mma<kGroup>(d, tile + p.a, tile + p.b, instruction, accumulate);
    hw::tcgen05_commit<kGroup>(s.done);
    hw::wait(s.done, 0);
    hw::tcgen05_after_sync();
  }
  static void load(uint32_t address) {
    uint32_t v[32];
    hw::tmem_ld(address, v);
    hw::tmem_wait_ld(v);
  }
  static void store(uint32_t address) {
    const uint32_t v[32] = {};
    hw::tmem_st(address, v);
    hw::tmem_wait_st();
  }
  static void act(const Params& p, Smem& s) {
    const uint32_t tmem = s.tmem.load();
    const uint32_t mine = hw::tmem_address(tmem, 32, 0);  // lanes 32 ... 63: of warp 1
    const uint32_t free = (tmem + 64) % 512;
    switch (p.act) {
      case kNone:
        return;
      case kAllocNoPowerOfTwo:
        return hw::tmem_alloc<kGroup>(s.more, 48);
      case kAllocTooFew:
        return hw::tmem_alloc<kGroup>(s.more, 16);
      case kAllocTooMany:
        return hw::tmem_alloc<kGroup>(s.more, 1024);
      case kAllocAfterRelinquish:
        hw::tmem_relinquish<kGroup>();
        return hw::tmem_alloc<kGroup>(s.more, 32);
      case kAllocNoRoom:
        return hw::tmem_alloc<kGroup>(s.more, 512);
      case kDeallocOther:
        return hw::tmem_dealloc<kGroup>(tmem, 32);
      case kDeallocElsewhere:
        return hw::tmem_dealloc<kGroup>(tmem + 32, 64);
      case kDeallocTwice:
        hw::tmem_dealloc<kGroup>(tmem, kTake);
        return hw::tmem_dealloc<kGroup>(tmem, kTake);
      case kOtherGroup:
      case kGroupOfOne:
        return hw::tmem_relinquish<kOther>();
      case kOddCta:
        return;  // below: by the other CTA
      case kForeignLanes:
        return load(tmem);
      case kNotAllocated:
        return load(hw::tmem_address(free, 32, 0));
      case kBeyondColumns:
        return load(hw::tmem_address(0, 32, 500));
      case kReadsUnwritten:
        return load(mine);
      case kAddressesDiffer:
        return load(mine + (hw::lane() == 5 ? 8 : 0));
      case kStoresForeignLanes:
        return store(hw::tmem_address(tmem, 64, 0));
      case kStoresNotAllocated:
        return store(hw::tmem_address(free, 32, 0));
      case kProductNotAllocated:
        return product(p, s, free, false);
      case kProductBeyondColumns:
        return product(p, s, 480, false);
      case kProductAtLane:
        return product(p, s, mine, false);
      case kProductOnUnwritten:
        return product(p, s, tmem, true);
      case kCommitToNobody:
        return hw::tcgen05_commit_multicast<kGroup>(s.done, 0);
      case kCommitTooFar:
        return hw::tcgen05_commit_multicast<kGroup>(s.done, 0b100);
      case kDescribed:
        return product(p, s, tmem, false);
    }
  }
  static void run(const Params& p, Smem& s) {
    if (hw::thread() == 0) {
      hw::barrier_init(s.done, 1);
      hw::fence_barrier_init();
    }
    const uint32_t tile = hw::address(s.tile);
    for (uint32_t i = static_cast<uint32_t>(hw::thread()) * 16; i < 4096;
         i += Misuse::kThreads * 16) {
      hw::st_shared(tile + i, hw::Vec4{});
    }
    hw::fence_proxy_async();
    if (hw::warp() == 1) hw::tmem_alloc<kGroup>(s.tmem, kTake);
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    hw::tcgen05_after_sync();
    if (hw::warp() == 1 && hw::cta_rank() == 0) act(p, s);
    if (p.act == kOddCta && hw::cta_rank() == 1 && hw::warp() == 1)
      product(p, s, s.tmem.load(), false);
    hw::tcgen05_before_sync();
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    hw::tcgen05_after_sync();
    if (hw::warp() == 1) hw::tmem_dealloc<kGroup>(s.tmem.load(), kTake);
  }
};
using One = Misuse<1>;
using Two = Misuse<2>;

TEST_CASE("tcgen05: one instruction that must not be") {
  struct Case {
    One::Act act;
    Words words;
  };
  const Case cases[] = {
      {One::kNone, {}},
      {One::kDescribed, {}},
      {One::kAllocNoPowerOfTwo,
       {"cluster 0 cta 0 warp 1 ", "(act, tcgen05_test.cpp:",
        "tcgen05.alloc of 48 columns: expected a power of two in 32..512"}},
      {One::kAllocTooFew, {"tcgen05.alloc of 16 columns: expected a power of two in 32..512"}},
      {One::kAllocTooMany, {"tcgen05.alloc of 1024 columns: expected a power of two in 32..512"}},
      {One::kAllocAfterRelinquish, {"tcgen05.alloc after relinquish_alloc_permit"}},
      {One::kAllocNoRoom, {"tcgen05.alloc of 512 columns: CTA 0 has no room for them"}},
      {One::kDeallocOther, {"tcgen05.dealloc of 32 columns at 0x", "which were not allocated so"}},
      {One::kDeallocElsewhere,
       {"tcgen05.dealloc of 64 columns at 0x", "which were not allocated so"}},
      {One::kDeallocTwice, {"tcgen05.dealloc of 64 columns at 0x", "which were not allocated so"}},
      {One::kGroupOfOne, {"tcgen05.relinquish_alloc_permit: cta_group::2 in a cluster of one CTA"}},
      {One::kForeignLanes,
       {"tcgen05.ld: warp 1 reaches lanes 32 to 63 of TMEM, the address says lane 0"}},
      {One::kStoresForeignLanes,
       {"tcgen05.st: warp 1 reaches lanes 32 to 63 of TMEM, the address says lane 64"}},
      {One::kNotAllocated, {"tcgen05.ld: column ", " of CTA 0 is not allocated"}},
      {One::kStoresNotAllocated, {"tcgen05.st: column ", " of CTA 0 is not allocated"}},
      {One::kBeyondColumns, {"tcgen05.ld: 32 columns at column 500"}},
      {One::kReadsUnwritten,
       {"tcgen05.ld of column ", " (CTA 0 warp 1): nothing was ever written there"}},
      {One::kAddressesDiffer, {"tcgen05.ld: the lanes of the warp disagree on the operand"}},
      {One::kProductNotAllocated, {"tcgen05.mma: column ", "of CTA 0 is not allocated"}},
      {One::kProductBeyondColumns, {"tcgen05.mma: an accumulator of 64 columns at column 480"}},
      {One::kProductAtLane, {"tcgen05.mma: accumulator 0x0020", "its lane must be 0"}},
      {One::kProductOnUnwritten,
       {"tcgen05.mma: column ", "is accumulated on, and nothing was ever written there"}},
      {One::kCommitToNobody, {"tcgen05.commit: multicast mask 0x0 in a cluster of 1"}},
      {One::kCommitTooFar, {"tcgen05.commit: multicast mask 0x4 in a cluster of 1"}},
  };
  for (const Case& each : cases) {
    CAPTURE(static_cast<int>(each.act));
    expect<One>({each.act}, each.words, {.seeds = 3});
  }
  expect<Two>({Two::kNone}, {});
  expect<Two>({Two::kDescribed}, {});
  expect<Two>({Two::kOtherGroup},
              {"tcgen05.relinquish_alloc_permit: cta_group::1 in a CTA that has "
               "used cta_group::2"});
  expect<Two>({Two::kOddCta}, {"cluster 0 cta 1 warp 1 lane 0 (product, tcgen05_test.cpp:",
                               "tcgen05.mma cta_group::2 issued by the odd CTA of a pair"});
  expect<Two>({Two::kCommitTooFar}, {"tcgen05.commit: multicast mask 0x4 in a cluster of 2"});
}

TEST_CASE("tcgen05: operand descriptors, field by field") {
  using D = hw::UmmaOperand;
  struct Case {
    uint64_t added;
    std::string what;
  };
  const Case cases[] = {
      {0ULL - D::Version::put(1), "version (bits 46-48) is 0, it must be 1"},
      {D::Version::put(1), "version (bits 46-48) is 2, it must be 1"},
      {D::Absolute::put(1), "leading offset mode is absolute, which the model does not know"},
      {1ULL << 14, "reserved bits 0x0000000000004000 are set"},
      {1ULL << 53 | 1ULL << 60, "reserved bits 0x1020000000000000 are set"},
      {1ULL << 61, "swizzle is 7; 0, 2, 4 and 6 exist here"},
      {0ULL - D::SwizzleMode::put(5), "swizzle is 1; 0, 2, 4 and 6 exist here"},
      {D::Start::put(128 >> 4),
       "start 0x480 lies 1 rows of 128 bytes into the swizzle's pattern, base offset is 0"},
      {D::Base::put(1), "start 0x400 lies 0 rows of 128 bytes"},
  };
  for (const Case& each : cases) {
    CAPTURE(each.what);
    expect<One>({One::kDescribed, each.added, 0}, {"tcgen05.mma A: descriptor 0x", each.what},
                {.seeds = 2});
    expect<Two>({Two::kDescribed, 0, each.added}, {"tcgen05.mma B: descriptor 0x", each.what},
                {.seeds = 2});
  }
  expect<One>({One::kDescribed, 8192 >> 4, 0},
              {"tcgen05.mma A: bytes 0x2400 to 0x2402 are outside"});
}

TEST_CASE("tcgen05: instruction descriptors, field by field") {
  using D = hw::UmmaInstruction;
  const auto shape = [](int m, int n) { return hw::umma_instruction(m, n, Major::kK, Major::kK); };
  const uint32_t good = shape(128, 64);
  const auto with = [&](uint64_t bits) { return good ^ static_cast<uint32_t>(bits); };
  struct Case {
    uint32_t instruction;
    std::string what;
  };
  const Case cases[] = {
      {with(D::Sparse::put(1)),
       "bits 0x00000004: sparse, saturating, negated and shifted products"},
      {with(D::Saturate::put(1)), "bits 0x00000008: "},
      {with(D::NegateA::put(1) | D::NegateB::put(1)), "bits 0x00006000: "},
      {with(1U << 23 | 1U << 29), "bits 0x20800000: "},
      {with(3U << 30), "bits 0xc0000000: "},
      {with(D::D::put(1)), "D is not f32"},
      {with(D::A::put(1)), "A or B is not bf16"},
      {with(D::B::put(3)), "A or B is not bf16"},
  };
  for (const Case& each : cases) {
    CAPTURE(each.what);
    expect<One>({One::kDescribed, 0, 0, each.instruction},
                {"tcgen05.mma: instruction descriptor 0x", each.what}, {.seeds = 2});
  }
  const auto refused = [&](CtaGroup group, int m, int n) {
    const std::string what =
        "M = " + std::to_string(m) + ", N = " + std::to_string(n) +
        " do not exist for cta_group::" + std::to_string(static_cast<int>(group));
    if (group == CtaGroup::kOne) {
      expect<One>({One::kDescribed, 0, 0, shape(m, n)}, {what}, {.seeds = 1});
    } else {
      expect<Two>({Two::kDescribed, 0, 0, shape(m, n)}, {what}, {.seeds = 1});
    }
  };
  refused(CtaGroup::kOne, 32, 64);
  refused(CtaGroup::kOne, 256, 64);
  refused(CtaGroup::kOne, 128, 24);
  refused(CtaGroup::kOne, 128, 8);
  refused(CtaGroup::kOne, 64, 0);
  refused(CtaGroup::kOne, 64, 264);
  refused(CtaGroup::kTwo, 64, 64);
  refused(CtaGroup::kTwo, 128, 16);
  refused(CtaGroup::kTwo, 256, 48);
}

/// Three allocations, freed in another order; their places depend on the seed.
struct Allocate : Kernel<1, 2> {
  struct Params {
    hw::Global<uint32_t> bases;  // [2 CTAs, 3]
  };
  struct Smem {
    hw::Cell<uint32_t> at[3];
  };
  static void run(const Params& p, Smem& s) {
    constexpr uint32_t kTake[3] = {64, 128, 32};
    for (int i = 0; i < 3; ++i) hw::tmem_alloc<CtaGroup::kTwo>(s.at[i], kTake[i]);
    hw::tmem_relinquish<CtaGroup::kTwo>();
    hw::warp_sync();
    if (hw::lane() < 3)
      hw::st(p.bases + (hw::cta_rank() * 3 + hw::lane()), s.at[hw::lane()].load());
    hw::warp_sync();
    for (const int i : {1, 0, 2}) hw::tmem_dealloc<CtaGroup::kTwo>(s.at[i].load(), kTake[i]);
  }
};

TEST_CASE("tcgen05.alloc: anywhere, without overlap, at the same place in both CTAs") {
  std::set<uint32_t> first;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    World world;
    const Allocate::Params p{world.allocate<uint32_t>("bases", 6)};
    const Report report = hw::launch<Allocate>(world, 1, p, {.seed = seed});
    REQUIRE_MESSAGE(report.ok, report.what);
    const auto bases = world.download(p.bases, 6);
    std::set<uint32_t> columns;
    for (int i = 0; i < 3; ++i) {
      constexpr uint32_t kTake[3] = {64, 128, 32};
      const auto at = static_cast<size_t>(i);
      CHECK(bases[at] == bases[at + 3]);
      for (uint32_t c = 0; c < kTake[i]; ++c) columns.insert(bases[at] + c);
    }
    CHECK(columns.size() == 224);
    CHECK(*columns.rbegin() < 512);
    first.insert(bases[0]);
  }
  CHECK(first.size() > 3);
}

/// The CTAs of a pair do not free the same columns before they take others.
struct AllocateApart : Kernel<1, 2> {
  struct Smem {
    hw::Cell<uint32_t> first, second;
  };
  static void run(const Params&, Smem& s) {
    hw::tmem_alloc<CtaGroup::kTwo>(s.first, 256);
    hw::warp_sync();
    if (hw::cta_rank() == 0) hw::tmem_dealloc<CtaGroup::kTwo>(s.first.load(), 256);
    hw::cluster_arrive();
    hw::cluster_wait();
    hw::tmem_alloc<CtaGroup::kTwo>(s.second, 256);
    hw::warp_sync();
    if (hw::cta_rank() == 1) hw::tmem_dealloc<CtaGroup::kTwo>(s.first.load(), 256);
    hw::tmem_dealloc<CtaGroup::kTwo>(s.second.load(), 256);
  }
};

TEST_CASE("tcgen05.alloc: CTAs of a pair free and take the same columns") {
  on_some_seed(40, [](uint64_t seed) {
    World world;
    return faults(hw::launch<AllocateApart>(world, 1, {}, {.seed = seed}),
                  {"cluster 0 cta 1",
                   "tcgen05.alloc of 256 columns: the CTAs of the pair have "
                   "different columns free"})
        .empty();
  });
}

/// The odd CTA gives its columns back and leaves, whatever the even one does with them.
struct PeerLeaves : Kernel<1, 2> {
  struct Smem {
    hw::Buffer<4096> tile;
    hw::Barrier done;
    hw::Cell<uint32_t> tmem;
  };
  static void multiply(Smem& s, uint32_t tmem) {
    const uint64_t tile = hw::umma_operand(
        hw::address(s.tile), {.leading_bytes = 16, .stride_bytes = 256, .swizzle = Swizzle::k32});
    hw::tcgen05_mma<CtaGroup::kTwo>(tmem, tile, tile,
                                    hw::umma_instruction(256, 32, Major::kK, Major::kK), false);
    hw::tcgen05_commit<CtaGroup::kTwo>(s.done);
    hw::wait(s.done, 0);
    hw::tcgen05_after_sync();
  }
  static void run(const Params&, Smem& s) {
    if (hw::lane() == 0) {
      hw::barrier_init(s.done, 1);
      hw::fence_barrier_init();
    }
    for (uint32_t i = static_cast<uint32_t>(hw::lane()) * 16; i < 4096; i += 512) {
      hw::st_shared(hw::address(s.tile) + i, hw::Vec4{});
    }
    hw::fence_proxy_async();
    hw::warp_sync();
    hw::tmem_alloc<CtaGroup::kTwo>(s.tmem, 32);
    hw::warp_sync();
    hw::cluster_arrive();
    hw::cluster_wait();
    hw::tcgen05_after_sync();
    if (hw::cta_rank() == 0 && hw::lane() == 0) multiply(s, s.tmem.load());
    hw::warp_sync();
    hw::tmem_dealloc<CtaGroup::kTwo>(s.tmem.load(), 32);
  }
};

TEST_CASE("tcgen05: a pair lives together") {
  for (const std::string what :
       {"tcgen05.mma: CTA 1 of the pair has exited", "while tcgen05.mma or tcgen05.st writes it"}) {
    CAPTURE(what);
    on_some_seed(90, [&](uint64_t seed) {
      World world;
      return faults(hw::launch<PeerLeaves>(world, 1, {}, {.seed = seed}), {what}).empty();
    });
  }
}

}  // namespace
}  // namespace logitless::model_test
