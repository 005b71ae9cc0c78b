// SPDX-License-Identifier: Apache-2.0
// Joins the statistics of the vocabulary shards into the outputs of every token.
#pragma once

#include <limits>

#include "comm/agreement.h"
#include "logitless/head.h"

namespace logitless {

// One rank's view of one token: its anchor k, S without the target, T, and the target's exponent.
struct TokenStatistics {
  double anchor = 0.0;
  double sum = 0.0;
  double moment = 0.0;
  double target_exponent = 0.0;  // only the owner's counts
};

// In the saved rows, where the moment stands: forward was not asked for the entropy. No sum is −inf.
inline constexpr double kNoMoment = -std::numeric_limits<double>::infinity();

struct MergedToken {
  double top = 0.0;              // K: the largest anchor among ranks that have mass
  double rest = 0.0;             // S_rest, relative to K
  double sum = 0.0;              // S
  double moment = 0.0;           // T
  double target_exponent = 0.0;  // relative to K
  double nll = 0.0;
  double lse = 0.0;
  double entropy = 0.0;
};

// Ranks are added in tree order. A row with a NaN or +inf logit, or with no finite one, is NaN.
MergedToken merge_token(const TokenStatistics* ranks, int count, int owner);

// `statistics` is [R, 4, M] float32 as LocalStatistics lays them out. Ignored tokens give zeros.
void merge(const Agreement& agreement, int rank, const TensorView& target, int64_t ignore_index,
           const float* statistics, const Outputs& outputs, const TensorView& rows);

}  // namespace logitless
