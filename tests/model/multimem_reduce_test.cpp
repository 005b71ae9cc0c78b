// SPDX-License-Identifier: Apache-2.0
#include "kernels/multimem_reduce.h"

#include "cases.h"

namespace logitless::model_test {
namespace {

struct Case {
  int ranks, ctas, cells, calls;
  uint32_t first_epoch = 0;
};

void put(float value, float& to) { to = value; }
void put(float value, hw::Bf16& to) { to = to_bf16(value); }
double number(float v) { return v; }
double number(hw::Bf16 v) { return value_of(v); }

template <class T>
class Reduce {
 public:
  explicit Reduce(const Case& c) : c_(c), world_(c.ranks) {
    p_.ranks = c.ranks;
    p_.ctas = c.ctas;
    p_.cells = c.cells;
    p_.calls = c.calls;
    const auto parts = world_.symmetric<T>("part", elements());
    const auto sums = world_.symmetric<T>("sum", elements());
    const auto shards = world_.symmetric_filled<uint32_t>(
        "shards", 1, c.first_epoch * static_cast<uint32_t>(c.ranks * c.ctas));
    p_.parts = world_.multicast(parts);
    p_.sums = world_.multicast(sums);
    p_.all_shards = world_.multicast(shards);
    for (int r = 0; r < c.ranks; ++r) {
      const auto at = static_cast<size_t>(r);
      input_.push_back(world_.allocate<T>("input", c.calls * elements(), r));
      output_.push_back(world_.allocate<T>("output", c.calls * elements(), r));
      p_.rank[r] = {.input = hw::Global<const hw::Vec4>(cells(input_.back()).address()),
                    .output = cells(output_.back()),
                    .part = cells(parts[at]),
                    .sum = cells(sums[at]),
                    .shards = shards[at]};
      p_.side[r] = {world_.allocate<uint32_t>("arrived", 1, r),
                    world_.filled("inbox", c.ranks, c.first_epoch, r),
                    world_.filled("epoch", 1, c.first_epoch, r),
                    {world_.filled<uint32_t>("raised", 1, 0, r),
                     world_.filled<hw::PeerFailure>("failure", 1, {}, r), 1'000'000}};
    }
  }

  /// Eighths from -31/8 to 31/8: the sum of eight of them is exact in bf16, in any order.
  hw::model::Report launch(uint64_t seed, int ranks) {
    Random random(seed);
    expected_.assign(static_cast<size_t>(c_.calls * elements()), 0);
    for (int r = 0; r < c_.ranks; ++r) {
      std::vector<T> input(expected_.size());
      for (size_t i = 0; i < input.size(); ++i) {
        const float value = static_cast<float>(random.below(63) - 31) / 8;
        put(value, input[i]);
        expected_[i] += value;
      }
      world_.assign(input_[static_cast<size_t>(r)], input);
      std::vector<T> poison(expected_.size());
      for (auto& v : poison) put(99, v);
      world_.assign(output_[static_cast<size_t>(r)], poison);
      world_.assign(p_.side[r].arrived, {0});
    }
    return hw::launch<MultimemReduce<T>>(world_, ranks * c_.ctas, p_,
                                         {.seed = seed, .clusters_per_rank = c_.ctas});
  }
  /// Every sum of a rank, or no number at all.
  std::string check(int rank, bool whole) const {
    const auto output = world_.download(output_[static_cast<size_t>(rank)], c_.calls * elements());
    for (size_t i = 0; i < output.size(); ++i) {
      const double got = number(output[i]);
      if (whole ? got == expected_[i] : std::isnan(got)) continue;
      return "rank " + std::to_string(rank) + " output[" + std::to_string(i) + "]: expected " +
             (whole ? std::to_string(expected_[i]) : "NaN") + ", got " + std::to_string(got);
    }
    return "";
  }
  /// The rank's counter will miss one CTA.
  void lose_one(int rank) {
    const auto counter = p_.rank[rank].shards;
    world_.assign(counter, {world_.download(counter, 1)[0] - 1});
  }
  std::string check_failure(int rank, int peer, uint32_t what) const {
    const hw::PeerFailure f = world_.download(p_.side[rank].abort.failure, 1)[0];
    if (f.state == 1 && f.rank == static_cast<uint32_t>(rank) &&
        f.peer == static_cast<uint32_t>(peer) && f.what == what) {
      return "";
    }
    return "rank " + std::to_string(rank) + " reports: state " + std::to_string(f.state) +
           " rank " + std::to_string(f.rank) + " peer " + std::to_string(f.peer) + " what " +
           std::to_string(f.what);
  }

