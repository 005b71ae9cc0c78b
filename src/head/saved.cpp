// SPDX-License-Identifier: Apache-2.0
#include "logitless/head.h"

namespace logitless {

SavedBuffers::SavedBuffers(const Plan& plan)
    : rows_(static_cast<size_t>(plan.rows_bytes)), stash_(static_cast<size_t>(plan.stash_bytes)) {
  if (!plan.wanted.backward()) return;
  view_.rows = matrix_view(rows_.data(), DType::kFloat32, 6, plan.problem.tokens);
  if (plan.stash_columns > 0) {
    view_.stash =
        matrix_view(stash_.data(), plan.problem.dtype, plan.stash_columns, plan.token_pitch);
  }
}

}  // namespace logitless
