// SPDX-License-Identifier: Apache-2.0
// The Blackwell gradient kernel on the device model, against double.
#include "kernels/gradient_sm100.h"

#include <cmath>

#include "cases.h"

namespace logitless::model_test {
namespace {

using hw::Major;

constexpr int kLaunches = 2;

int rounded_up(int n, int step) { return (n + step - 1) / step * step; }

/// bf16 [mn, k], in memory as the kernel wants it: K-major by rows of k, MN-major by rows of mn. Rows are
/// padded to 16 bytes; the padding is NaN, which nobody may use.
struct Operand {
  Major major;
  int mn, k, pitch;
  std::vector<hw::Bf16> values;

  Operand(uint64_t seed, Major how, int count, int depth)
      : major(how),
        mn(count),
        k(depth),
        pitch(rounded_up(columns(), 8)),
        values(size_t(rows()) * size_t(pitch), {0x7FFF}) {
    Random random(seed);
    for (int i = 0; i < rows(); ++i) {
      for (int j = 0; j < columns(); ++j) {
        values[size_t(i) * size_t(pitch) + size_t(j)] = to_bf16(static_cast<float>(random()));
      }
    }
  }
  int rows() const { return major == Major::kK ? mn : k; }
  int columns() const { return major == Major::kK ? k : mn; }
  double at(int i, int j) const {
    const int row = major == Major::kK ? i : j, column = major == Major::kK ? j : i;
    return value_of(values[size_t(row) * size_t(pitch) + size_t(column)]);
  }
  std::vector<double> along_k(int i) const {
    std::vector<double> row;
    for (int j = 0; j < k; ++j) row.push_back(at(i, j));
    return row;
  }
  hw::TensorMap map(hw::model::World& world, const char* name) const {
    return hw::tensor_map(world.upload(name, values), {.rows = uint64_t(rows()),
                                                       .columns = uint64_t(columns()),
                                                       .pitch_bytes = uint64_t(pitch) * 2,
                                                       .box_rows = major == Major::kK ? 128U : 64U,
                                                       .box_columns = 64});
  }
};

struct Problem {
  Operand a, b;
  std::vector<double> products;  // [m, n]

  Problem(Major major_a, Major major_b, int m, int n, int k)
      : a(1, major_a, m, k), b(2, major_b, n, k) {
    std::vector<std::vector<double>> columns;
    for (int j = 0; j < n; ++j) columns.push_back(b.along_k(j));
    for (int i = 0; i < m; ++i) {
      const auto row = a.along_k(i);
      for (const auto& column : columns) {
        double sum = 0;
        for (size_t at = 0; at < row.size(); ++at) sum += row[at] * column[at];
        products.push_back(sum);
      }
    }
  }
  int m() const { return a.mn; }
  int n() const { return b.mn; }
  int pitch() const { return rounded_up(n(), 4); }

