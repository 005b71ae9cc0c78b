// SPDX-License-Identifier: Apache-2.0
// Descriptors of the tensor cores, field by field. Kernels build them, the model takes them apart.
#pragma once

#include "cuda/hw/types.h"

namespace hw {

/// How a tile's 16-byte cells are permuted in shared memory.
enum class Swizzle { kNone, k32, k64, k128 };

/// Bits [first, first + bits) of a descriptor.
struct Field {
  int first, bits;
  HW_BOTH uint64_t mask() const { return (uint64_t{1} << bits) - 1; }
  HW_BOTH uint64_t put(uint64_t value) const { return (value & mask()) << first; }
  HW_BOTH uint64_t get(uint64_t word) const { return word >> first & mask(); }
};

/// Shared-memory operand of wgmma (PTX ISA, "Matrix descriptor format" of wgmma).
struct WgmmaOperand {
  static constexpr Field kStart{0, 14};     // address / 16
  static constexpr Field kLeading{16, 14};  // leading dimension byte offset / 16
  static constexpr Field kStride{32, 14};   // stride dimension byte offset / 16
  static constexpr Field kBase{49, 3};      // base offset of the swizzle pattern
  static constexpr Field kSwizzle{62, 2};   // 0 none, 1 128 B, 2 64 B, 3 32 B

  static HW_BOTH uint64_t swizzle_code(Swizzle s) {
    return s == Swizzle::k128 ? 1 : s == Swizzle::k64 ? 2 : s == Swizzle::k32 ? 3 : 0;
  }
};

/// Shared-memory operand of tcgen05 (PTX ISA, "Shared memory descriptor" of tcgen05).
struct UmmaOperand {
  static constexpr Field kStart{0, 14};
  static constexpr Field kLeading{16, 14};
  static constexpr Field kStride{32, 14};
  static constexpr Field kVersion{46, 3};  // always 0b001
  static constexpr Field kBase{49, 3};
  static constexpr Field kAbsolute{52, 1};  // the leading offset is an address
  static constexpr Field kSwizzle{61, 3};   // 0 none, 2 128 B, 4 64 B, 6 32 B

  static HW_BOTH uint64_t swizzle_code(Swizzle s) {
    return s == Swizzle::k128 ? 2 : s == Swizzle::k64 ? 4 : s == Swizzle::k32 ? 6 : 0;
  }
};

/// Instruction descriptor of tcgen05.mma, kind::f16 (PTX ISA, "Instruction descriptor" of tcgen05).
struct UmmaInstruction {
  static constexpr Field kSparse{2, 1};
  static constexpr Field kSaturate{3, 1};
  static constexpr Field kD{4, 2};  // 0 f16, 1 f32
  static constexpr Field kA{7, 3};  // 0 f16, 1 bf16
  static constexpr Field kB{10, 3};
  static constexpr Field kNegateA{13, 1};
  static constexpr Field kNegateB{14, 1};
  static constexpr Field kMajorA{15, 1};  // 0 K-major, 1 MN-major
  static constexpr Field kMajorB{16, 1};
  static constexpr Field kN{17, 6};  // N / 8
  static constexpr Field kM{24, 5};  // M / 16, of the pair with cta_group::2
};

/// Offsets, in bytes, between the parts of an operand (docs/device-model.md, "Operand layouts").
struct OperandLayout {
  uint32_t leading_bytes, stride_bytes;
  Swizzle swizzle = Swizzle::k128;
};

HW_BOTH uint64_t wgmma_operand(uint32_t address, OperandLayout layout) {
  return WgmmaOperand::kStart.put((address & 0x3FFFF) >> 4) |
         WgmmaOperand::kLeading.put(layout.leading_bytes >> 4) |
         WgmmaOperand::kStride.put(layout.stride_bytes >> 4) |
         WgmmaOperand::kSwizzle.put(WgmmaOperand::swizzle_code(layout.swizzle));
}

HW_BOTH uint64_t umma_operand(uint32_t address, OperandLayout layout) {
  return UmmaOperand::kStart.put((address & 0x3FFFF) >> 4) |
         UmmaOperand::kLeading.put(layout.leading_bytes >> 4) |
         UmmaOperand::kStride.put(layout.stride_bytes >> 4) | UmmaOperand::kVersion.put(1) |
         UmmaOperand::kSwizzle.put(UmmaOperand::swizzle_code(layout.swizzle));
}

/// bf16 x bf16 -> f32. `m` is the pair's with two CTAs.
HW_BOTH uint32_t umma_instruction(int m, int n, Major a, Major b) {
  return static_cast<uint32_t>(UmmaInstruction::kD.put(1) | UmmaInstruction::kA.put(1) |
                               UmmaInstruction::kB.put(1) |
                               UmmaInstruction::kMajorA.put(static_cast<uint64_t>(a)) |
                               UmmaInstruction::kMajorB.put(static_cast<uint64_t>(b)) |
                               UmmaInstruction::kN.put(static_cast<uint64_t>(n) >> 3) |
                               UmmaInstruction::kM.put(static_cast<uint64_t>(m) >> 4));
}

/// An operand `bytes` further on in shared memory.
HW_BOTH uint64_t operand_advance(uint64_t operand, uint32_t bytes) {
  return operand + (bytes >> 4);
}

}  // namespace hw
