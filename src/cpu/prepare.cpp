// SPDX-License-Identifier: Apache-2.0
#include "cpu/prepare.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "cpu/pack.h"
#include "plan/cpu_tiles.h"
#include "tensor/bf16.h"

namespace logitless::cpu {

namespace {

double upstream_at(const TensorView& gradient, int64_t token) {
  if (!gradient.present()) return 0.0;
  return static_cast<const float*>(gradient.data)[token * gradient.strides[0]];
}

}  // namespace

void fill_gradient_rows(const LocalCall& call, const Saved& saved, const Upstream& upstream,
                        const GradientRows& rows) {
  const Problem& problem = call.plan.problem;
  fill_projection_rows(call, rows.projection);
  const auto* row = static_cast<const float*>(saved.rows.data);
  const int64_t stride = saved.rows.strides[0];
  for (int64_t token = 0; token < round_up(problem.tokens, kTileTokens); ++token) {
    if (rows.projection.live[token] == 0) {
      rows.stash_scale[token] = rows.p_scale[token] = 0.0F;
      rows.slope0[token] = rows.slope1[token] = rows.target_term[token] = 0.0F;
      continue;
    }
    const double k = row[token];
    const double top = row[stride + token];
    const double rest = row[2 * stride + token];
    const double sum = row[3 * stride + token];
    const double moment = row[4 * stride + token];
    const double exponent = row[5 * stride + token];
    const double g = upstream_at(upstream.nll, token);
    const double h = upstream_at(upstream.entropy, token);
    const double q = upstream_at(upstream.lse, token);
    const double tau = temperature_at(call, token);
    const double c = std::exp2(k - top) / sum;
    const double p_target = std::exp2(exponent) / sum;
    double slope0 = (g + q) / tau;
    double entropy_term = 0.0;
    if (h != 0.0) {  // without an entropy there is no moment either
      const double mean = moment / sum;
      slope0 += h * std::numbers::ln2 / tau * (mean + top - k);
      if (p_target != 0.0) entropy_term = h * p_target * std::numbers::ln2 * (mean - exponent);
    }
    rows.projection.anchor[token] = static_cast<float>(k);
    rows.p_scale[token] = static_cast<float>(c);
    rows.slope0[token] = static_cast<float>(slope0);
    rows.slope1[token] = static_cast<float>(-h * std::numbers::ln2 / tau);
    rows.stash_scale[token] = static_cast<float>(c * slope0);
    rows.target_term[token] =
        static_cast<float>((q * p_target - g * (rest / sum) + entropy_term) / tau);
  }
}

void scale_tokens(const LocalCall& call, const GradientRows& rows, const float* factor,
                  double extra, int64_t token, void* to) {
  const int64_t hidden = call.plan.problem.hidden;
  const int64_t element = size_of(call.x.dtype);
  auto* bytes = static_cast<std::byte*>(to) + token * hidden * element;
  if (token >= call.plan.problem.tokens || rows.projection.live[token] == 0) {
    std::memset(bytes, 0, static_cast<size_t>(hidden * element));
    return;
  }
  const auto scale = static_cast<float>(extra * (factor == nullptr ? 1.0 : factor[token]));
  const int64_t first = token * call.x.strides[0];
  const int64_t step = call.x.strides[1];
  if (call.x.dtype == DType::kFloat32) {
    const auto* from = static_cast<const float*>(call.x.data) + first;
    auto* row = reinterpret_cast<float*>(bytes);
    for (int64_t h = 0; h < hidden; ++h) row[h] = scale * from[h * step];
  } else {
    const auto* from = static_cast<const uint16_t*>(call.x.data) + first;
    auto* row = reinterpret_cast<uint16_t*>(bytes);
    for (int64_t h = 0; h < hidden; ++h)
      row[h] = float_to_bf16(scale * bf16_to_float(from[h * step]));
  }
}

}  // namespace logitless::cpu
