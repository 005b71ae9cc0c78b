// SPDX-License-Identifier: Apache-2.0
// Comparison with the reference, with the limits of docs/design.md (Checks). To be called on the main thread.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "cases.h"

namespace logitless::testing {

// nll, lse and entropy of every rank: fp64 within 1e-5 · max(1, H/4096) · max(3, max|s|) for bfloat16,
// 1e-5 · max(1, max|s|) for float32, NaN and infinity in the same places, and equal bits on all ranks.
void check_statistics(const Case& problem, const std::vector<Result>& results);

// dX and dW. In norm, and for rows at the 99th percentile:
//   bfloat16  max(1.5 × eager bf16's own error, 3e-3 in norm or 5e-3 for rows)
//   float32   1e-5 · max(1, max|s|) in norm, 5/3 of it for rows
// Element by element, whatever cancels in a sum or within dz: the rounding of one term, summed over all.
// Probabilities below 2^-40 may be rounded to anything of their size.
void check_gradients(const Case& problem, const Ask& ask, const std::vector<Result>& results);

// Runs the case on all of its ranks and checks everything.
std::vector<Result> run_and_check(const Case& problem, const Ask& ask);

// The Error that `call` must throw.
Error thrown_by(const std::function<void()>& call);

// Whether no rank threw; says what each that did threw.
bool all_returned(const std::vector<std::optional<Error>>& thrown);

// Whether the sentence contains every part; names the first missing one.
bool says(const Error& error, std::initializer_list<std::string> parts);

}  // namespace logitless::testing
