// SPDX-License-Identifier: Apache-2.0
#include "reference/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "logitless/error.h"

namespace logitless::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double read(const TensorView& tensor, int64_t row, int64_t column = 0) {
  const int64_t offset = row * tensor.strides[0] + column * tensor.strides[1];
  if (tensor.dtype == DType::kBFloat16) {
    const uint32_t upper_half = static_cast<const uint16_t*>(tensor.data)[offset];
    return std::bit_cast<float>(upper_half << 16);
  }
  return static_cast<const float*>(tensor.data)[offset];
}

int64_t read_target(const TensorView& target, int64_t token) {
  const int64_t offset = token * target.strides[0];
  return target.dtype == DType::kInt32 ? static_cast<const int32_t*>(target.data)[offset]
                                       : static_cast<const int64_t*>(target.data)[offset];
}

double read_or_zero(const TensorView& upstream, int64_t token) {
  return upstream.present() ? read(upstream, token) : 0.0;
}

// What float32 makes of a value of this size.
double overflow(double logit) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (logit > kLargest) return kInfinity;
  if (logit < -kLargest) return -kInfinity;
  return logit;
}

// The whole vocabulary, widened once: the rows of all shards one after the other.
struct Vocabulary {
  explicit Vocabulary(const Inputs& inputs) : hidden(inputs.x.shape[1]), size(inputs.vocab_size) {
    for (const Shard& shard : inputs.shards) {
      for (int64_t row = 0; row < shard.weight.shape[0]; ++row) {
        ids.push_back(shard.vocab_start + row);
        for (int64_t h = 0; h < hidden; ++h) weight.push_back(read(shard.weight, row, h));
      }
      if (inputs.vocab_size < 0) size = std::max(size, shard.vocab_start + shard.weight.shape[0]);
    }
  }
  int64_t rows() const { return static_cast<int64_t>(ids.size()); }
  bool is_padding(int64_t row) const { return ids[static_cast<size_t>(row)] >= size; }

  int64_t hidden;
  int64_t size;                // V
  std::vector<int64_t> ids;    // [rows] global ids
  std::vector<double> weight;  // [rows, hidden]
};

// Everything that one token's outputs and gradients are made of.
struct Row {
  std::vector<double> x;       // [H]
  std::vector<double> scaled;  // s − m [rows]; −inf for padding
  bool ignored = false;
  double tau = 1.0;
  int64_t target = -1;    // row of the vocabulary, not an id
  double maximum = 0.0;   // m
  double rest = 0.0;      // R
  double sum = 0.0;       // S
  double weighted = 0.0;  // T
};

Row evaluate(const Inputs& inputs, const Vocabulary& vocabulary, int64_t token) {
  Row row;
  const int64_t id = read_target(inputs.target, token);
  row.ignored = id == inputs.ignore_index;
  if (row.ignored) return row;
  if (id < 0 || id >= vocabulary.size) {
    throw Error(ErrorKind::kValue, "target: expected ignore_index " +
                                       std::to_string(inputs.ignore_index) + " or an id in [0, " +
                                       std::to_string(vocabulary.size) + "), got " +
                                       std::to_string(id) + " at token " + std::to_string(token));
  }
  row.tau =
      inputs.temperature.present() ? read(inputs.temperature, token) : inputs.uniform_temperature;
  for (int64_t h = 0; h < vocabulary.hidden; ++h) row.x.push_back(read(inputs.x, token, h));

  row.maximum = -kInfinity;
  bool is_nan = false;
  row.scaled.assign(static_cast<size_t>(vocabulary.rows()), -kInfinity);
  for (int64_t v = 0; v < vocabulary.rows(); ++v) {
    if (vocabulary.is_padding(v)) continue;
    if (vocabulary.ids[static_cast<size_t>(v)] == id) row.target = v;
    const double* weight = vocabulary.weight.data() + v * vocabulary.hidden;
    double logit = 0.0;
    for (int64_t h = 0; h < vocabulary.hidden; ++h)
      logit += row.x[static_cast<size_t>(h)] * weight[h];
    const double scaled = overflow(logit) / row.tau;
    is_nan = is_nan || std::isnan(scaled) || scaled == kInfinity;
    row.scaled[static_cast<size_t>(v)] = scaled;
    row.maximum = std::max(row.maximum, scaled);
  }
  if (is_nan || row.maximum == -kInfinity) {
    row.maximum = row.rest = row.sum = row.weighted = kNaN;
    return row;
  }
  for (int64_t v = 0; v < vocabulary.rows(); ++v) {
    double& scaled = row.scaled[static_cast<size_t>(v)];
    if (scaled == -kInfinity) continue;
    scaled -= row.maximum;
    const double exponential = std::exp(scaled);
    if (v != row.target) row.rest += exponential;
    row.weighted += exponential * scaled;
  }
  row.sum = row.rest + std::exp(row.scaled[static_cast<size_t>(row.target)]);
  return row;
}