  std::string wrong(const std::vector<float>& full, const std::vector<hw::Bf16>& rounded) const {
    for (int i = 0; i < m(); ++i) {
      for (int j = 0; j < n(); ++j) {
        const size_t at = size_t(i) * size_t(pitch()) + size_t(j);
        const double want = products[size_t(i) * size_t(n()) + size_t(j)];
        const std::string where = "[" + std::to_string(i) + "][" + std::to_string(j) + "]";
        if (!(std::abs(full[at] - want) <= 1e-4)) {
          return "d" + where + ": expected " + std::to_string(want) + ", got " +
                 std::to_string(full[at]);
        }
        if (rounded[at].bits != to_bf16(full[at]).bits) {
          return "rounded" + where + ": expected " + std::to_string(full[at]) + " rounded, got " +
                 std::to_string(value_of(rounded[at]));
        }
      }
    }
    return {};
  }
};

/// Two launches on the same flags; the outputs are wiped between them.
template <Major kA, Major kB, int kN, Output kOutput>
std::string run(const Problem& problem, int clusters, int splits, uint64_t seed) {
  using Kernel = GradientSm100<kA, kB, kN, kOutput>;
  const int m = problem.m(), n = problem.n(), pitch = problem.pitch();
  const int tiles = rounded_up(m, Kernel::kM) / Kernel::kM * (rounded_up(n, kN) / kN);
  const auto elements = size_t(m) * size_t(pitch);
  const std::vector<float> start(elements, kOutput == Output::kAdd ? 0 : NAN);
  const std::vector<hw::Bf16> wiped(elements, {0x7FFF});

  hw::model::World world;
  const auto full = world.upload("full", start);
  const auto rounded = world.upload("rounded", wiped);
  const auto a = problem.a.map(world, "a"), b = problem.b.map(world, "b");
  const typename Kernel::Params params{
      .a = a,
      .b = b,
      .d = hw::tensor_map(full, {.element = hw::Element::kF32,
                                 .rows = uint64_t(m),
                                 .columns = uint64_t(n),
                                 .pitch_bytes = uint64_t(pitch) * 4,
                                 .box_rows = 32,
                                 .box_columns = Kernel::kStoreColumns}),
      .full = hw::Global<hw::Float4>(reinterpret_cast<hw::Float4*>(full.address())),
      .rounded = hw::Global<hw::Vec2>(reinterpret_cast<hw::Vec2*>(rounded.address())),
      .blocks_done = world.filled<uint32_t>("blocks_done", tiles * 2 * Kernel::kParts, 0),
      .epoch = world.filled<uint32_t>("epoch", 1, 0),
      .m = m,
      .n = n,
      .k = problem.a.k,
      .pitch = pitch,
      .splits = splits};
  for (uint32_t launch = 1; launch <= kLaunches; ++launch) {
    world.assign(params.epoch, std::vector<uint32_t>{launch});
    world.assign(full, start);
    world.assign(rounded, wiped);
    const auto report = hw::launch<Kernel>(world, clusters, params, {.seed = seed + launch * 1000});
    const std::string wrong = report.ok ? problem.wrong(world.download(full, int64_t(elements)),
                                                        world.download(rounded, int64_t(elements)))
                                        : report.what;
    if (!wrong.empty()) return "launch " + std::to_string(launch) + ": " + wrong;
  }
  return {};
}

TEST_CASE("gradient_sm100: input gradient, six tiles of one pair") {
  const Problem problem(Major::kK, Major::kMn, 520, 276, 72);
  for_seeds(3, [&](uint64_t seed) {
    return run<Major::kK, Major::kMn, 256, Output::kStore>(problem, 1, 1, seed);
  });
}

TEST_CASE("gradient_sm100: input gradient, paired accumulators") {
  const Problem problem(Major::kK, Major::kMn, 300, 604, 136);  // four tiles of 512 columns
  for_seeds(3, [&](uint64_t seed) {
    return run<Major::kK, Major::kMn, 512, Output::kStore>(problem, 1, 1, seed);
  });
  for_seeds(3, [&](uint64_t seed) {
    return run<Major::kK, Major::kMn, 512, Output::kStore>(problem, 3, 1, seed);
  });
}

TEST_CASE("gradient_sm100: weight gradient") {
  const Problem problem(Major::kMn, Major::kMn, 300, 276, 200);
  for_seeds(3, [&](uint64_t seed) {
    return run<Major::kMn, Major::kMn, 256, Output::kStore>(problem, 3, 1, seed);
  });
}

TEST_CASE("gradient_sm100: weight gradient, k divided among three clusters") {
  const Problem problem(Major::kMn, Major::kMn, 260, 276, 328);  // two k blocks per split
  for_seeds(3, [&](uint64_t seed) {
    return run<Major::kMn, Major::kMn, 256, Output::kAdd>(problem, 3, 3, seed);
  });
}

TEST_CASE("gradient_sm100: paired accumulators, k divided among two clusters") {
  const Problem problem(Major::kMn, Major::kMn, 140, 404, 200);
  for_seeds(3, [&](uint64_t seed) {
    return run<Major::kMn, Major::kMn, 512, Output::kAdd>(problem, 2, 2, seed);
  });
}

}  // namespace
}  // namespace logitless::model_test
