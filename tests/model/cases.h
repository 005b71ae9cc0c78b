// SPDX-License-Identifier: Apache-2.0
// What the tests of the device model share: a run over many seeds that reports the first failure.
#pragma once

#include <doctest/doctest.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "cuda/hw/hw.h"
#include "inputs.h"

namespace logitless::model_test {

/// How many seeds an ordinary test runs; LOGITLESS_MODEL_SEEDS and LOGITLESS_MODEL_FIRST_SEED choose others.
inline int seeds(int usual = 12) {
  const char* text = std::getenv("LOGITLESS_MODEL_SEEDS");
  return text != nullptr ? std::atoi(text) : usual;
}
inline int first_seed() {
  const char* text = std::getenv("LOGITLESS_MODEL_FIRST_SEED");
  return text != nullptr ? std::atoi(text) : 0;
}

/// Runs `one` for every seed; it returns what went wrong, or nothing.
inline void for_seeds(int usual, const std::function<std::string(uint64_t seed)>& one) {
  const int count = seeds(usual);
  int failed = 0;
  std::string marks, first;
  for (int i = 0; i < count; ++i) {
    const std::string wrong = one(static_cast<uint64_t>(first_seed() + i));
    marks += wrong.empty() ? '.' : 'X';
    if (!wrong.empty() && failed++ == 0)
      first = "seed " + std::to_string(first_seed() + i) + ": " + wrong;
  }
  INFO(marks, " ", first);
  CHECK_MESSAGE(failed == 0, failed, " of ", count, " seeds failed [", marks, "] ", first);
}

}  // namespace logitless::model_test
