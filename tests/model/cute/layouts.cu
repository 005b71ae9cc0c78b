// SPDX-License-Identifier: Apache-2.0
// hw/layouts.h and hw/descriptors.h against CuTe, place for place and bit for bit: two descriptions of
// the same hardware, written independently. Host code only; no GPU is needed.
//
// Prints what differs, then `0 of N places differ`. Arguments: --break makes one place of each table
// wrong, to show that a difference would be seen.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <string>

#include "cuda/hw/descriptors.h"
#include "cuda/hw/layouts.h"

namespace {

using cute::bfloat16_t;
using cute::Int;
using cute::Shape;
using hw::Major;
using hw::OperandLayout;
using hw::Swizzle;

const char* name(Swizzle swizzle) {
  return swizzle == Swizzle::k128  ? "128 B"
         : swizzle == Swizzle::k64 ? "64 B"
         : swizzle == Swizzle::k32 ? "32 B"
                                   : "none";
}
const char* name(Major major) { return major == Major::kK ? "K-major" : "MN-major"; }

/// Counts the places of all tables, and those where the two sides differ.
class Comparison {
 public:
  explicit Comparison(bool broken) : broken_(broken) {}

  void table(const std::string& what) {
    what_ = what;
    first_ = true;
    shown_ = 0;
  }
  void same(uint64_t ours, uint64_t theirs, int i, int j = 0) {
    if (broken_ && first_) ours ^= 1;
    first_ = false;
    ++places_;
    if (ours == theirs) return;
    ++differ_;
    if (shown_++ < 3) {
      std::printf("%s [%d][%d]: expected 0x%llx, got 0x%llx\n", what_.c_str(), i, j,
                  static_cast<unsigned long long>(theirs), static_cast<unsigned long long>(ours));
    }
  }
  int result() const {
    std::printf("%d of %d places differ\n", differ_, places_);
    return differ_ == 0 ? 0 : 1;
  }

