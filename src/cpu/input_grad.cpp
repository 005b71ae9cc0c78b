// SPDX-License-Identifier: Apache-2.0
#include "cpu/input_grad.h"

#include <algorithm>
#include <vector>

#include "cpu/pack.h"
#include "cpu/project.h"
#include "plan/cpu_tiles.h"
#include "tensor/rows.h"

namespace logitless::cpu {

namespace {

struct Tile {
  int64_t token, tokens, hidden, width;
};

Tile tile_of(const Problem& problem, int64_t task) {
  const int64_t across = ceil_div(problem.hidden, kGradHidden);
  Tile tile{.token = task / across * kInputGradTokens,
            .tokens = 0,
            .hidden = task % across * kGradHidden,
            .width = 0};
  tile.tokens = std::min(kInputGradTokens, problem.tokens - tile.token);
  tile.width = std::min(kGradHidden, problem.hidden - tile.hidden);
  return tile;
}

int64_t tiles_of(const Problem& problem) {
  return ceil_div(problem.tokens, kInputGradTokens) * ceil_div(problem.hidden, kGradHidden);
}

}  // namespace

InputGrad::InputGrad(const LocalCall& call, Workers& workers, Products& products,
                     const GradientRows& rows, const LocalGradients& out)
    : call_(call),
      workers_(workers),
      products_(products),
      rows_(rows),
      out_(out),
      sum_(call.arena.bytes(region::kInputGradSum) > 0
               ? call.arena.get<float>(region::kInputGradSum)
               : nullptr) {}

void InputGrad::add_stash(const TensorView& stash) {
  const Problem& problem = call_.plan.problem;
  const int64_t columns = call_.plan.stash_columns;
  const int64_t pitch = call_.plan.token_pitch;
  const int64_t element = size_of(problem.dtype);
  auto* tiles = call_.arena.get<float>(region::kInputGradTiles);
  const int64_t tile_floats = kInputGradTokens * std::min(problem.hidden, kGradHidden);

  workers_.run(tiles_of(problem), [&](int64_t task, int worker) {
    const Tile tile = tile_of(problem, task);
    float* acc = tiles + worker * tile_floats;
    for (int64_t column = 0; column < columns; column += kInputGradDepth) {
      products_.run(
          {.m = tile.tokens,
           .n = tile.width,
           .k = std::min(kInputGradDepth, columns - column),
           .a = {.transposed = true, .stride = pitch},
           .b = weight_operand(call_.weight),
           .c_stride = tile.width,
           .dtype = problem.dtype,
           .accumulate = column > 0},
          static_cast<const std::byte*>(stash.data) + (column * pitch + tile.token) * element,
          element_at(call_.weight, column, tile.hidden), acc, worker);
    }
    for (int64_t i = 0; i < tile.tokens; ++i) {
      const int64_t token = tile.token + i;
      float* row = acc + i * tile.width;
      const bool live = rows_.projection.live[token] != 0;
      const float scale = rows_.stash_scale[token];
      for (int64_t h = 0; h < tile.width; ++h) row[h] = live ? row[h] * scale : 0.0F;
      const int64_t target = rows_.projection.target[token];
      if (target >= 0 && target < columns) {
        add_scaled(row, tile.width, rows_.target_term[token], call_.weight, target, tile.hidden);
      }
      if (sum_ != nullptr) {
        std::copy(row, row + tile.width, sum_ + token * problem.hidden + tile.hidden);
      } else {
        write_row(row, tile.width, out_.x, token, tile.hidden);
      }
    }
  });
  begun_ = true;
}

void InputGrad::add_slice(const void* dz, int64_t first, int64_t columns) {
  const Problem& problem = call_.plan.problem;
  const int64_t pitch = call_.plan.token_pitch;
  const int64_t element = size_of(problem.dtype);
  workers_.run(tiles_of(problem), [&](int64_t task, int worker) {
    const Tile tile = tile_of(problem, task);
    for (int64_t column = 0; column < columns; column += kInputGradDepth) {
      products_.run({.m = tile.tokens,
                     .n = tile.width,
                     .k = std::min(kInputGradDepth, columns - column),
                     .a = {.transposed = true, .stride = pitch},
                     .b = weight_operand(call_.weight),
                     .c_stride = problem.hidden,
                     .dtype = problem.dtype,
                     .accumulate = begun_ || column > 0},
                    static_cast<const std::byte*>(dz) + (column * pitch + tile.token) * element,
                    element_at(call_.weight, first + column, tile.hidden),
                    sum_ + tile.token * problem.hidden + tile.hidden, worker);
    }
  });
  begun_ = true;
}

void InputGrad::finish() {
  const Problem& problem = call_.plan.problem;
  if (!begun_) {  // a shard that is all padding
    const std::vector<float> zeros(static_cast<size_t>(problem.hidden), 0.0F);
    for (int64_t token = 0; token < problem.tokens; ++token) {
      if (sum_ != nullptr) {
        std::copy(zeros.begin(), zeros.end(), sum_ + token * problem.hidden);
      } else {
        write_row(zeros.data(), problem.hidden, out_.x, token, 0);
      }
    }
    return;
  }
  if (sum_ == nullptr) return;
  for (int64_t token = 0; token < problem.tokens; ++token) {
    float* row = sum_ + token * problem.hidden;
    // 0·W is NaN where the weight holds infinities; an ignored token's gradient is 0 all the same.
    if (rows_.projection.live[token] == 0) std::fill(row, row + problem.hidden, 0.0F);
    if (out_.x.present()) write_row(row, problem.hidden, out_.x, token, 0);
  }
}

}  // namespace logitless::cpu
