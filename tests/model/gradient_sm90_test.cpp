// SPDX-License-Identifier: Apache-2.0
// The Hopper gradients on the device model, against plain loops in double.
#include "kernels/gradient_sm90.h"

#include <cmath>
#include <string>
#include <vector>

#include "cases.h"

namespace logitless::model_test {
namespace {

/// A row-major matrix whose rows end in NaN: what lies past the last column must not count.
class Matrix {
 public:
  Matrix(Random& random, int rows, int columns)
      : rows_(rows), columns_(columns), pitch_((columns + 7) / 8 * 8) {
    values_.assign(static_cast<size_t>(rows) * static_cast<size_t>(pitch_), hw::Bf16{0x7FFF});
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        values_[index(row, column)] = to_bf16(static_cast<float>(random()));
      }
    }
  }
  double at(int row, int column) const { return value_of(values_[index(row, column)]); }
  hw::TensorMap upload(hw::model::World& world, const char* name, int box_rows) const {
    return hw::tensor_map(world.upload(name, values_),
                          {.rows = static_cast<uint64_t>(rows_),
                           .columns = static_cast<uint64_t>(columns_),
                           .pitch_bytes = static_cast<uint64_t>(pitch_) * 2,
                           .box_rows = static_cast<uint32_t>(box_rows),
                           .box_columns = 64});
  }

 private:
  size_t index(int row, int column) const {
    return static_cast<size_t>(row) * static_cast<size_t>(pitch_) + static_cast<size_t>(column);
  }
  int rows_, columns_, pitch_;
  std::vector<hw::Bf16> values_;
};

/// An operand of mn x k in either layout.
struct Operand {
  Operand(Random& random, hw::Major order, int mn, int k)
      : major(order),
        matrix(random, order == hw::Major::kK ? mn : k, order == hw::Major::kK ? k : mn) {}
  double at(int mn, int k) const {
    return major == hw::Major::kK ? matrix.at(mn, k) : matrix.at(k, mn);
  }
  /// Boxes of the whole tile if k is contiguous, else of 64 rows of k.
  int box_rows(int tile_mn) const { return major == hw::Major::kK ? tile_mn : 64; }

  hw::Major major;
  Matrix matrix;
};

struct Case {
  int m, n, k, clusters;
};

template <int kN, hw::Major kA, hw::Major kB>
void check(int usual_seeds, const Case& c) {
  using Kernel = GradientSm90<kN, kA, kB>;
  CAPTURE(kN);
  CAPTURE(c.m);
  CAPTURE(c.n);
  CAPTURE(c.k);
  Random random(11);
  const Operand a(random, kA, c.m, c.k), b(random, kB, c.n, c.k);
  std::vector<double> want;
  for (int row = 0; row < c.m; ++row) {
    for (int column = 0; column < c.n; ++column) {
      double sum = 0;
      for (int k = 0; k < c.k; ++k) sum += a.at(row, k) * b.at(column, k);
      want.push_back(sum);
    }
  }
  for_seeds(usual_seeds, [&](uint64_t seed) -> std::string {
    hw::model::World world;
    const auto d = world.allocate<hw::Vec2>("d", int64_t{c.m} * c.n / 2);
    const typename Kernel::Params p{.a = a.matrix.upload(world, "a", a.box_rows(Kernel::kM)),
                                    .b = b.matrix.upload(world, "b", b.box_rows(kN)),
                                    .d = d,
                                    .m = c.m,
                                    .n = c.n,
                                    .k = c.k};
    const auto report = hw::launch<Kernel>(world, c.clusters, p, {.seed = seed});
    if (!report.ok) return report.what;
    const auto pairs = world.download(d, int64_t{c.m} * c.n / 2);
    for (size_t i = 0; i < want.size(); ++i) {
      const float got = hw::as_float(i % 2 == 0 ? pairs[i / 2].x : pairs[i / 2].y);
      if (!(std::abs(got - want[i]) <= 1e-4)) {
        const auto n = static_cast<size_t>(c.n);
        return "d[" + std::to_string(i / n) + "][" + std::to_string(i % n) + "]: expected " +
               std::to_string(want[i]) + ", got " + std::to_string(got);
      }
    }
    return "";
  });
}

constexpr auto kK = hw::Major::kK, kMn = hw::Major::kMn;

// Each: ragged in m, n and k; every ring of stages goes round more than twice.
TEST_CASE("gradient_sm90: input gradient, A K-major and B MN-major") {
  check<256, kK, kMn>(6, {.m = 300, .n = 328, .k = 203, .clusters = 3});
  check<192, kK, kMn>(3, {.m = 200, .n = 200, .k = 461, .clusters = 2});
  check<128, kK, kMn>(3, {.m = 200, .n = 264, .k = 461, .clusters = 3});
  check<64, kK, kMn>(3, {.m = 200, .n = 136, .k = 203, .clusters = 3});
}
TEST_CASE("gradient_sm90: weight gradient, both MN-major") {
  check<256, kMn, kMn>(6, {.m = 261, .n = 328, .k = 205, .clusters = 3});
  check<192, kMn, kMn>(3, {.m = 261, .n = 200, .k = 410, .clusters = 2});
  check<128, kMn, kMn>(3, {.m = 261, .n = 264, .k = 410, .clusters = 3});
  check<64, kMn, kMn>(3, {.m = 261, .n = 136, .k = 205, .clusters = 3});
}
TEST_CASE("gradient_sm90: the other layouts") {
  check<256, kK, kK>(3, {.m = 140, .n = 328, .k = 461, .clusters = 2});
  check<64, kMn, kK>(3, {.m = 140, .n = 72, .k = 461, .clusters = 1});
}
TEST_CASE("gradient_sm90: less than a tile") {
  check<128, kK, kMn>(3, {.m = 3, .n = 8, .k = 1, .clusters = 2});
  check<128, kMn, kMn>(3, {.m = 1, .n = 16, .k = 70, .clusters = 1});
}

}  // namespace
}  // namespace logitless::model_test
