// SPDX-License-Identifier: Apache-2.0
// Where things lie: swizzled tiles in shared memory, accumulators in registers and in TMEM.
// Checked against CuTe's layouts in tests/model/cute.
#pragma once

#include "cuda/hw/descriptors.h"

namespace hw {

/// The shared-memory address where byte `address` of an unswizzled tile lies; the pattern repeats
/// every 1024, 512 or 256 bytes of the address itself.
HW_BOTH uint32_t swizzled(uint32_t address, Swizzle swizzle = Swizzle::k128) {
  const uint32_t rows = swizzle == Swizzle::k128  ? 7
                        : swizzle == Swizzle::k64 ? 3
                        : swizzle == Swizzle::k32 ? 1
                                                  : 0;
  return address ^ ((address >> 7 & rows) << 4);
}

/// Bytes of one row of the swizzle's pattern.
HW_BOTH uint32_t swizzle_bytes(Swizzle swizzle) {
  return swizzle == Swizzle::k128  ? 128
         : swizzle == Swizzle::k64 ? 64
         : swizzle == Swizzle::k32 ? 32
                                   : 16;
}

/// Element (mn, k) of a bf16 operand, in bytes from its start, before swizzling. One instruction
/// takes k = 0..15.
///   K-major:  rows of swizzle_bytes; eight rows make a group, groups are stride_bytes apart.
///   MN-major: `width` = swizzle_bytes / 2 elements of mn make a row, one row per k; eight rows make a
///             group, groups of k are stride_bytes apart, the next `width` of mn leading_bytes on.
///   Without swizzle the cells of 16 bytes are free: see docs/device-model.md.
HW_BOTH uint32_t operand_offset(Major major, OperandLayout layout, int mn, int k) {
  const uint32_t row_bytes = swizzle_bytes(layout.swizzle);
  const auto umn = static_cast<uint32_t>(mn), uk = static_cast<uint32_t>(k);
  if (major == Major::kK) {
    const uint32_t cells = row_bytes / 2;  // elements of k in one row
    return umn / 8 * layout.stride_bytes + umn % 8 * row_bytes + uk / cells * layout.leading_bytes +
           uk % cells * 2;
  }
  const uint32_t width = row_bytes / 2;
  if (layout.swizzle == Swizzle::kNone) {  // here the two offsets change their roles
    return umn / width * layout.stride_bytes + uk / 8 * layout.leading_bytes + uk % 8 * row_bytes +
           umn % width * 2;
  }
  return umn / width * layout.leading_bytes + uk / 8 * layout.stride_bytes + uk % 8 * row_bytes +
         umn % width * 2;
}

/// wgmma m64nNk16, f32 accumulator: where value `v` of thread `t` (0..127 in its warpgroup) lies
/// (PTX ISA, "Register fragments" of wgmma).
HW_BOTH int wgmma_row(int t, int v) { return 16 * (t / 32) + t % 32 / 4 + 8 * (v / 2 % 2); }
HW_BOTH int wgmma_column(int t, int v) { return 8 * (v / 4) + 2 * (t % 4) + v % 2; }

/// Where element (m, n) of a tcgen05 accumulator lies: the CTA of the pair, the TMEM lane, the column
/// (PTX ISA, "Data path layout organization").
struct TmemPlace {
  int cta, lane, column;
};
HW_BOTH TmemPlace tmem_place(CtaGroup group, int rows, int columns, int m, int n) {
  if (group == CtaGroup::kOne) {
    return rows == 128 ? TmemPlace{0, m, n} : TmemPlace{0, m / 16 * 32 + m % 16, n};
  }
  if (rows == 256) return {m / 128, m % 128, n};
  return {m / 64, m % 64 + (n >= columns / 2 ? 64 : 0), n % (columns / 2)};
}

/// A TMEM address: lane in the upper half, column in the lower.
HW_BOTH uint32_t tmem_address(uint32_t base, int lane, int column) {
  return base + (static_cast<uint32_t>(lane) << 16) + static_cast<uint32_t>(column);
}

}  // namespace hw