double negative_log_likelihood(const Row& row) {
  if (std::isnan(row.sum)) return kNaN;
  const double target = row.scaled[static_cast<size_t>(row.target)];
  constexpr double kFarBelow =
      -30.0;  // exp(−target) below would lose nothing yet, but overflow later
  if (target < kFarBelow) return std::log(row.sum) - target;
  return std::log1p(row.rest * std::exp(-target));
}

std::vector<double> logit_gradients(const Row& row, const Upstream& upstream, int64_t token) {
  const double g = read_or_zero(upstream.nll, token);
  const double h = read_or_zero(upstream.entropy, token);
  const double q = read_or_zero(upstream.lse, token);
  const double mean = row.weighted / row.sum;
  std::vector<double> result(row.scaled.size(), 0.0);
  for (size_t v = 0; v < row.scaled.size(); ++v) {
    const bool is_target = static_cast<int64_t>(v) == row.target;
    const double scaled = row.scaled[v];
    const double p = std::exp(scaled) / row.sum;
    // 0 · (−inf) is a zero here: a class that cannot happen has no part in the entropy.
    const double entropy_term = scaled == -kInfinity ? 0.0 : p * (mean - scaled) * h;
    const double likelihood_term = is_target ? p * q - g * (row.rest / row.sum) : p * (g + q);
    result[v] = (likelihood_term + entropy_term) / row.tau;
  }
  return result;
}

}  // namespace

Statistics forward(const Inputs& inputs) {
  const Vocabulary vocabulary(inputs);
  Statistics result;
  for (int64_t token = 0; token < inputs.target.shape[0]; ++token) {
    const Row row = evaluate(inputs, vocabulary, token);
    result.nll.push_back(row.ignored ? 0.0 : negative_log_likelihood(row));
    result.lse.push_back(row.ignored ? 0.0 : row.maximum + std::log(row.sum));
    const double entropy = std::log(row.sum) - row.weighted / row.sum;
    result.entropy.push_back(row.ignored ? 0.0 : (entropy < 0.0 ? 0.0 : entropy));
  }
  return result;
}

std::vector<std::vector<double>> logit_gradients(const Inputs& inputs, const Upstream& upstream) {
  const Vocabulary vocabulary(inputs);
  std::vector<std::vector<double>> result;
  for (int64_t token = 0; token < inputs.target.shape[0]; ++token) {
    const Row row = evaluate(inputs, vocabulary, token);
    if (row.ignored) {
      result.emplace_back(static_cast<size_t>(vocabulary.rows()), 0.0);
    } else {
      result.push_back(logit_gradients(row, upstream, token));
    }
  }
  return result;
}

Gradients backward(const Inputs& inputs, const Upstream& upstream) {
  const Vocabulary vocabulary(inputs);
  const int64_t tokens = inputs.target.shape[0];
  const int64_t hidden = vocabulary.hidden;
  std::vector<double> dx(static_cast<size_t>(tokens * hidden), 0.0);
  std::vector<double> dw(static_cast<size_t>(vocabulary.rows() * hidden), 0.0);
  for (int64_t token = 0; token < tokens; ++token) {
    const Row row = evaluate(inputs, vocabulary, token);
    if (row.ignored) continue;
    const std::vector<double> dz = logit_gradients(row, upstream, token);
    for (int64_t v = 0; v < vocabulary.rows(); ++v) {
      if (vocabulary.is_padding(v)) continue;  // not even 0 · NaN of an uninitialised row
      for (int64_t h = 0; h < hidden; ++h) {
        dx[static_cast<size_t>(token * hidden + h)] +=
            dz[static_cast<size_t>(v)] * vocabulary.weight[static_cast<size_t>(v * hidden + h)];
        dw[static_cast<size_t>(v * hidden + h)] +=
            dz[static_cast<size_t>(v)] * row.x[static_cast<size_t>(h)];
      }
    }
  }
  Gradients result{std::move(dx), {}};
  auto begin = dw.begin();
  for (const Shard& shard : inputs.shards) {
    const auto end = begin + shard.weight.shape[0] * hidden;
    result.weight.emplace_back(begin, end);
    begin = end;
  }
  return result;
}

}  // namespace logitless::reference
