// SPDX-License-Identifier: Apache-2.0
// The Hopper product on the device model, against plain loops in double.
#include "kernels/product_sm90.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cases.h"

namespace logitless::model_test {
namespace {

struct Case {
  int tokens, vocab, hidden, clusters;
  int resident = 1 << 30;  // how many of the clusters the GPU holds at once
};

/// Inputs of a case, and x w^T as it should be.
struct Problem {
  explicit Problem(const Case& shape) : c(shape) {
    Random random(7);
    x = random_bf16(random, int64_t{c.tokens} * c.hidden);
    w = random_bf16(random, int64_t{c.vocab} * c.hidden, 0.3);
    for (int m = 0; m < c.tokens; ++m) {
      for (int v = 0; v < c.vocab; ++v) {
        double sum = 0, magnitudes = 0;
        for (int h = 0; h < c.hidden; ++h) {
          const double term = value_of(x[at(m, h, c.hidden)]) * value_of(w[at(v, h, c.hidden)]);
          sum += term;
          magnitudes += std::abs(term);
        }
        product.push_back(sum);
        size.push_back(magnitudes);
      }
    }
  }
  static size_t at(int row, int column, int columns) {
    return static_cast<size_t>(row) * static_cast<size_t>(columns) + static_cast<size_t>(column);
  }
  double z(int m, int v) const { return product[at(m, v, c.vocab)]; }

  Case c;
  std::vector<hw::Bf16> x, w;
  std::vector<double> product, size;
};

std::string differs(const char* what, int row, int column, double got, double want) {
  return std::string(what) + "[" + std::to_string(row) + "][" + std::to_string(column) +
         "]: expected " + std::to_string(want) + ", got " + std::to_string(got);
}

/// The memory of one kernel, and its launches.
template <int kN, bool kRaw>
class Device {
 public:
  using Kernel = ProductSm90<kN, kRaw>;

  explicit Device(const Problem& problem)
      : problem_(problem), c_(problem.c), pitch_((c_.vocab + 7) / 8 * 8) {
    const int blocks = (c_.tokens + Kernel::kBlockRows - 1) / Kernel::kBlockRows;
    n_tiles_ = (c_.vocab + kN - 1) / kN;
    e_ = world_.allocate<hw::Bf16>("e", int64_t{c_.tokens} * pitch_);
    p_.x = matrix(world_.upload("x", problem.x), c_.tokens, c_.hidden, c_.hidden, 128);
    p_.w = matrix(world_.upload("w", problem.w), c_.vocab, c_.hidden, c_.hidden, kN / 2);
    p_.e = matrix(e_, c_.tokens, c_.vocab, pitch_, 64);
    p_.raw = world_.allocate<float>("raw", int64_t{c_.tokens} * c_.vocab);
    p_.anchor = world_.allocate<int32_t>("anchor", c_.tokens);
    p_.partial = world_.allocate<float>("partial", int64_t{n_tiles_} * c_.tokens);
    p_.sum = world_.allocate<float>("sum", c_.tokens);
    p_.anchor_ready = world_.filled<uint32_t>("anchor_ready", blocks, 0);
    p_.tiles_done = world_.filled<uint32_t>("tiles_done", blocks, 0);
    p_.claimed = world_.filled<uint32_t>("claimed", 1, 0);
    p_.epoch = world_.filled<uint32_t>("epoch", 1, 0);
    p_.tokens = c_.tokens;
    p_.vocab = c_.vocab;
    p_.hidden = c_.hidden;
  }

  /// The launch of an epoch, counted from 1; what was wrong with it, or nothing.
  std::string launch(uint32_t epoch, float scale, uint64_t seed) {
    world_.assign(p_.epoch, {epoch});
    p_.scale = scale;
    const auto report = hw::launch<Kernel>(world_, c_.clusters, p_,
                                           {.seed = seed, .resident_clusters = c_.resident});
    if (!report.ok) return report.what;
    return kRaw ? check_raw() : check();
  }

 private:
  static hw::TensorMap matrix(hw::Global<hw::Bf16> base, int rows, int columns, int pitch,
                              int box_rows) {
    return hw::tensor_map(base, {.rows = static_cast<uint64_t>(rows),
                                 .columns = static_cast<uint64_t>(columns),
                                 .pitch_bytes = static_cast<uint64_t>(pitch) * 2,
                                 .box_rows = static_cast<uint32_t>(box_rows),
                                 .box_columns = 64});
  }

  std::string check_raw() const {
    const auto raw = world_.download(p_.raw, int64_t{c_.tokens} * c_.vocab);
    for (int m = 0; m < c_.tokens; ++m) {
      for (int v = 0; v < c_.vocab; ++v) {
        const size_t i = Problem::at(m, v, c_.vocab);
        // Rounding of f32: some units of 2^-24 of the terms' magnitudes.
        if (!(std::abs(raw[i] - problem_.product[i]) <= 2e-6 * problem_.size[i])) {
          return differs("raw", m, v, raw[i], problem_.product[i]);
        }
      }
    }
    return "";
  }

