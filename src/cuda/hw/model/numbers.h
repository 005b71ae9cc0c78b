// SPDX-License-Identifier: Apache-2.0
// Arithmetic whose bits matter. The device model's half of ptx/numbers.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace hw {

/// On a GPU ex2.approx and lg2.approx: a few units in the last place from these.
inline float exp2(float x) { return ::exp2f(x); }
inline float log2(float x) { return ::log2f(x); }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float ceil(float x) { return ::ceilf(x); }
/// NaN if one of the two is: in the model NaN is poison, and poison must not get lost. On a GPU a
/// number wins over NaN.
inline float max(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return a > b ? a : b;
}
inline float min(float a, float b) { return -max(-a, -b); }
inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
/// Nearest even; NaN is 0x7FFF, as cvt.rn gives it.
inline uint32_t bf16_bits(float value) {
  const uint32_t bits = as_bits(value);
  return std::isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float bf16_value(uint32_t bits) { return as_float(bits << 16); }
/// Two bf16 in a word, `low` at the lower address.
inline uint32_t pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }

}  // namespace hw
