// SPDX-License-Identifier: Apache-2.0
// The epilogues of a projection tile: logits[columns][kTileTokens] in, statistics or gradients out.
#pragma once

#include <cstdint>

#include "logitless/tensor.h"
#include "plan/cpu_rows.h"

namespace logitless::cpu {

// Where the statistics of one tile go: kTileTokens values each.
struct TileStatistics {
  float* sum;              // Σ E over the columns but the target
  float* maximum;          // of the logits, target included
  float* moment;           // Σ E·(u − k) over the columns but the target; null when not wanted
  float* target_exponent;  // u_y − k, written where the tile holds the target
};

// anchor = ceil(max u) over the finite u of these columns, 0 where there is none. Without the headroom of
// 60 that GPUs take: u − k stays small and keeps its digits (nll, lse and entropy are ten times as exact),
// and a row whose logits rise 69 nats above its first columns costs a second projection, no more.
void find_anchors(const float* logits, int64_t columns, const float* scale, float* anchor);

// Folds the tile into its statistics and leaves E in place of the logits: 0 for the target's column
// and for tokens that do not count.
void fold_statistics(float* logits, int64_t columns, int64_t first_column,
                     const ProjectionRows& rows, const TileStatistics& out);

// Leaves dz in place of the logits, target's term included.
void fold_gradients(float* logits, int64_t columns, int64_t first_column, const GradientRows& rows);

// Writes the first `tokens` lanes of a tile to a [columns][pitch] matrix of `dtype`. Without `index`
// lane i goes to position i, and a last vector is written whole (the pitch is a multiple of it);
// with it, to position index[i].
void store_tile(const float* tile, int64_t columns, int64_t tokens, const int32_t* index, void* to,
                int64_t pitch, DType dtype);

// The rows of a tile begin at `token`.
ProjectionRows rows_at(const ProjectionRows& rows, int64_t token);
GradientRows rows_at(const GradientRows& rows, int64_t token);

}  // namespace logitless::cpu