 private:
  bool broken_;
  std::string what_;
  bool first_ = true;
  int shown_ = 0, places_ = 0, differ_ = 0;
};

// --- operands in shared memory -----------------------------------------------------------------------

template <Major kMajor, Swizzle kSwizzle>
auto atom() {
  constexpr auto kTheirs = kMajor == Major::kK ? cute::GMMA::Major::K : cute::GMMA::Major::MN;
  if constexpr (kSwizzle == Swizzle::k128) {
    return cute::GMMA::Layout_SW128_Atom<bfloat16_t, kTheirs>{};
  } else if constexpr (kSwizzle == Swizzle::k64) {
    return cute::GMMA::Layout_SW64_Atom<bfloat16_t, kTheirs>{};
  } else if constexpr (kSwizzle == Swizzle::k32) {
    return cute::GMMA::Layout_SW32_Atom<bfloat16_t, kTheirs>{};
  } else {
    return cute::GMMA::Layout_INTER_Atom<bfloat16_t, kTheirs>{};
  }
}

/// The offsets between the parts of a tile of kMn x kK that is made of CuTe's atoms, down mn first.
template <Major kMajor, Swizzle kSwizzle, int kMn, int kK>
constexpr OperandLayout tiled() {
  constexpr uint32_t kRow = hw::swizzle_bytes(kSwizzle), kWidth = kRow / 2;
  if constexpr (kMajor == Major::kK) {
    // One atom: eight rows of kRow bytes. Beside it in k: past all of mn.
    return {kSwizzle == Swizzle::kNone ? kMn * kRow : 16, 8 * kRow, kSwizzle};
  } else if constexpr (kSwizzle == Swizzle::kNone) {
    return {kMn / kWidth * 8 * kRow, 8 * kRow, kSwizzle};
  } else {
    return {8 * kRow, kMn / kWidth * 8 * kRow, kSwizzle};
  }
}

template <Major kMajor, Swizzle kSwizzle, int kMn, int kK>
void compare_tile(Comparison& c) {
  const auto tile = cute::as_position_independent_swizzle_layout(
      cute::tile_to_shape(atom<kMajor, kSwizzle>(), Shape<Int<kMn>, Int<kK>>{}));
  c.table(std::string("tile, ") + name(kMajor) + ", swizzle " + name(kSwizzle));
  constexpr OperandLayout kLayout = tiled<kMajor, kSwizzle, kMn, kK>();
  // What one instruction reads: 16 of k. Further on in k the operand's start is advanced.
  constexpr int kAtomK = kMajor == Major::kK ? int{hw::swizzle_bytes(kSwizzle)} / 2 : 8;
  for (int k = 0; k < kK; ++k) {
    for (int mn = 0; mn < kMn; ++mn) {
      const int start = kAtomK < 16 ? k / 16 * 16 : k / kAtomK * kAtomK;
      const uint32_t base = static_cast<uint32_t>(tile(0, start)) * 2;
      const uint32_t ours =
          hw::swizzled(base + hw::operand_offset(kMajor, kLayout, mn, k - start), kSwizzle);
      c.same(ours, static_cast<uint32_t>(tile(mn, k)) * 2, mn, k);
    }
  }
}

/// CuTe remarks on standard output that a host has no shared memory: not while one of these lives.
class Quiet {
 public:
  Quiet() : kept_(dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    close(nowhere);
  }
  ~Quiet() {
    std::fflush(stdout);
    dup2(kept_, STDOUT_FILENO);
    close(kept_);
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  int kept_;
};

/// The descriptors of the first 16 of k, of a tile at address 0.
template <Major kMajor, Swizzle kSwizzle, int kMn, int kK>
void compare_operands(Comparison& c) {
  constexpr auto kGmma = kMajor == Major::kK ? cute::GMMA::Major::K : cute::GMMA::Major::MN;
  constexpr auto kUmma = kMajor == Major::kK ? cute::UMMA::Major::K : cute::UMMA::Major::MN;
  const auto layout = cute::tile_to_shape(atom<kMajor, kSwizzle>(), Shape<Int<kMn>, Int<kK>>{});
  const auto tile = cute::make_tensor(cute::make_smem_ptr<bfloat16_t>(nullptr), layout);
  const auto first = cute::local_tile(tile, Shape<Int<kMn>, Int<16>>{}, cute::make_coord(0, 0));
  uint64_t gmma, umma;
  {
    const Quiet quiet;
    gmma = cute::SM90::GMMA::make_gmma_desc<kGmma>(first);
    umma = cute::UMMA::make_umma_desc<kUmma>(first);
  }
  constexpr OperandLayout kLayout = tiled<kMajor, kSwizzle, kMn, kK>();
  const std::string what = std::string(name(kMajor)) + ", swizzle " + name(kSwizzle);
  c.table("wgmma operand, " + what);
  c.same(hw::wgmma_operand(0, kLayout), gmma, kMn, kK);
  c.table("tcgen05 operand, " + what);
  c.same(hw::umma_operand(0, kLayout), umma, kMn, kK);
}

template <Major kMajor, Swizzle kSwizzle>
void compare_operand(Comparison& c) {
  compare_tile<kMajor, kSwizzle, 128, 64>(c);
  compare_tile<kMajor, kSwizzle, 256, 128>(c);
  compare_operands<kMajor, kSwizzle, 128, 64>(c);
  compare_operands<kMajor, kSwizzle, 256, 64>(c);
}
template <Major kMajor>
void compare_major(Comparison& c) {
  compare_operand<kMajor, Swizzle::kNone>(c);
  compare_operand<kMajor, Swizzle::k32>(c);
  compare_operand<kMajor, Swizzle::k64>(c);
  compare_operand<kMajor, Swizzle::k128>(c);
}

// --- accumulators ------------------------------------------------------------------------------------

template <int kN>
void compare_fragment(Comparison& c) {
  const cute::SM90::GMMA::CLayout_64xN<kN> theirs;  // (thread, value) -> m + 64 n
  c.table("wgmma fragment, N " + std::to_string(kN));
  for (int t = 0; t < 128; ++t) {
    for (int v = 0; v < kN / 2; ++v) {
      c.same(hw::wgmma_row(t, v) + 64 * hw::wgmma_column(t, v), theirs(t, v), t, v);
    }
  }
}

/// kM x kN elements of an accumulator, of which each CTA holds kM / kCtas rows.
template <int kCtas, int kM, int kN>
void compare_accumulator(Comparison& c) {
  constexpr auto kGroup = kCtas == 1 ? hw::CtaGroup::kOne : hw::CtaGroup::kTwo;
  constexpr int kRows = kM / kCtas;
  using Fragment =
      cute::UMMA::tmem_frg<float, float, kCtas, cute::UMMA::TmemAllocMode::Interleaved>;
  const auto theirs = Fragment::make(Shape<Shape<Int<kRows>, Int<kN>>, Int<1>, Int<1>>{}).layout();
  c.table("accumulator, " + std::to_string(kCtas) + " CTA, " + std::to_string(kM) + " x " +
          std::to_string(kN));
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      const hw::TmemPlace place = hw::tmem_place(kGroup, kM, kN, m, n);
      const uint64_t ours =
          uint64_t(place.cta) << 32 | hw::tmem_address(0, place.lane, place.column);
      const uint32_t address = theirs(cute::make_coord(cute::make_coord(m % kRows, n), 0, 0));
      c.same(ours, uint64_t(m / kRows) << 32 | address, m, n);
    }
  }
}
/// Which CTA of a pair holds which rows is the instruction's to say.
template <int kM, int kN>
void compare_pair(Comparison& c) {
  using Instruction = cute::SM100_MMA_F16BF16_2x1SM_SS<bfloat16_t, bfloat16_t, float, kM, kN,
                                                       cute::UMMA::Major::K, cute::UMMA::Major::K>;
  const typename cute::MMA_Traits<Instruction>::CLayout rows;  // (cta, (m, n)) -> m + kM n
  c.table("rows of a pair, " + std::to_string(kM) + " x " + std::to_string(kN));
  for (int cta = 0; cta < 2; ++cta) {
    for (int i = 0; i < kM / 2; ++i) {
      const int m = rows(cta, cute::make_coord(i, 0));
      c.same(hw::tmem_place(hw::CtaGroup::kTwo, kM, kN, m, 0).cta, cta, cta, i);
    }
  }
}

