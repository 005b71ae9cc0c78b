// SPDX-License-Identifier: Apache-2.0
#include "kernels/handshake.h"

#include <optional>

#include "cases.h"

namespace logitless::model_test {
namespace {

using Reason = HandshakeError::Reason;

constexpr Header kUsual{.tokens = 100, .hidden = 64, .dtype = 1, .flags = 0, .capacity = 128};
constexpr uint32_t kMostTokens = 200;

class Call {
 public:
  Call(int ranks, int ctas, int calls, uint32_t first_epoch = 0) : ranks_(ranks), world_(ranks) {
    p_.ranks = ranks;
    p_.ctas = ctas;
    p_.calls = calls;
    p_.absent = -1;
    for (int r = 0; r < ranks; ++r) {
      std::vector<float> input(kMostTokens);
      for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(i) + 1000.0F * r;
      p_.rank[r] = {.header = kUsual,
                    .inbox = world_.allocate<hw::Vec4>("inbox", 2 * ranks * Handshake::kCells, r),
                    .sent = world_.filled("sent", ranks, first_epoch, r),
                    .error = world_.filled<uint32_t>("error", 1, 0, r),
                    .joined = world_.allocate<uint32_t>("joined", calls, r),
                    .input = hw::Global<const float>(world_.upload("input", input, r).address()),
                    .output = world_.allocate<float>("output", calls * int64_t{kMostTokens}, r),
                    .ended = world_.allocate<uint32_t>("ended", 1, r),
                    .epoch = world_.filled("epoch", 1, first_epoch, r),
                    .abort = {world_.filled<uint32_t>("raised", 1, 0, r),
                              world_.filled<hw::PeerFailure>("failure", 1, {}, r), 1'000'000}};
    }
  }

  Header& header(int rank) { return p_.rank[rank].header; }
  void set_absent(int rank) { p_.absent = rank; }

  hw::model::Report launch(uint64_t seed) {
    for (int r = 0; r < ranks_; ++r) {
      world_.assign(p_.rank[r].ended, {0});
      world_.assign(p_.rank[r].output, std::vector<float>(size_t{kMostTokens} * p_.calls, -1.0F));
    }
    return hw::launch<Handshake>(world_, ranks_ * p_.ctas, p_,
                                 {.seed = seed, .clusters_per_rank = p_.ctas});
  }
  uint32_t error(int rank) const { return world_.download(p_.rank[rank].error, 1)[0]; }
  hw::PeerFailure failure(int rank) const {
    return world_.download(p_.rank[rank].abort.failure, 1)[0];
  }

  /// Every call gives input + flags, where all agreed, or NaN everywhere. No flags: not all came.
  std::string check_output(bool agreed, std::optional<uint32_t> flags) const {
    for (int r = 0; r < ranks_; ++r) {
      if (r == p_.absent) continue;
      const auto tokens = static_cast<int>(p_.rank[r].header.tokens);
      const auto output = world_.download(p_.rank[r].output, p_.calls * int64_t{tokens});
      for (int i = 0; i < p_.calls * tokens; ++i) {
        const float got = output[static_cast<size_t>(i)];
        const float want =
            static_cast<float>(i % tokens) + 1000.0F * r + static_cast<float>(flags.value_or(0));
        if (agreed ? got != want : !std::isnan(got)) {
          return "rank " + std::to_string(r) + " output[" + std::to_string(i) + "]: expected " +
                 (agreed ? std::to_string(want) : "NaN") + ", got " + std::to_string(got);
        }
      }
      if (!flags) continue;
      for (const uint32_t joined : world_.download(p_.rank[r].joined, p_.calls)) {
        if (joined != *flags) {
          return "rank " + std::to_string(r) + " joined: expected " + std::to_string(*flags) +
                 ", got " + std::to_string(joined);
        }
      }
    }
    return "";
  }
  /// `of(rank)`: the error that the rank must have kept.
  std::string check_errors(const std::function<uint32_t(int rank)>& of) const {
    for (int r = 0; r < ranks_; ++r) {
      if (error(r) != of(r)) {
        return "rank " + std::to_string(r) + " error: expected " + std::to_string(of(r)) +
               ", got " + std::to_string(error(r));
      }
    }
    return "";
  }

