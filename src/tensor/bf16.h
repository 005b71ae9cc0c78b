// SPDX-License-Identifier: Apache-2.0
// bfloat16 is the upper half of a float32; rounding is to nearest, ties to even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace logitless {

inline float bf16_to_float(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16U);
}

inline uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16U) | 0x40U);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U);
}

}  // namespace logitless
