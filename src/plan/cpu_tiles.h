// SPDX-License-Identifier: Apache-2.0
// The tile numbers of the CPU backend. Bits depend on some of them, so none depends on the machine.
#pragma once

#include <algorithm>
#include <cstdint>

namespace logitless {

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

namespace cpu {

// Projection: one product is 512 vocabulary rows by 64 tokens (padded), the tokens being the SIMD lanes.
// Measured with oneDNN 2.6 at H = 4096 on one core with bf16 dot products: 226 GFLOP/s; 16 lanes gave 95,
// 32 gave 195, 128 gave 225; the transpose (64 tokens by 512 vocabulary rows) gave 209.
inline constexpr int64_t kTileTokens = 64;
inline constexpr int64_t kTileVocab = 512;
// Sums are kept per group of columns and merged in column order: bits do not depend on the tile.
inline constexpr int64_t kGroupVocab = 64;
static_assert(kTileVocab % kGroupVocab == 0, "a group never straddles two tiles");
// The anchor is taken over the first columns of the shard, whatever the tile.
inline constexpr int64_t kAnchorVocab = 128;
static_assert(kAnchorVocab <= kTileVocab,
              "the first tile holds every column that the anchor needs");

// The stash is [vocab][token_pitch]; a row of it is a whole number of vectors.
inline constexpr int64_t kTokenPitch = 16;
// Backward without a stash recomputes dZ for this many vocabulary rows at a time.
inline constexpr int64_t kSliceVocab = 2048;
static_assert(kSliceVocab % kTileVocab == 0, "a slice is a whole number of tiles");

// Gradients: dX tiles are tokens by hidden, dW tiles vocabulary by hidden; both walk K in blocks.
// 256 x 1024 x 512 gave 211 GFLOP/s where 64 x 1024 x 512 gave 194 (bf16, one core).
inline constexpr int64_t kInputGradTokens = 256;
inline constexpr int64_t kWeightGradVocab = 512;
inline constexpr int64_t kGradHidden = 1024;
inline constexpr int64_t kInputGradDepth = 512;    // vocabulary rows per product
inline constexpr int64_t kWeightGradDepth = 2048;  // tokens per product

}  // namespace cpu
}  // namespace logitless
