// SPDX-License-Identifier: Apache-2.0
// Descriptors of the tensor cores, field by field. Kernels build them, the model takes them apart.
#pragma once

#include "cuda/hw/types.h"

namespace hw {

/// How a tile's 16-byte cells are permuted in shared memory.
enum class Swizzle { kNone, k32, k64, k128 };

/// Bits [kFirst, kFirst + kBits) of a descriptor.
template <int kFirst, int kBits>
struct Field {
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  static HW_BOTH uint64_t put(uint64_t value) { return (value & kMask) << kFirst; }
  static HW_BOTH uint64_t get(uint64_t word) { return word >> kFirst & kMask; }
};

/// Shared-memory operand of wgmma (PTX ISA, "Matrix descriptor format" of wgmma).
struct WgmmaOperand {
  using Start = Field<0, 14>;        // address / 16
  using Leading = Field<16, 14>;     // leading dimension byte offset / 16
  using Stride = Field<32, 14>;      // stride dimension byte offset / 16
  using Base = Field<49, 3>;         // base offset of the swizzle pattern
  using SwizzleMode = Field<62, 2>;  // 0 none, 1 128 B, 2 64 B, 3 32 B

  static HW_BOTH uint64_t swizzle_code(Swizzle s) {
    return s == Swizzle::k128 ? 1 : s == Swizzle::k64 ? 2 : s == Swizzle::k32 ? 3 : 0;
  }
};

/// Shared-memory operand of tcgen05 (PTX ISA, "Shared memory descriptor" of tcgen05).
struct UmmaOperand {
  using Start = Field<0, 14>;
  using Leading = Field<16, 14>;
  using Stride = Field<32, 14>;
  using Version = Field<46, 3>;  // always 0b001
  using Base = Field<49, 3>;
  using Absolute = Field<52, 1>;     // the leading offset is an address
  using SwizzleMode = Field<61, 3>;  // 0 none, 2 128 B, 4 64 B, 6 32 B

  static HW_BOTH uint64_t swizzle_code(Swizzle s) {
    return s == Swizzle::k128 ? 2 : s == Swizzle::k64 ? 4 : s == Swizzle::k32 ? 6 : 0;
  }
};

/// Instruction descriptor of tcgen05.mma, kind::f16 (PTX ISA, "Instruction descriptor" of tcgen05).
struct UmmaInstruction {
  using Sparse = Field<2, 1>;
  using Saturate = Field<3, 1>;
  using D = Field<4, 2>;  // 0 f16, 1 f32
  using A = Field<7, 3>;  // 0 f16, 1 bf16
  using B = Field<10, 3>;
  using NegateA = Field<13, 1>;
  using NegateB = Field<14, 1>;
  using MajorA = Field<15, 1>;  // 0 K-major, 1 MN-major
  using MajorB = Field<16, 1>;
  using N = Field<17, 6>;  // N / 8
  using M = Field<24, 5>;  // M / 16, of the pair with cta_group::2
};

/// Offsets, in bytes, between the parts of an operand (docs/device-model.md, "Operand layouts").
struct OperandLayout {
  uint32_t leading_bytes, stride_bytes;
  Swizzle swizzle = Swizzle::k128;
};

HW_BOTH uint64_t wgmma_operand(uint32_t address, OperandLayout layout) {
  return WgmmaOperand::Start::put((address & 0x3FFFF) >> 4) |
         WgmmaOperand::Leading::put(layout.leading_bytes >> 4) |
         WgmmaOperand::Stride::put(layout.stride_bytes >> 4) |
         WgmmaOperand::SwizzleMode::put(WgmmaOperand::swizzle_code(layout.swizzle));
}

HW_BOTH uint64_t umma_operand(uint32_t address, OperandLayout layout) {
  return UmmaOperand::Start::put((address & 0x3FFFF) >> 4) |
         UmmaOperand::Leading::put(layout.leading_bytes >> 4) |
         UmmaOperand::Stride::put(layout.stride_bytes >> 4) | UmmaOperand::Version::put(1) |
         UmmaOperand::SwizzleMode::put(UmmaOperand::swizzle_code(layout.swizzle));
}

/// bf16 x bf16 -> f32. `m` is the pair's with two CTAs.
HW_BOTH uint32_t umma_instruction(int m, int n, Major a, Major b) {
  return static_cast<uint32_t>(UmmaInstruction::D::put(1) | UmmaInstruction::A::put(1) |
                               UmmaInstruction::B::put(1) |
                               UmmaInstruction::MajorA::put(static_cast<uint64_t>(a)) |
                               UmmaInstruction::MajorB::put(static_cast<uint64_t>(b)) |
                               UmmaInstruction::N::put(static_cast<uint64_t>(n) >> 3) |
                               UmmaInstruction::M::put(static_cast<uint64_t>(m) >> 4));
}

/// An operand `bytes` further on in shared memory.
HW_BOTH uint64_t operand_advance(uint64_t operand, uint32_t bytes) {
  return operand + (bytes >> 4);
}

}  // namespace hw
