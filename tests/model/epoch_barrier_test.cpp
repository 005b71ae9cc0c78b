// SPDX-License-Identifier: Apache-2.0
#include "kernels/epoch_barrier.h"

#include "cases.h"

namespace logitless::model_test {
namespace {

constexpr int kThreads = BarrierRounds::kThreads;

struct Case {
  int ranks, ctas, rounds;
  uint32_t first_epoch = 0;
};

class Rounds {
 public:
  Rounds(const Case& c, uint64_t seed) : c_(c), world_(c.ranks) {
    p_.ranks = c.ranks;
    p_.ctas = c.ctas;
    p_.rounds = c.rounds;
    for (int r = 0; r < c.ranks; ++r) {
      p_.rank[r] = {hw::Global<const uint32_t>(),
                    world_.allocate<uint32_t>("board", 2 * threads(), r),
                    world_.allocate<uint32_t>("sums", c.rounds * threads(), r)};
      p_.side[r] = {world_.allocate<uint32_t>("arrived", 1, r),
                    world_.filled("inbox", c.ranks, c.first_epoch, r),
                    world_.filled("epoch", 1, c.first_epoch, r),
                    {world_.filled<uint32_t>("raised", 1, 0, r),
                     world_.filled<hw::PeerFailure>("failure", 1, {}, r), 1'000'000}};
    }
    Random random(seed);
    for (int r = 0; r < c.ranks; ++r) {
      std::vector<uint32_t> words(static_cast<size_t>(c.rounds * threads()));
      for (auto& word : words) word = static_cast<uint32_t>(random.below(1 << 30));
      p_.rank[r].words = hw::Global<const uint32_t>(world_.upload("words", words, r).address());
      words_.push_back(std::move(words));
    }
  }

  hw::model::Report launch(uint64_t seed, int ranks) {
    for (int r = 0; r < c_.ranks; ++r) {
      world_.assign(p_.side[r].arrived, {0});
      world_.assign(p_.rank[r].sums,
                    std::vector<uint32_t>(static_cast<size_t>(c_.rounds * threads()), 7));
    }
    return hw::launch<BarrierRounds>(world_, ranks * c_.ctas, p_,
                                     {.seed = seed, .clusters_per_rank = c_.ctas});
  }
  std::string check(uint32_t epoch, int ranks) const {
    for (int r = 0; r < ranks; ++r) {
      const auto sums = world_.download(p_.rank[r].sums, c_.rounds * threads());
      for (int i = 0; i < c_.rounds * threads(); ++i) {
        const uint32_t want = ranks < c_.ranks ? BarrierRounds::kNothing : expected(i);
        const uint32_t got = sums[static_cast<size_t>(i)];
        if (got != want) {
          return "rank " + std::to_string(r) + " sums[" + std::to_string(i) + "]: expected " +
                 std::to_string(want) + ", got " + std::to_string(got);
        }
      }
      if (const auto got = world_.download(p_.side[r].epoch, 1)[0]; got != epoch) {
        return "epoch: expected " + std::to_string(epoch) + ", got " + std::to_string(got);
      }
    }
    return "";
  }
  hw::PeerFailure failure(int rank) const {
    return world_.download(p_.side[rank].abort.failure, 1)[0];
  }
  /// What a host does after a failure: every rank starts again, all at the same epoch.
  void reset() {
    for (int r = 0; r < c_.ranks; ++r) {
      world_.assign(p_.side[r].inbox, std::vector<uint32_t>(static_cast<size_t>(c_.ranks), 0));
      world_.assign(p_.side[r].epoch, {0});
      world_.assign(p_.side[r].abort.raised, {0});
      world_.assign(p_.side[r].abort.failure, {hw::PeerFailure{}});
    }
  }

 private:
  int threads() const { return c_.ctas * kThreads; }
  uint32_t expected(int i) const {
    const int round = i / threads(), neighbour = (i % kThreads + 1) % kThreads;
    uint32_t sum = 0;
    for (int cta = 0; cta < c_.ranks * c_.ctas; ++cta) {
      const int word = round * threads() + cta % c_.ctas * kThreads + neighbour;
      sum += words_[static_cast<size_t>(cta / c_.ctas)][static_cast<size_t>(word)] *
             static_cast<uint32_t>(2 * cta + 1);
    }
    return sum;
  }

  Case c_;
  mutable hw::model::World world_;
  BarrierRounds::Params p_{};
  std::vector<std::vector<uint32_t>> words_;
};

void run_case(const Case& c) {
  CAPTURE(c.ranks);
  CAPTURE(c.ctas);
  for_seeds(12, [&](uint64_t seed) -> std::string {
    Rounds rounds(c, seed);
    for (uint32_t launch = 1; launch <= 2; ++launch) {
      const auto report = rounds.launch(seed + launch, c.ranks);
      if (!report.ok) return report.what;
      const auto wrong =
          rounds.check(c.first_epoch + launch * static_cast<uint32_t>(c.rounds), c.ranks);
      if (!wrong.empty()) return "launch " + std::to_string(launch) + ": " + wrong;
    }
    return "";
  });
}

TEST_CASE("a barrier over all CTAs of all ranks") {
  run_case({.ranks = 1, .ctas = 3, .rounds = 5});
  run_case({.ranks = 2, .ctas = 3, .rounds = 5});
  run_case({.ranks = 3, .ctas = 2, .rounds = 4});
  run_case({.ranks = 8, .ctas = 2, .rounds = 3});
}

TEST_CASE("epochs may wrap round") {
  run_case({.ranks = 2, .ctas = 2, .rounds = 5, .first_epoch = 0xFFFFFFFD});
}

TEST_CASE("a rank that never comes ends the barrier softly") {
  constexpr Case kCase{.ranks = 4, .ctas = 2, .rounds = 3, .first_epoch = 5};
  constexpr int kPresent = 3;
  for_seeds(12, [&](uint64_t seed) -> std::string {
    Rounds rounds(kCase, seed);
    auto report = rounds.launch(seed, kPresent);
    if (!report.ok) return report.what;
    if (report.peer_timeouts != kPresent) {
      return "expected " + std::to_string(kPresent) + " time-outs, got " +
             std::to_string(report.peer_timeouts);
    }
    if (auto wrong = rounds.check(6, kPresent); !wrong.empty()) return wrong;
    for (uint32_t r = 0; r < kPresent; ++r) {
      const hw::PeerFailure f = rounds.failure(static_cast<int>(r));
      if (f.state != 1 || f.rank != r || f.peer != 3 || f.what != EpochBarrier::kWait ||
          f.expected != 6 || f.seen != 5) {
        return "rank " + std::to_string(r) + " reports state " + std::to_string(f.state) +
               " peer " + std::to_string(f.peer) + " expected " + std::to_string(f.expected) +
               " seen " + std::to_string(f.seen);
      }
    }
    rounds.reset();
    report = rounds.launch(seed + 1, kCase.ranks);
    return report.ok ? rounds.check(3, kCase.ranks) : report.what;
  });
}

}  // namespace
}  // namespace logitless::model_test
