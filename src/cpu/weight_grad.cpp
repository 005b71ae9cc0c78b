// SPDX-License-Identifier: Apache-2.0
#include "cpu/weight_grad.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/prepare.h"
#include "plan/cpu_tiles.h"
#include "tensor/rows.h"

namespace logitless::cpu {

namespace {

// X' = 2^40·a·x: a = c·g may be as small as 2^-100, and its products with x must stay normal numbers.
constexpr int kScaledTokensExponent = 40;

}  // namespace

WeightGrad::WeightGrad(const LocalCall& call, Workers& workers, Products& products,
                       const GradientRows& rows, const LocalGradients& out)
    : call_(call), workers_(workers), products_(products), rows_(rows), out_(out) {}

void WeightGrad::sort_targets() {
  order_ = call_.arena.get<int32_t>(region::kTargetOrder);
  const int32_t* target = rows_.projection.target;
  for (int64_t token = 0; token < call_.plan.problem.tokens; ++token) {
    if (target[token] >= 0) order_[ordered_++] = static_cast<int32_t>(token);
  }
  std::sort(order_, order_ + ordered_, [target](int32_t a, int32_t b) {
    return target[a] != target[b] ? target[a] < target[b] : a < b;
  });
}

void WeightGrad::add_stash(const TensorView& stash) {
  sort_targets();
  void* tokens = call_.arena.get<std::byte>(region::kScaledTokens);
  workers_.run(call_.plan.token_pitch, [&](int64_t token, int) {
    scale_tokens(call_, rows_, rows_.stash_scale, std::ldexp(1.0, kScaledTokensExponent), token,
                 tokens);
  });
  multiply(stash.data, 0, call_.plan.stash_columns, tokens,
           std::ldexp(1.0F, -kScaledTokensExponent), true);
}

void WeightGrad::add_slice(const void* dz, int64_t first, int64_t columns) {
  void* tokens = call_.arena.get<std::byte>(region::kLiveTokens);
  if (!live_tokens_ready_) {
    workers_.run(call_.plan.token_pitch, [&](int64_t token, int) {
      scale_tokens(call_, rows_, nullptr, 1.0, token, tokens);
    });
    live_tokens_ready_ = true;
  }
  multiply(dz, first, columns, tokens, 1.0F, false);
}

void WeightGrad::multiply(const void* left, int64_t first, int64_t columns, const void* tokens,
                          float scale, bool add_targets) {
  const Problem& problem = call_.plan.problem;
  const int64_t pitch = call_.plan.token_pitch;
  const int64_t element = size_of(problem.dtype);
  const int64_t across = ceil_div(problem.hidden, kGradHidden);
  const int64_t tile_floats = kWeightGradVocab * std::min(problem.hidden, kGradHidden);
  auto* tiles = call_.arena.get<float>(region::kWeightGradTiles);

  workers_.run(ceil_div(columns, kWeightGradVocab) * across, [&](int64_t task, int worker) {
    const int64_t column = task / across * kWeightGradVocab;
    const int64_t hidden = task % across * kGradHidden;
    const int64_t height = std::min(kWeightGradVocab, columns - column);
    const int64_t width = std::min(kGradHidden, problem.hidden - hidden);
    float* tile = tiles + worker * tile_floats;
    if (pitch == 0) std::fill(tile, tile + height * width, 0.0F);  // no tokens
    for (int64_t token = 0; token < pitch; token += kWeightGradDepth) {
      products_.run(
          {.m = height,
           .n = width,
           .k = std::min(kWeightGradDepth, pitch - token),
           .a = {.transposed = false, .stride = pitch},
           .b = {.transposed = false, .stride = problem.hidden},
           .c_stride = width,
           .dtype = problem.dtype,
           .accumulate = token > 0},
          static_cast<const std::byte*>(left) + (column * pitch + token) * element,
          static_cast<const std::byte*>(tokens) + (token * problem.hidden + hidden) * element, tile,
          worker);
    }
    for (int64_t i = 0; i < height * width; ++i) tile[i] *= scale;
    if (add_targets) add_target_terms(tile, first + column, height, hidden, width);
    for (int64_t row = 0; row < height; ++row) {
      const auto write = out_.accumulate_weight ? add_row : write_row;
      write(tile + row * width, width, out_.weight, first + column + row, hidden);
    }
  });
}

void WeightGrad::add_target_terms(float* tile, int64_t first, int64_t columns, int64_t hidden,
                                  int64_t width) const {
  const int32_t* target = rows_.projection.target;
  const int32_t* begin = order_;
  const int32_t* end = order_ + ordered_;
  const int32_t* token = std::lower_bound(
      begin, end, first, [target](int32_t t, int64_t column) { return target[t] < column; });
  for (; token != end && target[*token] < first + columns; ++token) {
    add_scaled(tile + (target[*token] - first) * width, width, rows_.target_term[*token], call_.x,
               *token, hidden);
  }
}

void WeightGrad::finish() {
  if (out_.accumulate_weight) return;
  const Problem& problem = call_.plan.problem;
  const std::vector<float> zeros(static_cast<size_t>(problem.hidden), 0.0F);
  for (int64_t row = problem.live_rows(); row < problem.vocab_rows; ++row) {
    write_row(zeros.data(), problem.hidden, out_.weight, row, 0);
  }
}

}  // namespace logitless::cpu
