// SPDX-License-Identifier: Apache-2.0
// What every token multiplies its exponentials with, from the saved statistics and the upstream gradients.
#pragma once

#include <cstdint>

#include "head/backend.h"
#include "plan/cpu_rows.h"

namespace logitless::cpu {

// With c = 2^(k − K)/S, p = c·E:  dz_v = p·(slope0 + slope1·(u_v − k)),  dz_y = target_term, where
//   slope0 = (g + q)/τ + (h·ln2/τ)·(T/S + K − k)     slope1 = −h·ln2/τ
//   target_term = [ q·p_y − g·(1 − p_y) + h·p_y·ln2·(T/S − e) ]/τ     1 − p_y = S_rest/S
// (lse − entropy = ln2·(K + T/S)). Without h, dz_v = stash_scale·E_v with stash_scale = c·slope0.
void fill_gradient_rows(const LocalCall& call, const Saved& saved, const Upstream& upstream,
                        const GradientRows& rows);

// to[token] = factor[token]·x[token] for tokens that count, exactly 0 for the others and for padding;
// [token_pitch, H] of x's dtype. A null factor is 1.
void scale_tokens(const LocalCall& call, const GradientRows& rows, const float* factor,
                  double extra, int64_t token, void* to);

}  // namespace logitless::cpu
