// SPDX-License-Identifier: Apache-2.0
// Layer (b): joins the ranks' parts over any group. Sums go in the order of one balanced binary tree over
// the rank index, so their bits are equal on every rank and do not depend on the transport.
#pragma once

#include <bit>
#include <cstdint>

#include "comm/agreement.h"
#include "logitless/group.h"
#include "logitless/plan.h"
#include "plan/regions.h"

namespace logitless {

// sum over [first, last) = sum over [first, middle) + sum over [middle, last), where the left part is the
// largest power of two below the whole: (0 + 1) + 2, ((0 + 1) + (2 + 3)) + 4 ... Neighbours meet first, so
// that hosts of 2, 4 or 8 ranks can add their own before they meet others.
constexpr int tree_middle(int first, int last) {
  return first + static_cast<int>(std::bit_floor(static_cast<unsigned>(last - first - 1)));
}

// to[i] = tree sum of parts[r][i], in float32.
void tree_sum(const float* parts, int ranks, int64_t part_stride, int64_t count, float* to);

// Sequence parallel: the whole x [M, H], from every rank's token shard.
TensorView gather_tokens(Group& group, const Agreement& agreement, const Arena& arena,
                         const TensorView& shard);

// Sums the parts [M, H] that every rank has in kInputGradSum and rounds once. `dx` is the whole [M, H],
// or this rank's tokens where sequence parallel, or absent where only peers want it.
void reduce_input_grad(Group& group, const Agreement& agreement, const Plan& plan,
                       const Arena& arena, const TensorView& dx);

}  // namespace logitless
