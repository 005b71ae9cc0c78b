// SPDX-License-Identifier: Apache-2.0
// Sixteen tokens side by side: GCC/Clang vector extensions, lowered to whatever the machine has.
#pragma once

#include <cstdint>
#include <cstring>

namespace logitless::cpu {

inline constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

// One body compiled for several machines, chosen at load time. Not under the sanitizers:
// their runtime is not up yet when the choice is made.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__clang_analyzer__)
#define LOGITLESS_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOGITLESS_CLONES
#endif
#define LOGITLESS_INLINE inline __attribute__((always_inline))

template <typename Vector, typename Element>
LOGITLESS_INLINE Vector load(const Element* from) {
  static_assert(sizeof(Vector) == kLanes * sizeof(Element), "a vector is sixteen elements");
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename Vector, typename Element>
LOGITLESS_INLINE void store(Element* to, Vector value) {
  static_assert(sizeof(Vector) == kLanes * sizeof(Element), "a vector is sixteen elements");
  std::memcpy(to, &value, sizeof(value));
}

LOGITLESS_INLINE Floats splat(float value) { return Floats{} + value; }

// 2^x to one unit in the last place, over the whole range of float32, denormals and infinity included.
// x = n + f with |f| <= 1/2; 2^f by the Taylor series of e^(f ln 2) to degree 7 (remainder 5e-9 relative);
// the scale 2^n is applied in two halves, each a normal number.
LOGITLESS_INLINE Floats exp2_lanes(Floats x) {
  // Beyond these it is 0 or infinity anyway, and half of them is still a normal exponent.
  // The comparisons let NaN through.
  constexpr float kLeast = -252.0F;
  constexpr float kMost = 254.0F;
  x = x < kLeast ? splat(kLeast) : x;
  x = x > kMost ? splat(kMost) : x;
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x + kMagic;
  const Floats whole = shifted - kMagic;
  const Floats f = x - whole;
  Floats p = splat(1.52527338e-5F);  // ln(2)^7 / 7!
  p = p * f + 1.54035304e-4F;
  p = p * f + 1.33335581e-3F;
  p = p * f + 9.61812911e-3F;
  p = p * f + 5.55041087e-2F;
  p = p * f + 2.40226507e-1F;
  p = p * f + 6.93147181e-1F;
  p = p * f + 1.0F;
  Ints n;
  std::memcpy(&n, &shifted, sizeof(n));
  n -= 0x4B400000;  // the bits of kMagic
  const Ints half = n >> 1;
  const Ints low = (half + 127) << 23;
  const Ints high = (n - half + 127) << 23;
  Floats scale_low;
  Floats scale_high;
  std::memcpy(&scale_low, &low, sizeof(low));
  std::memcpy(&scale_high, &high, sizeof(high));
  return p * scale_low * scale_high;
}

// float32 to bfloat16, to nearest, ties to even; a NaN stays one.
LOGITLESS_INLINE Halves bf16_lanes(Floats value) {
  Words bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const Words rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const Words quiet = (bits >> 16) | 0x40U;
  const Ints is_nan = value != value;
  return __builtin_convertvector(is_nan ? quiet : rounded, Halves);
}

}  // namespace logitless::cpu
