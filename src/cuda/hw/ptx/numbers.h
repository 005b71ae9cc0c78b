// SPDX-License-Identifier: Apache-2.0
// Arithmetic whose bits matter (PTX ISA, "ex2.approx", "lg2.approx", "cvt.rn.bf16x2"). The functions on
// bits are for hosts too, which prepare and compare what kernels read and write.
#pragma once

#include <cstring>

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

#define HW_ANYWHERE __host__ __device__ __forceinline__  // as HW_FN, and for hosts
HW_ANYWHERE float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
HW_ANYWHERE uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
HW_ANYWHERE uint32_t bf16_bits(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const uint32_t bits = as_bits(value);
  return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#endif
}
HW_ANYWHERE float bf16_value(uint32_t bits) { return as_float(bits << 16); }
HW_ANYWHERE uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return bf16_bits(low) | bf16_bits(high) << 16;
#endif
}
#undef HW_ANYWHERE

}  // namespace hw
