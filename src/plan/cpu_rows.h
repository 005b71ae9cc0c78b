// SPDX-License-Identifier: Apache-2.0
// Per-token constants that the epilogues read lane by lane; arrays of padded_tokens 4-byte values.
#pragma once

#include <cstdint>

namespace logitless::cpu {

// What a projection tile needs of its tokens.
struct ProjectionRows {
  float* scale;     // log2(e)/τ
  float* anchor;    // k
  int32_t* target;  // column of the target in this shard, −1 where another rank owns it
  int32_t* live;    // −1 (all bits) where the token counts, 0 where it is ignored or padding
};

// What the gradients need in addition: dz_v = p_scale·E_v·(slope0 + slope1·(u_v − k)), dz_y = target_term.
struct GradientRows {
  ProjectionRows projection;
  float* stash_scale;  // a: dz_v = a·E_v where no entropy gradient comes
  float* p_scale;      // c = 2^(k − K)/S, so that p_v = c·E_v
  float* slope0;
  float* slope1;
  float* target_term;
};

// ProjectionRows and e of every token, then of the tokens that are projected again, and their positions.
inline constexpr int kForwardRowArrays = 5 + 5 + 1;
inline constexpr int kBackwardRowArrays = 4 + 5;

}  // namespace logitless::cpu
