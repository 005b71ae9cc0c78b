// SPDX-License-Identifier: Apache-2.0
#include "checks.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

namespace logitless::testing {
namespace {

// A [rows, columns] matrix in double.
struct Matrix {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<double> values;
};

// One gradient, and what its error may be measured by.
struct Measures {
  Matrix want;   // fp64
  Matrix terms;  // Σ |dz| |operand|: what is summed before anything cancels
  Matrix parts;  // the same with the parts of dz that may cancel taken one by one
  Matrix eager;  // logits, dz and the result rounded to bf16, sums in fp64
  Matrix floor;  // what probabilities below 2^-40 amount to
};

// What the reference, and bf16 arithmetic as eager frameworks do it, make of one problem.
struct Truth {
  Measures dx, dw;
  double largest = 0.0;  // max |s|
};

// Tests mask classes with weights and logits beyond this size; they set no scale.
constexpr double kMasking = 1e30;

double bf16(double value) { return round_to_bf16(static_cast<float>(value)); }

std::vector<double> weight_of(const Case& problem) {
  std::vector<double> result;
  for (const Tensor& shard : problem.weight) {
    const std::vector<double> rows = shard.values();
    result.insert(result.end(), rows.begin(), rows.end());
  }
  return result;
}

double tau_of(const Case& problem, int64_t token) {
  return problem.temperature ? problem.temperature->get(token) : problem.spec.temperature;
}

double largest_scaled_logit(const Case& problem) {
  const std::vector<double> weight = weight_of(problem);
  const std::vector<double> x = problem.x.values();
  const int64_t hidden = problem.spec.hidden;
  double largest = 0.0;
  for (int64_t i = 0; i < problem.spec.tokens; ++i) {
    if (problem.target.id(i) == problem.ignore_index) continue;
    for (int64_t v = 0; v < problem.vocab_size; ++v) {
      double logit = 0.0;
      for (int64_t h = 0; h < hidden; ++h) {
        logit +=
            x[static_cast<size_t>(i * hidden + h)] * weight[static_cast<size_t>(v * hidden + h)];
      }
      const double size = std::abs(logit / tau_of(problem, i));
      if (size < kMasking) largest = std::max(largest, size);
    }
  }
  return largest;
}

// dz of one token from logits that were rounded to bf16, rounded to bf16 itself.
std::vector<double> eager_logit_gradients(const Case& problem, const Ask& ask, int64_t token,
                                          const std::vector<double>& x,
                                          const std::vector<double>& weight) {
  const int64_t hidden = problem.spec.hidden;
  const double tau = tau_of(problem, token);
  std::vector<double> s(static_cast<size_t>(problem.vocab_size));  // padding left out
  for (int64_t v = 0; v < problem.vocab_size; ++v) {
    double logit = 0.0;
    for (int64_t h = 0; h < hidden; ++h) {
      logit +=
          x[static_cast<size_t>(token * hidden + h)] * weight[static_cast<size_t>(v * hidden + h)];
    }
    s[static_cast<size_t>(v)] = bf16(bf16(logit) / tau);
  }
  const double maximum = *std::max_element(s.begin(), s.end());
  double sum = 0.0;
  double weighted = 0.0;
  for (const double value : s) {
    const double exponential = std::exp(value - maximum);
    sum += exponential;
    if (exponential > 0.0) weighted += exponential * (value - maximum);
  }
  const double g = ask.use_g ? problem.grad_nll.get(token) : 0.0;
  const double h = ask.use_h ? problem.grad_entropy.get(token) : 0.0;
  const double q = ask.use_q ? problem.grad_lse.get(token) : 0.0;
  for (int64_t v = 0; v < problem.vocab_size; ++v) {
    double& value = s[static_cast<size_t>(v)];
    const double p = std::exp(value - maximum) / sum;
    const double entropy_term = p > 0.0 ? p * (weighted / sum - (value - maximum)) * h : 0.0;
    const double hit = problem.target.id(token) == v ? 1.0 : 0.0;
    value = bf16((p * (g + q) + entropy_term - g * hit) / tau);
  }
  return s;
}

Matrix zeros(int64_t rows, int64_t columns) {
  return {rows, columns, std::vector<double>(static_cast<size_t>(rows * columns), 0.0)};
}

Measures measures(int64_t rows, int64_t columns, std::vector<double> want) {
  const Matrix zero = zeros(rows, columns);
  return {{rows, columns, std::move(want)}, zero, zero, zero, zero};
}

void add(Measures& to, size_t at, double operand, double dz, double parts, double eager) {
  to.terms.values[at] += std::abs(dz * operand);
  to.parts.values[at] += parts * std::abs(operand);
  to.eager.values[at] += eager * operand;
}

Truth truth_of(const Case& problem, const Ask& ask) {
  const int64_t tokens = problem.spec.tokens;
  const int64_t hidden = problem.spec.hidden;
  const reference::Inputs inputs = reference_inputs(problem);
  const reference::Upstream upstream = reference_upstream(problem, ask);
  const std::vector<double> x = problem.x.values();
  const std::vector<double> weight = weight_of(problem);

  Truth truth;
  truth.largest = largest_scaled_logit(problem);
  reference::Gradients gradients = reference::backward(inputs, upstream);
  std::vector<double> dw;
  for (const std::vector<double>& shard : gradients.weight)
    dw.insert(dw.end(), shard.begin(), shard.end());
  truth.dx = measures(tokens, hidden, std::move(gradients.x));
  truth.dw = measures(problem.vocab_rows(), hidden, std::move(dw));

  // dz is linear in g, h and q: its parts are the gradients of each alone. Where s is near its mean the
  // entropy's part vanishes but not its error, which goes with p |h|: the part of a q of h's size.
  const auto all = reference::logit_gradients(inputs, upstream);
  const auto without_h = reference::logit_gradients(inputs, {upstream.nll, {}, upstream.lse});
  const auto only_h = reference::logit_gradients(inputs, {{}, upstream.entropy, {}});
  const auto h_as_q = reference::logit_gradients(inputs, {{}, {}, upstream.entropy});
  const bool is_bf16 = problem.spec.dtype == DType::kBFloat16;
  for (int64_t i = 0; i < tokens; ++i) {
    if (problem.target.id(i) == problem.ignore_index) continue;
    const auto at_i = static_cast<size_t>(i);
    const std::vector<double> eager =
        is_bf16 ? eager_logit_gradients(problem, ask, i, x, weight) : all[at_i];
    const double size =
        (ask.use_g ? std::abs(problem.grad_nll.get(i)) : 0.0) +
        (ask.use_q ? std::abs(problem.grad_lse.get(i)) : 0.0) +
        (ask.use_h ? (1.0 + truth.largest) * std::abs(problem.grad_entropy.get(i)) : 0.0);
    const double floor = std::ldexp(size / tau_of(problem, i), -38);
    for (int64_t v = 0; v < problem.vocab_size; ++v) {
      const auto at_v = static_cast<size_t>(v);
      const double dz = all[at_i][at_v];
      const double parts = std::abs(without_h[at_i][at_v]) + std::abs(only_h[at_i][at_v]) +
                           std::abs(h_as_q[at_i][at_v]);
      for (int64_t h = 0; h < hidden; ++h) {
        const auto at_x = static_cast<size_t>(i * hidden + h);
        const auto at_w = static_cast<size_t>(v * hidden + h);
        add(truth.dx, at_x, weight[at_w], dz, parts, eager[at_v]);
        add(truth.dw, at_w, x[at_x], dz, parts, eager[at_v]);
        // All small probabilities of a row together are below 2^-40; those of a column add up.
        const double w = std::abs(weight[at_w]) < kMasking ? std::abs(weight[at_w]) : 0.0;
        truth.dx.floor.values[at_x] = std::max(truth.dx.floor.values[at_x], floor * w);
        truth.dw.floor.values[at_w] += floor * std::abs(x[at_x]);
      }
    }
  }
  for (double& value : truth.dx.eager.values) value = bf16(value);
  for (double& value : truth.dw.eager.values) value = bf16(value);
  return truth;
}

double norm(const double* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += values[i] * values[i];
  return std::sqrt(sum);
}

// ‖got − want‖ / ‖want‖ over everything, and the 99th percentile of the same over rows.
struct Error64 {
  double whole = 0.0;
  double rows = 0.0;
};

Error64 error_of(const Matrix& got, const Matrix& want) {
  std::vector<double> difference(want.values.size());
  for (size_t i = 0; i < difference.size(); ++i) difference[i] = got.values[i] - want.values[i];
  const double whole = norm(want.values.data(), want.rows * want.columns);
  Error64 result;
  if (whole > 0.0) result.whole = norm(difference.data(), want.rows * want.columns) / whole;
  std::vector<double> rows;
  for (int64_t row = 0; row < want.rows; ++row) {
    const double size = norm(want.values.data() + row * want.columns, want.columns);
    if (size > 1e-9 * whole) {  // below it is nothing but vanishing probabilities
      rows.push_back(norm(difference.data() + row * want.columns, want.columns) / size);
    }
  }
  std::sort(rows.begin(), rows.end());
  if (!rows.empty()) result.rows = rows[(rows.size() - 1) * 99 / 100];
  return result;
}

// A norm of few elements is a handful of rounding errors, of which the terms say more.
constexpr int64_t kFewElements = 512;
constexpr int64_t kFewColumns = 16;
constexpr int64_t kFewRows = 100;  // the 99th percentile of fewer is their maximum

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

void check_matrix(const std::string& name, const Matrix& got, const Measures& measures,
                  bool is_bf16, double largest) {
  INFO("gradient: " << name);
  const Matrix& want = measures.want;
  REQUIRE(got.values.size() == want.values.size());
  const double tolerance = 1e-5 * std::max(1.0, largest);
  // bf16: 2^-9 is half a unit in the last place, and each of E, X' and the result is rounded once.
  const double of_result = is_bf16 ? std::ldexp(1.0, -8) : tolerance;
  const double of_terms = is_bf16 ? std::ldexp(1.0, -7) : 0.0;
  int64_t wrong = 0;
  std::string first;
  for (int64_t row = 0; row < want.rows; ++row) {
    for (int64_t column = 0; column < want.columns; ++column) {
      const auto i = static_cast<size_t>(row * want.columns + column);
      if (std::isnan(want.values[i]) && std::isnan(got.values[i])) continue;
      const double limit = of_result * std::abs(want.values[i]) +
                           of_terms * measures.terms.values[i] +
                           tolerance * measures.parts.values[i] + measures.floor.values[i];
      if (std::abs(got.values[i] - want.values[i]) <= limit) continue;
      if (wrong++ == 0) {
        first = "[" + std::to_string(row) + ", " + std::to_string(column) + "]: expected " +
                number(want.values[i]) + " within " + number(limit) + ", got " +
                number(got.values[i]);
      }
    }
  }
  INFO("first: " << first);
  CHECK(wrong == 0);

  const bool has_nan = std::any_of(want.values.begin(), want.values.end(),
                                   [](double value) { return std::isnan(value); });
  if (want.rows * want.columns < kFewElements || has_nan) return;
  const Error64 ours = error_of(got, want);
  Error64 limit{tolerance, tolerance * 5.0 / 3.0};
  if (is_bf16) {
    const Error64 theirs = error_of(measures.eager, want);
    limit = {std::max(1.5 * theirs.whole, 3e-3), std::max(1.5 * theirs.rows, 5e-3)};
  }
  CHECK(ours.whole <= limit.whole);
  if (want.columns >= kFewColumns && want.rows >= kFewRows) CHECK(ours.rows <= limit.rows);
}

void check_vector(const std::string& name, const Tensor& got, const std::vector<double>& want,
                  double limit) {
  INFO("output: " << name);
  REQUIRE(got.size() == static_cast<int64_t>(want.size()));
  int64_t wrong = 0;
  std::string first;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double expected = want[static_cast<size_t>(i)];
    const double seen = got.get(i);
    const bool equal = std::isfinite(expected) ? std::abs(seen - expected) <= limit
                       : std::isnan(expected)  ? std::isnan(seen)
                                               : seen == expected;
    if (equal) continue;
    if (wrong++ == 0) {
      first = "token " + std::to_string(i) + ": expected " + number(expected) + " within " +
              number(limit) + ", got " + number(seen);
    }
  }
  INFO("first: " << first);
  CHECK(wrong == 0);
}

}  // namespace

