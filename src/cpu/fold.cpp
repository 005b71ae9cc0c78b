// SPDX-License-Identifier: Apache-2.0
#include "cpu/fold.h"

#include <limits>

#include "cpu/lanes.h"
#include "plan/cpu_tiles.h"
#include "tensor/bf16.h"

namespace logitless::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <bool kMoment>
LOGITLESS_INLINE void fold_lanes(float* logits, int64_t columns, int64_t first_column,
                                 const ProjectionRows& rows, const TileStatistics& out, int lane) {
  const Floats scale = load<Floats>(rows.scale + lane);
  const Floats anchor = load<Floats>(rows.anchor + lane);
  const Ints target = load<Ints>(rows.target + lane);
  const Ints live = load<Ints>(rows.live + lane);
  Floats sum{};
  Floats moment{};
  Floats maximum = splat(-kInfinity);
  Floats exponent{};
  for (int64_t group = 0; group < columns; group += kGroupVocab) {
    const int64_t end = group + kGroupVocab < columns ? group + kGroupVocab : columns;
    Floats group_sum{};
    Floats group_moment{};
    for (int64_t column = group; column < end; ++column) {
      float* place = logits + column * kTileTokens + lane;
      const Floats z = load<Floats>(place);
      const Floats u = z * scale - anchor;
      const Ints is_target = target == static_cast<int32_t>(first_column + column);
      exponent = is_target ? u : exponent;
      maximum = z > maximum ? z : maximum;
      Floats e = exp2_lanes(u);
      e = (live & ~is_target) ? e : Floats{};
      group_sum += e;
      if constexpr (kMoment) group_moment += e == Floats{} ? e : e * u;  // 0 · (−inf) adds nothing
      store(place, e);
    }
    sum += group_sum;
    moment += group_moment;
  }
  store(out.sum + lane, sum);
  store(out.maximum + lane, maximum);
  if constexpr (kMoment) store(out.moment + lane, moment);
  // Tiles of the same tokens run at once: only the one that holds the target writes its exponent.
  for (int i = 0; i < kLanes; ++i) {
    const int64_t column = target[i] - first_column;
    if (column >= 0 && column < columns) out.target_exponent[lane + i] = exponent[i];
  }
}

}  // namespace

LOGITLESS_CLONES
void find_anchors(const float* logits, int64_t columns, const float* scale, float* anchor) {
  for (int lane = 0; lane < kTileTokens; lane += kLanes) {
    const Floats factor = load<Floats>(scale + lane);
    Floats top = splat(-kInfinity);
    for (int64_t column = 0; column < columns; ++column) {
      const Floats u = load<Floats>(logits + column * kTileTokens + lane) * factor;
      top = (u > top) & (u < splat(kInfinity)) ? u : top;  // false for NaN
    }
    for (int i = 0; i < kLanes; ++i) {
      const float highest = top[i];
      anchor[lane + i] = highest == -kInfinity ? 0.0F : __builtin_ceilf(highest);
    }
  }
}

LOGITLESS_CLONES
void fold_statistics(float* logits, int64_t columns, int64_t first_column,
                     const ProjectionRows& rows, const TileStatistics& out) {
  for (int lane = 0; lane < kTileTokens; lane += kLanes) {
    if (out.moment != nullptr) {
      fold_lanes<true>(logits, columns, first_column, rows, out, lane);
    } else {
      fold_lanes<false>(logits, columns, first_column, rows, out, lane);
    }
  }
}

LOGITLESS_CLONES
void fold_gradients(float* logits, int64_t columns, int64_t first_column,
                    const GradientRows& rows) {
  for (int lane = 0; lane < kTileTokens; lane += kLanes) {
    const Floats scale = load<Floats>(rows.projection.scale + lane);
    const Floats anchor = load<Floats>(rows.projection.anchor + lane);
    const Ints target = load<Ints>(rows.projection.target + lane);
    const Ints live = load<Ints>(rows.projection.live + lane);
    const Floats p_scale = load<Floats>(rows.p_scale + lane);
    const Floats slope0 = load<Floats>(rows.slope0 + lane);
    const Floats slope1 = load<Floats>(rows.slope1 + lane);
    const Floats target_term = load<Floats>(rows.target_term + lane);
    for (int64_t column = 0; column < columns; ++column) {
      float* place = logits + column * kTileTokens + lane;
      const Floats u = load<Floats>(place) * scale - anchor;
      const Floats p = exp2_lanes(u) * p_scale;
      const Ints is_target = target == static_cast<int32_t>(first_column + column);
      Floats dz = p == Floats{} ? p : p * (slope0 + slope1 * u);  // 0 · (−inf) is 0
      dz = is_target ? target_term : dz;
      store(place, live ? dz : Floats{});
    }
  }
}

LOGITLESS_CLONES
void store_tile(const float* tile, int64_t columns, int64_t tokens, const int32_t* index, void* to,
                int64_t pitch, DType dtype) {
  for (int64_t column = 0; column < columns; ++column) {
    const float* from = tile + column * kTileTokens;
    auto* floats = static_cast<float*>(to) + column * pitch;
    auto* halves = static_cast<uint16_t*>(to) + column * pitch;
    const bool wide = dtype == DType::kFloat32;
    if (index == nullptr) {
      for (int64_t lane = 0; lane < tokens; lane += kLanes) {
        const Floats value = load<Floats>(from + lane);
        if (wide) {
          store(floats + lane, value);
        } else {
          store(halves + lane, bf16_lanes(value));
        }
      }
      continue;
    }
    for (int64_t lane = 0; lane < tokens; ++lane) {
      if (wide) {
        floats[index[lane]] = from[lane];
      } else {
        halves[index[lane]] = float_to_bf16(from[lane]);
      }
    }
  }
}

ProjectionRows rows_at(const ProjectionRows& rows, int64_t token) {
  return {rows.scale + token, rows.anchor + token, rows.target + token, rows.live + token};
}

GradientRows rows_at(const GradientRows& rows, int64_t token) {
  return {rows_at(rows.projection, token),
          rows.stash_scale + token,
          rows.p_scale + token,
          rows.slope0 + token,
          rows.slope1 + token,
          rows.target_term + token};
}

}  // namespace logitless::cpu
