// SPDX-License-Identifier: Apache-2.0
#include "head/merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "comm/combine.h"
#include "tensor/rows.h"

namespace logitless {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
// Below this exponent of the target, S/2^e' leaves the range in which log1p gains anything.
constexpr double kSmallTarget = -20.0;

bool has_mass(const TokenStatistics& rank, bool owner) {
  return rank.sum != 0.0 || (owner && rank.target_exponent != -kInfinity);  // true for NaN
}

struct Sums {
  double sum = 0.0;
  double moment = 0.0;
};

Sums tree_merge(const TokenStatistics* ranks, int first, int last, double top) {
  if (last - first == 1) {
    const TokenStatistics& rank = ranks[first];
    if (rank.sum == 0.0) return {};
    const double weight = std::exp2(rank.anchor - top);
    return {weight * rank.sum, weight * (rank.moment + (rank.anchor - top) * rank.sum)};
  }
  const int middle = tree_middle(first, last);
  const Sums left = tree_merge(ranks, first, middle, top);
  const Sums right = tree_merge(ranks, middle, last, top);
  return {left.sum + right.sum, left.moment + right.moment};
}

}  // namespace

MergedToken merge_token(const TokenStatistics* ranks, int count, int owner) {
  MergedToken merged;
  double top = -kInfinity;
  for (int rank = 0; rank < count; ++rank) {
    if (has_mass(ranks[rank], rank == owner)) top = std::max(top, ranks[rank].anchor);
  }
  merged.nll = merged.lse = merged.entropy = merged.rest = merged.sum = merged.moment = kNan;
  merged.target_exponent = kNan;
  merged.top = top == -kInfinity ? 0.0 : top;
  if (top == -kInfinity) return merged;  // every class is masked

  const Sums rest = tree_merge(ranks, 0, count, top);
  const double exponent = ranks[owner].target_exponent + (ranks[owner].anchor - top);
  const double target = std::exp2(exponent);
  const double sum = rest.sum + target;
  if (!(sum < kInfinity)) return merged;  // NaN or +inf somewhere

  merged.rest = rest.sum;
  merged.sum = sum;
  merged.moment = rest.moment + (target > 0.0 ? target * exponent : 0.0);
  merged.target_exponent = exponent;
  const double log2_sum = std::log2(sum);
  merged.lse = std::numbers::ln2 * (top + log2_sum);
  merged.nll = exponent >= kSmallTarget ? std::log1p(rest.sum / target)
                                        : std::numbers::ln2 * (log2_sum - exponent);
  merged.entropy = std::max(0.0, std::numbers::ln2 * (log2_sum - merged.moment / sum));
  return merged;
}

void merge(const Agreement& agreement, int rank, const TensorView& target, int64_t ignore_index,
           const float* statistics, const Outputs& outputs, const TensorView& rows) {
  const int64_t tokens = target.shape[0];
  const int ranks = static_cast<int>(agreement.shards.size());
  std::vector<TokenStatistics> token_statistics(static_cast<size_t>(ranks));
  const auto put = [](const TensorView& to, int64_t token, double value) {
    if (to.present())
      static_cast<float*>(to.data)[token * to.strides[0]] = static_cast<float>(value);
  };
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t id = integer_at(target, token);
    MergedToken merged;
    double anchor = 0.0;
    if (id != ignore_index) {
      for (int r = 0; r < ranks; ++r) {
        const float* part = statistics + r * 4 * tokens + token;
        token_statistics[static_cast<size_t>(r)] = {part[0], part[tokens], part[2 * tokens],
                                                    part[3 * tokens]};
      }
      anchor = token_statistics[static_cast<size_t>(rank)].anchor;
      merged = merge_token(token_statistics.data(), ranks, agreement.owner_of(id));
    }
    put(outputs.nll, token, merged.nll);
    put(outputs.lse, token, merged.lse);
    put(outputs.entropy, token, merged.entropy);
    if (!rows.present()) continue;
    const bool has_moment = outputs.entropy.present() || id == ignore_index;
    const double moment = has_moment ? merged.moment : kNoMoment;
    const std::array<double, 6> saved = {anchor,     merged.top, merged.rest,
                                         merged.sum, moment,     merged.target_exponent};
    for (size_t i = 0; i < saved.size(); ++i) {
      static_cast<float*>(rows.data)[static_cast<int64_t>(i) * rows.strides[0] + token] =
          static_cast<float>(saved[i]);
    }
  }
}

}  // namespace logitless
