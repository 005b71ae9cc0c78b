// SPDX-License-Identifier: Apache-2.0
// Every shape of accumulator of the Blackwell tensor core on the device model, against double.
#include "kernels/single_sm100.h"

#include <cmath>

#include "cases.h"

namespace logitless::model_test {
namespace {

using hw::CtaGroup;

constexpr int kLaunches = 2;

/// bf16 [rows, columns], rows padded to 16 bytes; the padding is NaN, which nobody may use.
struct Matrix {
  int rows, columns, pitch;
  std::vector<hw::Bf16> values;

  Matrix(uint64_t seed, int r, int c)
      : rows(r), columns(c), pitch((c + 7) / 8 * 8), values(size_t(r) * size_t(pitch), {0x7FFF}) {
    Random random(seed);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        values[size_t(i) * size_t(pitch) + size_t(j)] = to_bf16(static_cast<float>(random()));
      }
    }
  }
  double at(int i, int j) const { return value_of(values[size_t(i) * size_t(pitch) + size_t(j)]); }
  hw::TensorMap map(hw::model::World& world, const char* name, int box_rows) const {
    return hw::tensor_map(world.upload(name, values), {.rows = uint64_t(rows),
                                                       .columns = uint64_t(columns),
                                                       .pitch_bytes = uint64_t(pitch) * 2,
                                                       .box_rows = uint32_t(box_rows),
                                                       .box_columns = 64});
  }
};

struct Problem {
  Matrix a, b;
  std::vector<float> c;
  std::vector<double> sums;  // c + a b^T

  Problem(int m, int n, int k) : a(1, m, k), b(2, n, k) {
    Random random(3);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        c.push_back(static_cast<float>(random() * 10));
        double sum = c.back();
        for (int at = 0; at < k; ++at) sum += a.at(i, at) * b.at(j, at);
        sums.push_back(sum);
      }
    }
  }
  std::string wrong(const std::vector<float>& d) const {
    for (size_t at = 0; at < d.size(); ++at) {
      if (std::abs(d[at] - sums[at]) <= 1e-4) continue;
      const auto n = size_t(b.rows);
      return "d[" + std::to_string(at / n) + "][" + std::to_string(at % n) + "]: expected " +
             std::to_string(sums[at]) + ", got " + std::to_string(d[at]);
    }
    return {};
  }
};

/// Two launches on the same flags; d is wiped between them, and must be the same to the last bit.
template <CtaGroup kGroup, int kM, int kN>
std::string run(const Problem& problem, int clusters, int splits, uint64_t seed) {
  using Kernel = SingleSm100<kGroup, kM, kN>;
  const int m = problem.a.rows, n = problem.b.rows;
  const int tiles = (m + kM - 1) / kM * ((n + kN - 1) / kN);
  const std::vector<float> wiped(problem.c.size(), NAN);
  hw::model::World world;
  const auto a = problem.a.map(world, "a", Kernel::kRowsA);
  const auto b = problem.b.map(world, "b", Kernel::kRowsB);
  const typename Kernel::Params params{
      .a = a,
      .b = b,
      .c = world.upload("c", problem.c),
      .d = world.upload("d", wiped),
      .finished = world.filled<uint32_t>("finished", tiles * Kernel::kCluster * 4, 0),
      .epoch = world.filled<uint32_t>("epoch", 1, 0),
      .m = m,
      .n = n,
      .k = problem.a.columns,
      .splits = splits};
  std::vector<float> first;
  for (uint32_t launch = 1; launch <= kLaunches; ++launch) {
    world.assign(params.epoch, std::vector<uint32_t>{launch});
    world.assign(params.d, wiped);
    const auto report = hw::launch<Kernel>(world, clusters, params, {.seed = seed + launch * 1000});
    const auto d = world.download(params.d, int64_t(wiped.size()));
    if (launch == 1) first = d;
    const std::string wrong = !report.ok   ? report.what
                              : d != first ? "d differs from that of launch 1"
                                           : problem.wrong(d);
    if (!wrong.empty()) return "launch " + std::to_string(launch) + ": " + wrong;
  }
  return {};
}

TEST_CASE("single_sm100: one CTA, 128 rows") {
  const Problem problem(200, 180, 392);  // tiles 2 x 2, three splits of two or three k blocks
  for_seeds(4, [&](uint64_t seed) { return run<CtaGroup::kOne, 128, 96>(problem, 3, 3, seed); });
  for_seeds(4, [&](uint64_t seed) { return run<CtaGroup::kOne, 128, 256>(problem, 1, 3, seed); });
}

TEST_CASE("single_sm100: one CTA, 64 rows") {
  const Problem problem(100, 150, 392);
  for_seeds(4, [&](uint64_t seed) { return run<CtaGroup::kOne, 64, 80>(problem, 3, 3, seed); });
  for_seeds(4, [&](uint64_t seed) { return run<CtaGroup::kOne, 64, 64>(problem, 3, 2, seed); });
}

TEST_CASE("single_sm100: a pair, 128 rows") {
  const Problem problem(200, 250, 392);
  for_seeds(4, [&](uint64_t seed) { return run<CtaGroup::kTwo, 128, 160>(problem, 3, 3, seed); });
  for_seeds(4, [&](uint64_t seed) { return run<CtaGroup::kTwo, 128, 256>(problem, 2, 3, seed); });
}

TEST_CASE("single_sm100: a pair, 256 rows") {
  const Problem problem(300, 120, 392);
  for_seeds(4, [&](uint64_t seed) { return run<CtaGroup::kTwo, 256, 64>(problem, 3, 3, seed); });
}

}  // namespace
}  // namespace logitless::model_test
