// SPDX-License-Identifier: Apache-2.0
#include "kernels/host_ring.h"

#include <bit>
#include <numeric>

#include "cases.h"

namespace logitless::model_test {
namespace {

constexpr int kChunk = HostRing::kCells * 4;

struct Case {
  int ranks, ctas, chunks;
  uint64_t first_epoch = 0;
};

float add_in_tree(const std::vector<float>& parts, int first, int last) {
  if (last - first == 1) return parts[static_cast<size_t>(first)];
  const int middle =
      first + static_cast<int>(std::bit_floor(static_cast<unsigned>(last - first - 1)));
  return add_in_tree(parts, first, middle) + add_in_tree(parts, middle, last);
}

/// Every rank on a host of its own.
std::vector<int> hosts_of(int ranks) {
  std::vector<int> hosts(static_cast<size_t>(ranks));
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}

hw::Global<float> as_floats_of(hw::Global<hw::Float4> p) {
  return hw::Global<float>(reinterpret_cast<float*>(p.address()));
}

class Ring {
 public:
  explicit Ring(const Case& c) : c_(c), world_(c.ranks, hosts_of(c.ranks)) {
    p_.ranks = c.ranks;
    p_.ctas = c.ctas;
    p_.chunks = c.chunks;
    const int pairs = c.ctas * 2, slots = pairs * (c.ranks - 1);
    const auto outbox = world_.symmetric<hw::Float4>("outbox", slots * HostRing::kCells);
    const auto inbox = world_.symmetric<hw::Float4>("inbox", slots * HostRing::kCells);
    const auto arrived = world_.symmetric_filled("arrived", slots, c.first_epoch);
    const auto credit = world_.symmetric_filled("credit", pairs, c.first_epoch);
    const auto note = world_.symmetric_filled("note", pairs, hw::Vec4{});
    for (int r = 0; r < c.ranks; ++r) {
      const auto at = static_cast<size_t>(r);
      const auto part = world_.allocate<hw::Float4>("part", count() / 4, r);
      p_.rank[r] = {.part = hw::Global<const hw::Float4>(part.address()),
                    .sum = world_.allocate<hw::Float4>("sum", count() / 4, r),
                    .outbox = outbox[at],
                    .inbox = inbox[at],
                    .arrived = arrived[at],
                    .credit = credit[at],
                    .note = note[at],
                    .epoch = world_.filled("epoch", c.ctas, c.first_epoch, r),
                    .abort = {world_.filled<uint32_t>("raised", 1, 0, r),
                              world_.filled<hw::PeerFailure>("failure", 1, {}, r), 1'000'000}};
      part_.push_back(as_floats_of(part));
    }
  }

  hw::model::Report launch(uint64_t seed, int ranks) {
    Random random(seed);
    parts_.clear();
    for (int r = 0; r < c_.ranks; ++r) {
      std::vector<float> part(static_cast<size_t>(count()));
      for (auto& v : part) v = static_cast<float>(random());
      world_.assign(part_[static_cast<size_t>(r)], part);
      world_.assign(as_floats_of(p_.rank[r].sum), std::vector<float>(part.size(), 12345.0F));
      parts_.push_back(std::move(part));
    }
    return hw::launch<HostRing>(world_, ranks * c_.ctas, p_,
                                {.seed = seed, .clusters_per_rank = c_.ctas});
  }
  std::string check(int ranks) const {
    for (int r = 0; r < ranks; ++r) {
      const auto sum = world_.download(as_floats_of(p_.rank[r].sum), count());
      for (size_t i = 0; i < sum.size(); ++i) {
        const float want = ranks < c_.ranks ? hw::as_float(0x7FFFFFFF) : expected(i);
        if (hw::as_bits(sum[i]) != hw::as_bits(want)) {
          return "rank " + std::to_string(r) + " sum[" + std::to_string(i) + "]: expected " +
                 std::to_string(want) + ", got " + std::to_string(sum[i]);
        }
      }
    }
    return "";
  }
  hw::PeerFailure failure(int rank) const {
    return world_.download(p_.rank[rank].abort.failure, 1)[0];
  }
  void reset() {
    for (int r = 0; r < c_.ranks; ++r) {
      const auto zeros = [](int n) { return std::vector<uint64_t>(static_cast<size_t>(n), 0); };
      world_.assign(p_.rank[r].arrived, zeros(c_.ctas * 2 * (c_.ranks - 1)));
      world_.assign(p_.rank[r].credit, zeros(c_.ctas * 2));
      world_.assign(p_.rank[r].epoch, zeros(c_.ctas));
      world_.assign(p_.rank[r].abort.raised, {0});
      world_.assign(p_.rank[r].abort.failure, {hw::PeerFailure{}});
    }
  }

 private:
  int count() const { return c_.ctas * c_.chunks * kChunk; }  // elements of a part
  float expected(size_t i) const {
    std::vector<float> parts;
    for (const auto& part : parts_) parts.push_back(part[i]);
    return add_in_tree(parts, 0, c_.ranks);
  }

  Case c_;
  mutable hw::model::World world_;
  HostRing::Params p_{};
  std::vector<hw::Global<float>> part_;
  std::vector<std::vector<float>> parts_;
};

void run_case(const Case& c) {
  CAPTURE(c.ranks);
  CAPTURE(c.ctas);
  CAPTURE(c.chunks);
  for_seeds(12, [&](uint64_t seed) -> std::string {
    Ring ring(c);
    for (uint64_t launch = 0; launch < 2; ++launch) {
      const auto report = ring.launch(seed + launch, c.ranks);
      if (!report.ok) return report.what;
      if (auto wrong = ring.check(c.ranks); !wrong.empty()) {
        return "launch " + std::to_string(launch) + ": " + wrong;
      }
    }
    return "";
  });
}

TEST_CASE("parts go round a ring of hosts and are added in tree order") {
  run_case({.ranks = 3, .ctas = 2, .chunks = 7});
  run_case({.ranks = 2, .ctas = 2, .chunks = 7});
  run_case({.ranks = 4, .ctas = 1, .chunks = 6});
  // Shorter than the two parities; with two ranks, nothing that is sent waits for what is received.
  run_case({.ranks = 3, .ctas = 1, .chunks = 1});
  run_case({.ranks = 2, .ctas = 2, .chunks = 1});
}

TEST_CASE("epochs of messages are 64-bit") {
  run_case({.ranks = 3, .ctas = 1, .chunks = 5, .first_epoch = 0xFFFFFFFD});
}

TEST_CASE("a broken ring ends softly") {
  constexpr Case kCase{.ranks = 3, .ctas = 2, .chunks = 3};
  constexpr int kPresent = 2;
  for_seeds(12, [&](uint64_t seed) -> std::string {
    Ring ring(kCase);
    auto report = ring.launch(seed, kPresent);
    if (!report.ok) return report.what;
    if (report.peer_timeouts != kPresent) {
      return "expected " + std::to_string(kPresent) + " time-outs, got " +
             std::to_string(report.peer_timeouts);
    }
    if (auto wrong = ring.check(kPresent); !wrong.empty()) return wrong;
    for (uint32_t r = 0; r < kPresent; ++r) {
      const hw::PeerFailure f = ring.failure(static_cast<int>(r));
      if (f.state != 1 || f.rank != r) {
        return "rank " + std::to_string(r) + " reports state " + std::to_string(f.state) +
               " of rank " + std::to_string(f.rank);
      }
    }
    ring.reset();
    report = ring.launch(seed + 1, kCase.ranks);
    return report.ok ? ring.check(kCase.ranks) : report.what;
  });
}

}  // namespace
}  // namespace logitless::model_test
