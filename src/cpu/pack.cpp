// SPDX-License-Identifier: Apache-2.0
#include "cpu/pack.h"

#include <cstring>
#include <numbers>

#include "plan/cpu_tiles.h"
#include "tensor/rows.h"

namespace logitless::cpu {

namespace {

template <typename Element>
void pack_rows(const TensorView& x, int64_t first, int64_t count, const int32_t* index,
               Element* to) {
  const int64_t hidden = x.shape[1];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = index == nullptr ? first + i : index[first + i];
    const Element* from = static_cast<const Element*>(x.data) + token * x.strides[0];
    if (x.strides[1] == 1) {
      std::memcpy(to + i * hidden, from, static_cast<size_t>(hidden) * sizeof(Element));
    } else {
      for (int64_t h = 0; h < hidden; ++h) to[i * hidden + h] = from[h * x.strides[1]];
    }
  }
  const int64_t padding = (kTileTokens - count) * hidden;
  std::memset(to + count * hidden, 0, static_cast<size_t>(padding) * sizeof(Element));
}

}  // namespace

void pack_tokens(const TensorView& x, int64_t first, int64_t count, const int32_t* index,
                 void* to) {
  if (x.dtype == DType::kFloat32) {
    pack_rows(x, first, count, index, static_cast<float*>(to));
  } else {
    pack_rows(x, first, count, index, static_cast<uint16_t*>(to));
  }
}

double temperature_at(const LocalCall& call, int64_t token) {
  if (!call.temperature.present()) return call.tau;
  return static_cast<const float*>(call.temperature.data)[token * call.temperature.strides[0]];
}

void fill_projection_rows(const LocalCall& call, const ProjectionRows& rows) {
  const Problem& problem = call.plan.problem;
  const int64_t padded = round_up(problem.tokens, kTileTokens);
  const int64_t live_rows = problem.live_rows();
  for (int64_t token = 0; token < padded; ++token) {
    const bool real = token < problem.tokens;
    const int64_t id = real ? integer_at(call.target, token) : call.ignore_index;
    const bool counts = real && id != call.ignore_index;
    const int64_t column = id - problem.vocab_start;
    const bool owned = counts && column >= 0 && column < live_rows;
    rows.scale[token] =
        counts ? static_cast<float>(std::numbers::log2e / temperature_at(call, token)) : 0.0F;
    rows.anchor[token] = 0.0F;
    rows.target[token] = owned ? static_cast<int32_t>(column) : -1;
    rows.live[token] = counts ? -1 : 0;
  }
}

const void* element_at(const TensorView& matrix, int64_t row, int64_t column) {
  return static_cast<const std::byte*>(matrix.data) +
         (row * matrix.strides[0] + column * matrix.strides[1]) * size_of(matrix.dtype);
}

}  // namespace logitless::cpu