void check_statistics(const Case& problem, const std::vector<Result>& results) {
  const reference::Statistics want = reference::forward(reference_inputs(problem));
  const double largest = largest_scaled_logit(problem);
  const double hidden = std::max(1.0, static_cast<double>(problem.spec.hidden) / 4096.0);
  const double limit = problem.spec.dtype == DType::kBFloat16
                           ? 1e-5 * hidden * std::max(3.0, largest)
                           : 1e-5 * std::max(1.0, largest);
  check_vector("nll", results[0].nll, want.nll, limit);
  check_vector("lse", results[0].lse, want.lse, limit);
  if (results[0].entropy.size() > 0) {
    check_vector("entropy", results[0].entropy, want.entropy, limit);
  }
  for (const Result& other : results) {
    CHECK(same_bits(other.nll, results[0].nll));
    CHECK(same_bits(other.lse, results[0].lse));
    CHECK(same_bits(other.entropy, results[0].entropy));
  }
}

void check_gradients(const Case& problem, const Ask& ask, const std::vector<Result>& results) {
  const Truth truth = truth_of(problem, ask);
  const bool is_bf16 = problem.spec.dtype == DType::kBFloat16;
  if (ask.input_grad) {
    check_matrix("dX", {truth.dx.want.rows, truth.dx.want.columns, results[0].dx.values()},
                 truth.dx, is_bf16, truth.largest);
    for (const Result& other : results) CHECK(same_bits(other.dx, results[0].dx));
  }
  if (ask.weight_grad) {
    Matrix got{truth.dw.want.rows, truth.dw.want.columns, {}};
    for (const Result& result : results) {
      const std::vector<double> shard = result.dw.values();
      got.values.insert(got.values.end(), shard.begin(), shard.end());
    }
    check_matrix("dW", got, truth.dw, is_bf16, truth.largest);
  }
}

std::vector<Result> run_and_check(const Case& problem, const Ask& ask) {
  const std::vector<Result> results = run(problem, ask);
  check_statistics(problem, results);
  if (ask.input_grad || ask.weight_grad) check_gradients(problem, ask, results);
  return results;
}

Error thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  FAIL("expected an Error, got none");
  return {ErrorKind::kUnavailable, ""};
}

bool all_returned(const std::vector<std::optional<Error>>& thrown) {
  bool all = true;
  for (size_t rank = 0; rank < thrown.size(); ++rank) {
    if (!thrown[rank]) continue;
    MESSAGE("rank " << rank << " threw: " << std::string(thrown[rank]->what()));
    all = false;
  }
  return all;
}

bool says(const Error& error, std::initializer_list<std::string> parts) {
  const std::string sentence = error.what();
  for (const std::string& part : parts) {
    if (sentence.find(part) != std::string::npos) continue;
    MESSAGE("expected \"" << part << "\" in: " << sentence);
    return false;
  }
  return true;
}

}  // namespace logitless::testing