 private:
  int elements() const { return c_.ranks * c_.cells * MultimemReduce<T>::kPerCell; }
  static hw::Global<hw::Vec4> cells(hw::Global<T> p) {
    return hw::Global<hw::Vec4>(reinterpret_cast<hw::Vec4*>(p.address()));
  }

  Case c_;
  mutable hw::model::World world_;
  typename MultimemReduce<T>::Params p_{};
  std::vector<hw::Global<T>> input_, output_;
  std::vector<double> expected_;
};

template <class T>
void run_case(const Case& c) {
  CAPTURE(c.ranks);
  CAPTURE(c.ctas);
  for_seeds(12, [&](uint64_t seed) -> std::string {
    Reduce<T> reduce(c);
    for (uint64_t launch = 0; launch < 2; ++launch) {
      const auto report = reduce.launch(seed + launch, c.ranks);
      if (!report.ok) return report.what;
      for (int r = 0; r < c.ranks; ++r) {
        if (auto wrong = reduce.check(r, true); !wrong.empty()) {
          return "launch " + std::to_string(launch) + ": " + wrong;
        }
      }
    }
    return "";
  });
}

TEST_CASE_TEMPLATE("the switch adds the parts of all ranks", T, float, hw::Bf16) {
  run_case<T>({.ranks = 2, .ctas = 2, .cells = 150, .calls = 3});
  run_case<T>({.ranks = 4, .ctas = 2, .cells = 70, .calls = 2});
  run_case<T>({.ranks = 8, .ctas = 2, .cells = 40, .calls = 2});
  run_case<T>({.ranks = 3, .ctas = 1, .cells = 5, .calls = 3, .first_epoch = 0xFFFFFFFE});
}

TEST_CASE_TEMPLATE("a rank that adds nothing leaves no number behind", T, float, hw::Bf16) {
  constexpr Case kCase{.ranks = 3, .ctas = 2, .cells = 30, .calls = 2};
  constexpr int kPresent = 2;
  for_seeds(6, [&](uint64_t seed) -> std::string {
    Reduce<T> reduce(kCase);
    const auto report = reduce.launch(seed, kPresent);
    if (!report.ok) return report.what;
    for (int r = 0; r < kPresent; ++r) {
      if (auto wrong = reduce.check(r, false); !wrong.empty()) return wrong;
      if (auto wrong = reduce.check_failure(r, kPresent, EpochBarrier::kWait); !wrong.empty()) {
        return wrong;
      }
    }
    return "";
  });
}

TEST_CASE_TEMPLATE("a rank that misses a shard ends softly, alone", T, float, hw::Bf16) {
  static constexpr Case kCase{.ranks = 3, .ctas = 2, .cells = 30, .calls = 1};
  constexpr int kBehind = 1;
  for_seeds(6, [&](uint64_t seed) -> std::string {
    Reduce<T> reduce(kCase);
    reduce.lose_one(kBehind);
    const auto report = reduce.launch(seed, kCase.ranks);
    if (!report.ok) return report.what;
    for (int r = 0; r < kCase.ranks; ++r) {
      if (auto wrong = reduce.check(r, r != kBehind); !wrong.empty()) return wrong;
    }
    return reduce.check_failure(kBehind, kBehind, MultimemReduce<T>::kShards);
  });
}

}  // namespace
}  // namespace logitless::model_test
