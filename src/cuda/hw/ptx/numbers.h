// SPDX-License-Identifier: Apache-2.0
// Arithmetic whose bits matter (PTX ISA, "ex2.approx", "lg2.approx", "cvt.rn.bf16x2").
#pragma once

#include "cuda/hw/ptx/thread.h"

namespace hw {

HW_FN float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
HW_FN float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
HW_FN float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HW_FN float ceil(float x) { return ceilf(x); }
HW_FN float max(float a, float b) { return fmaxf(a, b); }
HW_FN float min(float a, float b) { return fminf(a, b); }
HW_FN float as_float(uint32_t bits) { return __uint_as_float(bits); }
HW_FN uint32_t as_bits(float value) { return __float_as_uint(value); }
HW_FN uint32_t bf16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
HW_FN float bf16_value(uint32_t bits) { return __uint_as_float(bits << 16); }
HW_FN uint32_t pack_bf16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

}  // namespace hw
