// SPDX-License-Identifier: Apache-2.0
// The workspace of the CPU backend, region by region.
#pragma once

#include "logitless/plan.h"

namespace logitless::cpu {

Layout forward_layout(const Problem& problem, const Wanted& wanted, const Machine& machine);

// `stash_columns` of the live rows come from the stash, the others are recomputed in slices.
Layout backward_layout(const Problem& problem, const Wanted& wanted, int64_t stash_columns,
                       const Machine& machine);

// Enough for every call of up to this size, whatever its options and memory policy.
int64_t capacity_bytes(const Problem& problem, const Machine& machine);

// Tokens of the largest token shard.
int64_t token_block(const Problem& problem);

}  // namespace logitless::cpu