// --- instructions ------------------------------------------------------------------------------------

template <int kM, int kN, cute::UMMA::Major kA, cute::UMMA::Major kB>
void compare_instruction(Comparison& c) {
  const auto ours =
      hw::umma_instruction(kM, kN, kA == cute::UMMA::Major::K ? Major::kK : Major::kMn,
                           kB == cute::UMMA::Major::K ? Major::kK : Major::kMn);
  const auto theirs = cute::UMMA::make_instr_desc<bfloat16_t, bfloat16_t, float, kM, kN, kA, kB>();
  c.same(ours, static_cast<uint32_t>(theirs), kM, kN);
}
template <int kM, int kN>
void compare_instructions(Comparison& c) {
  using cute::UMMA::Major;
  c.table("instruction");
  compare_instruction<kM, kN, Major::K, Major::K>(c);
  compare_instruction<kM, kN, Major::K, Major::MN>(c);
  compare_instruction<kM, kN, Major::MN, Major::K>(c);
  compare_instruction<kM, kN, Major::MN, Major::MN>(c);
}

}  // namespace

int main(int argc, char** argv) {
  Comparison c(argc > 1 && std::strcmp(argv[1], "--break") == 0);

  compare_major<Major::kK>(c);
  compare_major<Major::kMn>(c);

  compare_fragment<64>(c);
  compare_fragment<128>(c);
  compare_fragment<192>(c);
  compare_fragment<256>(c);

  compare_accumulator<1, 64, 64>(c);
  compare_accumulator<1, 64, 256>(c);
  compare_accumulator<1, 128, 96>(c);
  compare_accumulator<1, 128, 256>(c);
  compare_accumulator<2, 128, 64>(c);
  compare_accumulator<2, 128, 256>(c);
  compare_accumulator<2, 256, 160>(c);
  compare_accumulator<2, 256, 256>(c);
  compare_pair<128, 256>(c);
  compare_pair<256, 256>(c);

  compare_instructions<64, 8>(c);
  compare_instructions<64, 256>(c);
  compare_instructions<128, 16>(c);
  compare_instructions<128, 96>(c);
  compare_instructions<128, 256>(c);
  compare_instructions<256, 32>(c);
  compare_instructions<256, 160>(c);
  compare_instructions<256, 256>(c);

  return c.result();
}
