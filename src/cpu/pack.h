// SPDX-License-Identifier: Apache-2.0
// Tokens as the products want them, and the constants that go with each.
#pragma once

#include <cstdint>

#include "head/backend.h"
#include "plan/cpu_rows.h"

namespace logitless::cpu {

// Copies tokens [first, first + count) of x, or index[first...], to a contiguous [kTileTokens][H] tile
// whose last rows are zero.
void pack_tokens(const TensorView& x, int64_t first, int64_t count, const int32_t* index, void* to);

// log2(e)/τ, the target's column in this shard, and whether the token counts, for every padded token.
void fill_projection_rows(const LocalCall& call, const ProjectionRows& rows);

double temperature_at(const LocalCall& call, int64_t token);

// The operand that a [rows, columns] weight view is, from row `row` and column `column` on.
const void* element_at(const TensorView& matrix, int64_t row, int64_t column);

}  // namespace logitless::cpu
