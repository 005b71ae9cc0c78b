// SPDX-License-Identifier: Apache-2.0
// The truth itself: closed forms, and gradients that are the derivatives of its own forward.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "checks.h"

using namespace logitless;
using namespace logitless::testing;

namespace {

// Σ_i g_i nll_i + h_i entropy_i + q_i lse_i: its derivatives are what backward returns.
double objective(const Case& problem) {
  const reference::Statistics statistics = reference::forward(reference_inputs(problem));
  double sum = 0.0;
  for (int64_t i = 0; i < problem.spec.tokens; ++i) {
    const auto at = static_cast<size_t>(i);
    sum += problem.grad_nll.get(i) * statistics.nll[at] +
           problem.grad_entropy.get(i) * statistics.entropy[at] +
           problem.grad_lse.get(i) * statistics.lse[at];
  }
  return sum;
}

// (f(a + d) − f(a − d)) / 2d with the d that float32 really makes of 2^-10.
double slope(Case& problem, Tensor& tensor, int64_t row, int64_t column) {
  const double value = tensor.get(row, column);
  tensor.set(row, column, value + std::ldexp(1.0, -10));
  const double above = objective(problem);
  const double upper = tensor.get(row, column);
  tensor.set(row, column, value - std::ldexp(1.0, -10));
  const double below = objective(problem);
  const double lower = tensor.get(row, column);
  tensor.set(row, column, value);
  return (above - below) / (upper - lower);
}

}  // namespace

TEST_CASE("two classes have a closed form") {
  // s = (0, a): p of the second is the logistic function of a.
  for (const double a : {-50.0, -3.0, 0.0, 0.5, 20.0, 50.0}) {
    for (const double tau : {1.0, 4.0}) {
      CAPTURE(a);
      Case problem = make_case({.tokens = 2, .hidden = 1, .shards = {2}, .dtype = DType::kFloat32});
      problem.spec.temperature = static_cast<float>(tau);
      for (int64_t i = 0; i < 2; ++i) {
        problem.x.set(i, 0, a * tau);
        problem.target.set_id(i, i);
      }
      problem.set_weight(0, 0, 0.0);
      problem.set_weight(1, 0, 1.0);
      const reference::Statistics got = reference::forward(reference_inputs(problem));
      const double p = 1.0 / (1.0 + std::exp(-a));
      const double rest = 1.0 / (1.0 + std::exp(a));  // 1 − p
      CHECK(got.nll[0] == doctest::Approx(std::log1p(std::exp(a))).epsilon(1e-12));
      CHECK(got.nll[1] == doctest::Approx(std::log1p(std::exp(-a))).epsilon(1e-12));
      CHECK(got.lse[1] == doctest::Approx(std::log1p(std::exp(a))).epsilon(1e-12));
      const double entropy = p * std::log1p(std::exp(-a)) + rest * std::log1p(std::exp(a));
      CHECK(std::abs(got.entropy[0] - entropy) <= 1e-13);

      const reference::Upstream upstream{problem.grad_nll.view(), {}, {}};
      const auto dz = reference::logit_gradients(reference_inputs(problem), upstream);
      const double g = problem.grad_nll.get(1);
      CHECK(dz[1][1] == doctest::Approx(-g * rest / tau).epsilon(1e-12));
      CHECK(dz[1][0] == doctest::Approx(g * rest / tau).epsilon(1e-12));
    }
  }
}

