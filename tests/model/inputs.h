// SPDX-License-Identifier: Apache-2.0
// Inputs of the test kernels: the same numbers on every machine, in the model and on a GPU.
#pragma once

#include <cstring>
#include <vector>

#include "cuda/hw/types.h"

namespace logitless::model_test {

/// Uniform in [-1, 1); the same sequence everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761U + 12345) {}
  double operator()() {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<double>(state_ >> 11) / static_cast<double>(1ULL << 53) * 2 - 1;
  }
  int below(int n) { return static_cast<int>(((*this)() + 1) / 2 * n) % n; }

 private:
  uint64_t state_;
};

/// Nearest even; these inputs hold no NaN.
inline hw::Bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline double value_of(hw::Bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline std::vector<hw::Bf16> random_bf16(Random& random, int64_t count, double scale = 1) {
  std::vector<hw::Bf16> values(static_cast<size_t>(count));
  for (auto& v : values) {
    v = to_bf16(static_cast<float>(random() * scale));
  }
  return values;
}

}  // namespace logitless::model_test
