// SPDX-License-Identifier: Apache-2.0
// The Blackwell product kernel on the device model, against double.
#include "kernels/product_sm100.h"

#include <algorithm>
#include <cmath>

#include "cases.h"

namespace logitless::model_test {
namespace {

constexpr float kScale = 1.4426950408889634F / 1.3F;
constexpr int kLaunches = 2;

/// bf16, rows padded to 16 bytes; the padding is NaN, which nobody may use.
struct Matrix {
  int rows, columns, pitch;
  std::vector<hw::Bf16> values;

  Matrix(uint64_t seed, int r, int c, double scale)
      : rows(r), columns(c), pitch((c + 7) / 8 * 8), values(size_t(r) * size_t(pitch), {0x7FFF}) {
    Random random(seed);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        values[at(i, j)] = to_bf16(static_cast<float>(random() * scale));
      }
    }
  }
  size_t at(int i, int j) const { return size_t(i) * size_t(pitch) + size_t(j); }
  std::vector<double> row(int i) const {
    std::vector<double> row;
    for (int j = 0; j < columns; ++j) row.push_back(value_of(values[at(i, j)]));
    return row;
  }
  hw::TensorShape shape(uint32_t box_rows) const {
    return {.rows = uint64_t(rows),
            .columns = uint64_t(columns),
            .pitch_bytes = uint64_t(pitch) * 2,
            .box_rows = box_rows,
            .box_columns = 64};
  }
};

/// The inputs of a case, and the products in double.
struct Problem {
  Matrix x, w;
  std::vector<double> products;  // [tokens, vocab]

  Problem(int tokens, int vocab, int hidden) : x(1, tokens, hidden, 1.7), w(2, vocab, hidden, 0.4) {
    std::vector<std::vector<double>> words;
    for (int v = 0; v < vocab; ++v) words.push_back(w.row(v));
    for (int i = 0; i < tokens; ++i) {
      const auto token = x.row(i);
      for (const auto& word : words) {
        double sum = 0;
        for (size_t h = 0; h < word.size(); ++h) sum += token[h] * word[h];
        products.push_back(sum);
      }
    }
  }
  double product(int i, int v) const { return products[size_t(i) * size_t(w.rows) + size_t(v)]; }
};

std::string place(const char* name, int i, int v) {
  return std::string(name) + "[" + std::to_string(i) + "][" + std::to_string(v) + "]";
}
std::string differs(const std::string& what, double expected, double got) {
  return what + ": expected " + std::to_string(expected) + ", got " + std::to_string(got);
}

/// What the kernel left, and what it should have left.
struct Results {
  std::vector<hw::Bf16> e;
  std::vector<int32_t> anchor;
  std::vector<float> partial, sum;

  std::string wrong(const Problem& problem, int tile_columns) const {
    const int tokens = problem.x.rows, vocab = problem.w.rows;
    const int pitch = static_cast<int>(e.size()) / tokens;
    for (int i = 0; i < tokens; ++i) {
      double top = -1e30;
      for (int v = 0; v < std::min(vocab, tile_columns); ++v) {
        top = std::max(top, problem.product(i, v) * kScale);
      }
      const int k = anchor[size_t(i)];
      const bool close = std::abs(top - std::round(top)) < 1e-4;  // to where the ceiling jumps
      if (std::abs(k - std::ceil(top)) > (close ? 1 : 0)) {
        return differs("anchor[" + std::to_string(i) + "]", std::ceil(top), k);
      }
      double all = 0;
      for (int v = 0; v < vocab; ++v) {
        const double want = std::exp2(problem.product(i, v) * kScale - k);
        const double got = value_of(e[size_t(i) * size_t(pitch) + size_t(v)]);
        if (!(std::abs(got - want) <= want * 0.005)) return differs(place("e", i, v), want, got);
        all += want;
      }
      float in_order = 0;  // the partial sums in the order of the columns, to the last bit
      for (size_t at = size_t(i); at < partial.size(); at += size_t(tokens))
        in_order += partial[at];
      const std::string what = "sum[" + std::to_string(i) + "]";
      if (sum[size_t(i)] != in_order) return differs(what, in_order, sum[size_t(i)]);
      if (!(std::abs(in_order - all) <= all * 1e-5)) return differs(what, all, in_order);
    }
    return {};
  }
};