TEST_CASE("gradients are the derivatives of forward") {
  Case problem = make_case({.tokens = 6,
                            .hidden = 5,
                            .shards = {4, 9, 3},
                            .dtype = DType::kFloat32,
                            .logit_std = 2.0,
                            .per_token_temperature = true,
                            .ignore_every = 4});
  problem.vocab_size = 14;
  for (int64_t i = 0; i < 6; ++i) {
    if (problem.target.id(i) >= 14) problem.target.set_id(i, 13);
  }
  const reference::Gradients gradients =
      reference::backward(reference_inputs(problem), reference_upstream(problem, {}));
  double largest = 0.0;
  for (int64_t h = 0; h < 5; ++h) {
    for (int64_t i = 0; i < 6; ++i) {
      const double analytic = gradients.x[static_cast<size_t>(i * 5 + h)];
      CHECK(std::abs(analytic - slope(problem, problem.x, i, h)) <= 1e-4);
      largest = std::max(largest, std::abs(analytic));
    }
    for (size_t shard = 0; shard < 3; ++shard) {
      for (int64_t v = 0; v < problem.weight[shard].rows(); ++v) {
        const double analytic = gradients.weight[shard][static_cast<size_t>(v * 5 + h)];
        CHECK(std::abs(analytic - slope(problem, problem.weight[shard], v, h)) <= 1e-4);
      }
    }
  }
  CHECK(largest > 0.1);  // the tolerance above says something
}

TEST_CASE("shards in any order are one vocabulary") {
  const Case split = make_case({.tokens = 7, .hidden = 6, .shards = {5, 11, 2}});
  reference::Inputs inputs = reference_inputs(split);
  const reference::Statistics want = reference::forward(inputs);
  std::swap(inputs.shards[0], inputs.shards[2]);
  const reference::Statistics got = reference::forward(inputs);
  for (size_t i = 0; i < 7; ++i) {
    CHECK(got.nll[i] == doctest::Approx(want.nll[i]).epsilon(1e-14));
    CHECK(got.entropy[i] == doctest::Approx(want.entropy[i]).epsilon(1e-12));
  }
}

TEST_CASE("infinite and absent logits mean what the header says") {
  Case problem = make_case({.tokens = 5, .hidden = 2, .shards = {4}, .dtype = DType::kFloat32});
  for (int64_t v = 0; v < 4; ++v) {
    problem.set_weight(v, 0, v == 3 ? -3e38 : 0.0);
    problem.set_weight(v, 1, v == 2 ? 3e38 : 0.0);
  }
  const double x[5][2] = {{2.0, 0.0}, {2.0, 0.0}, {0.0, 2.0}, {std::nan(""), 0.0}, {2.0, 0.0}};
  const int64_t targets[5] = {0, 3, 0, 0, -100};
  for (int64_t i = 0; i < 5; ++i) {
    problem.x.set(i, 0, x[i][0]);
    problem.x.set(i, 1, x[i][1]);
    problem.target.set_id(i, targets[i]);
  }
  const reference::Inputs inputs = reference_inputs(problem);
  const reference::Statistics got = reference::forward(inputs);
  const auto dz = reference::logit_gradients(inputs, reference_upstream(problem, {}));
  CHECK(got.nll[0] == doctest::Approx(std::log(3.0)));
  CHECK(got.entropy[0] == doctest::Approx(std::log(3.0)));
  CHECK(dz[0][3] == 0.0);
  CHECK(got.nll[1] == std::numeric_limits<double>::infinity());
  CHECK(got.lse[1] == doctest::Approx(std::log(3.0)));
  CHECK(dz[1][3] == -problem.grad_nll.get(1));
  CHECK(std::isnan(got.nll[2]));
  CHECK(std::isnan(got.lse[3]));
  CHECK(std::isnan(dz[3][1]));
  CHECK(got.nll[4] == 0.0);
  for (const double value : dz[4]) CHECK(value == 0.0);

  for (int64_t v = 0; v < 4; ++v) problem.set_weight(v, 0, -3e38);
  CHECK(std::isnan(reference::forward(reference_inputs(problem)).lse[0]));
}

TEST_CASE("a target outside the vocabulary is an error with its value and place") {
  Case problem = make_case({.tokens = 3, .hidden = 2, .shards = {4}});
  problem.target.set_id(1, 4);
  const Error error = thrown_by([&] { reference::forward(reference_inputs(problem)); });
  CHECK(says(error, {"target", "got 4 at token 1", "[0, 4)"}));
}