  /// The last epoch whose header each rank but `absent` has sent to each.
  std::string check_sent(int absent, uint32_t epoch) const {
    for (int r = 0; r < ranks_; ++r) {
      const auto sent = world_.download(p_.rank[r].sent, ranks_);
      for (int from = 0; from < ranks_; ++from) {
        if (from == absent || sent[static_cast<size_t>(from)] == epoch) continue;
        return "rank " + std::to_string(from) + " sent: expected " + std::to_string(epoch) +
               ", got " + std::to_string(sent[static_cast<size_t>(from)]);
      }
    }
    return "";
  }

  /// What a host does after a failure, on every rank.
  void reset() {
    p_.absent = -1;
    for (int r = 0; r < ranks_; ++r) {
      world_.assign(p_.rank[r].sent, std::vector<uint32_t>(static_cast<size_t>(ranks_), 0));
      world_.assign(p_.rank[r].epoch, {0});
      world_.assign(p_.rank[r].error, {0});
      world_.assign(p_.rank[r].abort.raised, {0});
      world_.assign(p_.rank[r].abort.failure, {hw::PeerFailure{}});
    }
  }

 private:
  int ranks_;
  mutable hw::model::World world_;
  Handshake::Params p_{};
};

uint32_t none(int) { return 0; }

std::string agree(Call& call, uint64_t seed, uint32_t flags) {
  const auto report = call.launch(seed);
  if (!report.ok) return report.what;
  return call.check_output(true, flags);
}

TEST_CASE("ranks that agree go on, and join their flags") {
  for (const int ranks : {1, 2, 3, 8}) {
    CAPTURE(ranks);
    for_seeds(12, [&](uint64_t seed) -> std::string {
      Call call(ranks, 2, 3, 0xFFFFFFFD);
      if (auto wrong = agree(call, seed, 0); !wrong.empty()) return wrong;
      call.header(ranks - 1).flags = Header::kWantsInputGrad;
      if (auto wrong = agree(call, seed + 1, Header::kWantsInputGrad); !wrong.empty()) return wrong;
      call.header(0).flags |= Header::kWantsWeightGrad;
      const uint32_t both = Header::kWantsInputGrad | Header::kWantsWeightGrad;
      if (auto wrong = agree(call, seed + 2, both); !wrong.empty()) return wrong;
      return call.check_errors(none);
    });
  }
}

/// One rank's header is different; every rank must see it, and keep it through a later good call.
void run_mismatch(Reason reason, const std::function<void(Header&)>& change) {
  constexpr int kRanks = 4, kOdd = 2;
  CAPTURE(static_cast<int>(reason));
  for_seeds(9, [&](uint64_t seed) -> std::string {
    Call call(kRanks, 2, 2);
    call.header(1).flags = Header::kWantsInputGrad;
    change(call.header(kOdd));
    const uint32_t flags = Header::kWantsInputGrad | call.header(kOdd).flags;
    const auto report = call.launch(seed);
    if (!report.ok) return report.what;
    if (report.peer_timeouts != 0) return "a wait on a rank has timed out";
    if (auto wrong = call.check_output(false, flags); !wrong.empty()) return wrong;
    // Who is odd differs from rank 0; a refusal shows in the header itself, to its sender too.
    const auto kept = [&](int rank) {
      return HandshakeError::pack(reason, rank == kOdd && reason != Reason::kRefused ? 0 : kOdd);
    };
    if (auto wrong = call.check_errors(kept); !wrong.empty()) return wrong;

    call.header(kOdd) = kUsual;
    if (auto wrong = agree(call, seed + 1, Header::kWantsInputGrad); !wrong.empty()) return wrong;
    if (auto wrong = call.check_errors(kept); !wrong.empty()) return "after a good call: " + wrong;

    call.header(3).hidden = 32;  // another error does not hide the first
    if (const auto again = call.launch(seed + 2); !again.ok) return again.what;
    if (auto wrong = call.check_output(false, Header::kWantsInputGrad); !wrong.empty())
      return wrong;
    return call.check_errors(kept);
  });
}

TEST_CASE("a header that differs is an error and NaN on every rank") {
  run_mismatch(Reason::kTokensDiffer, [](Header& h) { h.tokens = 99; });
  run_mismatch(Reason::kHiddenDiffers, [](Header& h) { h.hidden = 65; });
  run_mismatch(Reason::kDtypeDiffers, [](Header& h) { h.dtype = 2; });
  run_mismatch(Reason::kCapacityDiffers, [](Header& h) { h.capacity = 256; });
}

TEST_CASE("one rank refuses: an error and NaN on every rank, nothing lost") {
  run_mismatch(Reason::kRefused,
               [](Header& h) { h.flags = Header::kRefuses | Header::kWantsWeightGrad; });
}

TEST_CASE("more tokens than the capacity") {
  for_seeds(9, [](uint64_t seed) -> std::string {
    Call call(3, 1, 1);
    for (int r = 0; r < 3; ++r) call.header(r).tokens = kUsual.capacity + 1;
    const auto report = call.launch(seed);
    if (!report.ok) return report.what;
    if (auto wrong = call.check_output(false, 0); !wrong.empty()) return wrong;
    return call.check_errors([](int) { return HandshakeError::pack(Reason::kTooManyTokens, 0); });
  });
}

TEST_CASE("a rank that never comes ends the others softly") {
  for (const int ranks : {2, 3, 8}) {
    CAPTURE(ranks);
    for_seeds(12, [&](uint64_t seed) -> std::string {
      constexpr uint32_t kEpoch = 41;
      Call call(ranks, 2, 3, kEpoch);
      const int absent = static_cast<int>(seed) % ranks;
      call.set_absent(absent);
      const auto report = call.launch(seed);
      if (!report.ok) return report.what;
      if (report.peer_timeouts != ranks - 1) {
        return "expected " + std::to_string(ranks - 1) + " time-outs, got " +
               std::to_string(report.peer_timeouts);
      }
      if (auto wrong = call.check_output(false, {}); !wrong.empty()) return wrong;
      for (int r = 0; r < ranks; ++r) {
        if (r == absent) continue;
        const hw::PeerFailure f = call.failure(r);
        const bool right = f.state == 1 && f.rank == static_cast<uint32_t>(r) &&
                           f.peer == static_cast<uint32_t>(absent) &&
                           f.what == Handshake::kHeader && f.expected == kEpoch + 1 &&
                           f.seen == kEpoch;
        if (!right) {
          return "rank " + std::to_string(r) + " reports: state " + std::to_string(f.state) +
                 " rank " + std::to_string(f.rank) + " peer " + std::to_string(f.peer) + " what " +
                 std::to_string(f.what) + " expected " + std::to_string(f.expected) + " seen " +
                 std::to_string(f.seen);
        }
      }
      if (auto wrong = call.check_errors(none); !wrong.empty()) return wrong;
      if (auto wrong = call.check_sent(absent, kEpoch + 1); !wrong.empty()) return wrong;

      // Until the host has reset them they wait for nobody, and send nothing.
      const auto again = call.launch(seed + 1);
      if (!again.ok) return again.what;
      if (again.peer_timeouts != 0) return "a wait has timed out again";
      if (auto wrong = call.check_output(false, {}); !wrong.empty()) return wrong;
      if (auto wrong = call.check_sent(absent, kEpoch + 1); !wrong.empty()) return wrong;
      call.reset();
      return agree(call, seed + 2, 0);
    });
  }
}

}  // namespace
}  // namespace logitless::model_test