/// Two launches on the same flags; everything else is wiped between them.
std::string run_exponentials(const Problem& problem, int clusters, uint64_t seed) {
  using Kernel = ProductSm100<>;
  const Matrix &x = problem.x, &w = problem.w;
  const int tokens = x.rows, vocab = w.rows;
  const int n_tiles = (vocab + Kernel::kN - 1) / Kernel::kN;
  const int blocks = (tokens + Kernel::kBlockRows - 1) / Kernel::kBlockRows;
  const Results wiped{Matrix(0, tokens, vocab, NAN).values,
                      std::vector<int32_t>(size_t(tokens), 1 << 30),
                      std::vector<float>(size_t(n_tiles) * size_t(tokens), NAN),
                      std::vector<float>(size_t(tokens), NAN)};
  hw::model::World world;
  const auto e = world.upload("e", wiped.e);
  const auto x_map = hw::tensor_map(world.upload("x", x.values), x.shape(Kernel::kM / 2));
  const auto w_map = hw::tensor_map(world.upload("w", w.values), w.shape(Kernel::kN / 2));
  const Kernel::Params params{
      .x = x_map,
      .w = w_map,
      .e = hw::tensor_map(e, Matrix(0, tokens, vocab, 0).shape(Kernel::kBlockRows)),
      .raw = hw::Global<float>(nullptr),
      .anchor = world.upload("anchor", wiped.anchor),
      .partial = world.upload("partial", wiped.partial),
      .sum = world.upload("sum", wiped.sum),
      .anchor_ready = world.filled<uint32_t>("anchor_ready", blocks, 0),
      .tiles_done = world.filled<uint32_t>("tiles_done", blocks, 0),
      .epoch = world.filled<uint32_t>("epoch", 1, 0),
      .tokens = tokens,
      .vocab = vocab,
      .hidden = x.columns,
      .scale = kScale};
  for (uint32_t launch = 1; launch <= kLaunches; ++launch) {
    world.assign(params.epoch, std::vector<uint32_t>{launch});
    world.assign(e, wiped.e);
    world.assign(params.anchor, wiped.anchor);
    world.assign(params.partial, wiped.partial);
    world.assign(params.sum, wiped.sum);
    const auto report = hw::launch<Kernel>(world, clusters, params, {.seed = seed + launch * 1000});
    if (!report.ok) return "launch " + std::to_string(launch) + ": " + report.what;
    const Results got{world.download(e, int64_t(wiped.e.size())),
                      world.download(params.anchor, tokens),
                      world.download(params.partial, int64_t(wiped.partial.size())),
                      world.download(params.sum, tokens)};
    const std::string wrong = got.wrong(problem, Kernel::kN);
    if (!wrong.empty()) return "launch " + std::to_string(launch) + ": " + wrong;
  }
  return {};
}

std::string run_raw(const Problem& problem, int clusters, uint64_t seed) {
  using Kernel = ProductSm100<true>;
  const Matrix &x = problem.x, &w = problem.w;
  hw::model::World world;
  const auto x_map = hw::tensor_map(world.upload("x", x.values), x.shape(Kernel::kM / 2));
  const auto w_map = hw::tensor_map(world.upload("w", w.values), w.shape(Kernel::kN / 2));
  Kernel::Params params{};
  params.x = x_map;
  params.w = w_map;
  params.raw = world.allocate<float>("raw", int64_t(problem.products.size()));
  params.tokens = x.rows;
  params.vocab = w.rows;
  params.hidden = x.columns;
  const auto report = hw::launch<Kernel>(world, clusters, params, {.seed = seed});
  if (!report.ok) return report.what;
  const auto got = world.download(params.raw, int64_t(problem.products.size()));
  for (size_t at = 0; at < got.size(); ++at) {
    if (!(std::abs(got[at] - problem.products[at]) <= 1e-4)) {
      return differs(place("raw", int(at) / w.rows, int(at) % w.rows), problem.products[at],
                     got[at]);
    }
  }
  return {};
}

TEST_CASE("product_sm100: one pair, every ring wraps") {
  const Problem problem(300, 520, 72);  // six tiles of two k blocks
  for_seeds(6, [&](uint64_t seed) { return run_exponentials(problem, 1, seed); });
}

TEST_CASE("product_sm100: anchors and sums cross three clusters") {
  const Problem problem(290, 1100, 136);  // ten tiles of three k blocks
  for_seeds(6, [&](uint64_t seed) { return run_exponentials(problem, 3, seed); });
}

TEST_CASE("product_sm100: fewer words than a tile, fewer tokens than a warp") {
  const Problem problem(5, 40, 8);
  for_seeds(6, [&](uint64_t seed) { return run_exponentials(problem, 3, seed); });
}

TEST_CASE("product_sm100: anchors below zero") {
  const Problem problem(40, 1, 8);  // the products past the only word are 0, and no anchors
  for_seeds(3, [&](uint64_t seed) { return run_exponentials(problem, 1, seed); });
}

TEST_CASE("product_sm100: raw products") {
  const Problem problem(300, 520, 72);
  for_seeds(6, [&](uint64_t seed) { return run_raw(problem, 2, seed); });
}

}  // namespace
}  // namespace logitless::model_test
