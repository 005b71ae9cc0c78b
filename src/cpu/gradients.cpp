// SPDX-License-Identifier: Apache-2.0
#include "cpu/gradients.h"

#include <algorithm>

#include "cpu/fold.h"
#include "cpu/input_grad.h"
#include "cpu/prepare.h"
#include "cpu/project.h"
#include "cpu/weight_grad.h"
#include "plan/cpu_tiles.h"

namespace logitless::cpu {

namespace {

GradientRows take_rows(const LocalCall& call) {
  auto* next = call.arena.get<float>(region::kRows);
  const int64_t padded = round_up(call.plan.problem.tokens, kTileTokens);
  const auto take = [&next, padded] {
    float* array = next;
    next += padded;
    return array;
  };
  const auto take_ints = [&take] { return reinterpret_cast<int32_t*>(take()); };
  return {.projection = {take(), take(), take_ints(), take_ints()},
          .stash_scale = take(),
          .p_scale = take(),
          .slope0 = take(),
          .slope1 = take(),
          .target_term = take()};
}

// dz of vocabulary rows [first, first + columns), to the slice buffer [columns][token_pitch].
void recompute_slice(const LocalCall& call, Workers& workers, Products& products,
                     const GradientRows& rows, int64_t first, int64_t columns) {
  const DType dtype = call.plan.problem.dtype;
  const int64_t pitch = call.plan.token_pitch;
  auto* slice = call.arena.get<std::byte>(region::kSlice);
  project(call, workers, products, {call.plan.problem.tokens, nullptr, first, first + columns},
          [&](const LogitsTile& tile) {
            fold_gradients(tile.logits, tile.columns, tile.column, rows_at(rows, tile.token));
            store_tile(tile.logits, tile.columns, tile.tokens, nullptr,
                       slice + ((tile.column - first) * pitch + tile.token) * size_of(dtype), pitch,
                       dtype);
          });
}

}  // namespace

void compute_gradients(const LocalCall& call, Workers& workers, Products& products,
                       const Saved& saved, const Upstream& upstream, const LocalGradients& out) {
  const Plan& plan = call.plan;
  const GradientRows rows = take_rows(call);
  fill_gradient_rows(call, saved, upstream, rows);
  InputGrad input(call, workers, products, rows, out);
  WeightGrad weight(call, workers, products, rows, out);

  if (plan.stash_columns > 0) {
    if (input.wanted()) input.add_stash(saved.stash);
    if (weight.wanted()) weight.add_stash(saved.stash);
  }
  for (int64_t first = plan.stash_columns; first < plan.problem.live_rows(); first += kSliceVocab) {
    const int64_t columns = std::min(kSliceVocab, plan.problem.live_rows() - first);
    const void* dz = call.arena.get<std::byte>(region::kSlice);
    recompute_slice(call, workers, products, rows, first, columns);
    if (input.wanted()) input.add_slice(dz, first, columns);
    if (weight.wanted()) weight.add_slice(dz, first, columns);
  }
  if (input.wanted()) input.finish();
  if (weight.wanted()) weight.finish();
}

}  // namespace logitless::cpu