  std::string check() const {
    const auto e = world_.download(e_, int64_t{c_.tokens} * pitch_);
    const auto anchor = world_.download(p_.anchor, c_.tokens);
    const auto partial = world_.download(p_.partial, int64_t{n_tiles_} * c_.tokens);
    const auto sum = world_.download(p_.sum, c_.tokens);
    for (int m = 0; m < c_.tokens; ++m) {
      double top = -1e30;
      for (int v = 0; v < std::min(c_.vocab, kN); ++v) top = std::max(top, exponent(m, v));
      const bool clear = std::abs(top - std::round(top)) > 1e-4;  // else either neighbour will do
      if (std::abs(anchor[m] - std::ceil(top)) > (clear ? 0 : 1)) {
        return differs("anchor", m, 0, anchor[m], std::ceil(top));
      }
      double want = 0;
      for (int v = 0; v < c_.vocab; ++v) {
        const double value = std::exp2(exponent(m, v) - anchor[m]);
        const double got = value_of(e[Problem::at(m, v, pitch_)]);
        want += value;
        // Half a unit of bf16 is 0.4 % at most.
        if (!(std::abs(got - value) <= 0.006 * value)) return differs("e", m, v, got, value);
      }
      for (int v = c_.vocab; v < pitch_; ++v) {
        const uint16_t bits = e[Problem::at(m, v, pitch_)].bits;
        if (bits != 0xFFFF) return differs("written past the vocabulary: e", m, v, bits, 0xFFFF);
      }
      float in_order = 0;
      for (int n = 0; n < n_tiles_; ++n) in_order += partial[Problem::at(n, m, c_.tokens)];
      if (sum[m] != in_order) return differs("sum in the order of columns", m, 0, sum[m], in_order);
      if (!(std::abs(sum[m] - want) <= 1e-4 * want)) return differs("sum", m, 0, sum[m], want);
    }
    return "";
  }
  double exponent(int m, int v) const { return problem_.z(m, v) * p_.scale; }

  const Problem& problem_;
  const Case c_;
  const int pitch_;
  int n_tiles_ = 0;
  hw::model::World world_;
  hw::Global<hw::Bf16> e_;
  typename Kernel::Params p_{};
};

template <int kN, bool kRaw = false>
void check(int usual_seeds, const Case& c) {
  CAPTURE(kN);
  CAPTURE(c.tokens);
  CAPTURE(c.vocab);
  const Problem problem(c);
  for_seeds(usual_seeds, [&](uint64_t seed) {
    Device<kN, kRaw> device(problem);
    // Another scale, so that what the first launch has left is wrong for the second.
    std::string wrong = device.launch(1, 1.1F, seed);
    if (wrong.empty()) wrong = device.launch(2, 0.7F, seed + 1000);
    return wrong;
  });
}

// Each: more tiles than claims and more k blocks than stages for every cluster, ragged in tokens, words
// and hidden units.
TEST_CASE("product_sm90: three clusters wait for each other's anchors") {
  check<256>(6, {.tokens = 520, .vocab = 1090, .hidden = 72, .clusters = 3});
  check<192>(4, {.tokens = 300, .vocab = 1003, .hidden = 136, .clusters = 3});
  check<128>(4, {.tokens = 300, .vocab = 700, .hidden = 136, .clusters = 3});
  check<64>(4, {.tokens = 300, .vocab = 361, .hidden = 200, .clusters = 3});
}
TEST_CASE("product_sm90: one cluster has every tile") {
  check<256>(4, {.tokens = 300, .vocab = 700, .hidden = 136, .clusters = 1});
}
TEST_CASE("product_sm90: less than a tile") {
  check<256>(3, {.tokens = 5, .vocab = 9, .hidden = 8, .clusters = 1});
  check<64>(3, {.tokens = 130, .vocab = 1, .hidden = 40, .clusters = 3});
}
TEST_CASE("product_sm90: ends when not all clusters are resident") {
  check<128>(4, {.tokens = 520, .vocab = 520, .hidden = 72, .clusters = 4, .resident = 1});
  check<128>(4, {.tokens = 520, .vocab = 520, .hidden = 72, .clusters = 5, .resident = 2});
}
TEST_CASE("product_sm90: raw products") {
  check<256, true>(3, {.tokens = 300, .vocab = 523, .hidden = 328, .clusters = 3});
  check<192, true>(3, {.tokens = 300, .vocab = 391, .hidden = 200, .clusters = 3});
  check<128, true>(3, {.tokens = 300, .vocab = 265, .hidden = 200, .clusters = 3});
  check<64, true>(3, {.tokens = 300, .vocab = 200, .hidden = 200, .clusters = 3});
}

}  // namespace
}  // namespace logitless::model_test
