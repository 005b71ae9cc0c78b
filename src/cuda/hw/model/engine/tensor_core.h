// SPDX-License-Identifier: Apache-2.0
// What the tensor cores of both chips share: operands in shared memory, and the sum of products.
#pragma once

#include "cuda/hw/model/engine/machine.h"

namespace hw::model {

inline constexpr int kProductK = 16;  // of one instruction, for 16-bit inputs

/// The fields of an operand's descriptor; faults, by field, on what the hardware does not allow.
struct Operand {
  uint32_t start;
  OperandLayout layout;
  uint32_t base = 0;  // rows of 128 bytes that the swizzle's pattern begins late
};
Operand decode_wgmma(uint64_t descriptor, const char* what);
Operand decode_umma(uint64_t descriptor, const char* what);

/// rows x 16 elements of an operand, from the asynchronous view of a CTA: element (r, k) goes to
/// out[r * row_stride + k * k_stride].
void load_operand(const Cta& cta, const Operand& operand, Major major, int rows, float* out,
                  int row_stride, int k_stride, const char* what);

/// D[m x n] (+)= A B with a[m][16] and b[16][b_stride]. Plain f32 in k order, or, with Options::exact, the
/// hardware's rule: the products and the accumulator are aligned to the largest exponent, cut to 25
/// fractional bits, added exactly and cut to f32. Subnormal numbers count with the exponent -126, and
/// nothing is aligned below -133; a sum without bits is +0, one that is not a number is 0x7FFFFFFF.
void multiply(float* d, int d_stride, const float* a, const float* b, int b_stride, int m, int n,
              bool accumulate);

/// One element by the hardware's rule.
float exact_sum(float c, const float* a, const float* b, int b_stride);

}  // namespace hw::model
