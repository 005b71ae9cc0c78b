// SPDX-License-Identifier: Apache-2.0
// One vocabulary over several ranks: against the reference, and with equal bits everywhere.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string>

#include "checks.h"

using namespace logitless;
using namespace logitless::testing;

namespace {

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat32};

// Passes everything on and looks at it.
class WatchedGroup final : public Group {
 public:
  explicit WatchedGroup(std::shared_ptr<Group> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void all_gather(const void* mine, void* all, int64_t bytes, const Device& device,
                  const char* what) override {
    ++exchanges;
    inner_->all_gather(mine, all, bytes, device, what);
  }
  void all_to_all(const void* send, void* receive, int64_t bytes, const Device& device,
                  const char* what) override {
    ++exchanges;
    inner_->all_to_all(send, receive, bytes, device, what);
    received.resize(static_cast<size_t>(bytes * size()) / sizeof(float));
    std::memcpy(received.data(), receive, received.size() * sizeof(float));
  }
  void abort(const Error& reason) noexcept override { inner_->abort(reason); }

  int exchanges = 0;
  std::vector<float> received;  // of the last all_to_all: what every rank had for this one

 private:
  std::shared_ptr<Group> inner_;
};

// Σ over [first, last) in the order of the tree whose left part is the largest power of two below the whole:
// (0 + 1) + 2, ((0 + 1) + (2 + 3)) + 4.
float tree_sum(const std::vector<float>& parts, size_t stride, size_t at, int first, int last) {
  if (last - first == 1) return parts[static_cast<size_t>(first) * stride + at];
  int left = 1;
  while (2 * left < last - first) left *= 2;
  const int middle = first + left;
  return tree_sum(parts, stride, at, first, middle) + tree_sum(parts, stride, at, middle, last);
}

std::vector<int64_t> uneven_shards(int ranks) {
  const std::vector<int64_t> sizes = {130, 700, 65, 1, 513};
  return {sizes.begin(), sizes.begin() + ranks};
}

}  // namespace

TEST_CASE("shards of unequal size agree with the reference") {
  for (const int ranks : {2, 3, 5}) {
    for (const int64_t tokens : {1, 4, 7, 66}) {
      for (const DType dtype : kDTypes) {
        for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
          CAPTURE(ranks);
          CAPTURE(tokens);
          CAPTURE(std::string(to_string(dtype)));
          Ask ask;
          ask.memory = memory;
          run_and_check(make_case({.tokens = tokens,
                                   .hidden = 40,
                                   .shards = uneven_shards(ranks),
                                   .dtype = dtype,
                                   .logit_std = 2.0,
                                   .per_token_temperature = tokens == 7,
                                   .ignore_every = tokens == 66 ? 5 : 0,
                                   .seed = static_cast<uint64_t>(ranks)}),
                        ask);
        }
      }
    }
  }
}

TEST_CASE("without an entropy gradient the stash serves every rank") {
  for (const DType dtype : kDTypes) {
    Ask ask;
    ask.memory = MemoryPolicy::stash();
    ask.use_h = false;
    run_and_check(
        make_case({.tokens = 130, .hidden = 72, .shards = uneven_shards(3), .dtype = dtype}), ask);
  }
}

TEST_CASE("targets at the edges of the shards belong to one rank only") {
  for (const int64_t rows : {8, 72, 520}) {
    Case problem = make_case({.tokens = 12, .hidden = 24, .shards = {rows, rows}});
    const int64_t ids[] = {0, 1, rows - 1, rows, rows + 1, 2 * rows - 1};
    for (int64_t i = 0; i < 12; ++i) problem.target.set_id(i, ids[i % 6]);
    run_and_check(problem, {});
  }
}

TEST_CASE("a rank that owns no target is right") {
  Case problem = make_case({.tokens = 33, .hidden = 24, .shards = {200, 300, 100}});
  for (int64_t i = 0; i < 33; ++i) problem.target.set_id(i, i);
  run_and_check(problem, {});
}

TEST_CASE("ranks of very different mass are merged without loss") {
  // The top of rank 0 is 500 nats below that of rank 1, and so on in every order.
  for (const int64_t top : {0, 1, 2}) {
    for (const DType dtype : kDTypes) {
      Case problem =
          make_case({.tokens = 40, .hidden = 24, .shards = {200, 200, 200}, .dtype = dtype});
      for (int64_t i = 0; i < 40; ++i) problem.x.set(i, 0, i % 4 == 0 ? 0.0 : 1.0);
      for (int64_t v = 0; v < 600; ++v) problem.set_weight(v, 0, v / 200 == top ? 300.0 : -200.0);
      run_and_check(problem, {});
    }
  }
}

TEST_CASE("a shard of nothing but masked classes is as if it were not there") {
  for (const DType dtype : kDTypes) {
    for (const int64_t masked : {0, 1}) {
      CAPTURE(masked);
      Case problem = make_case({.tokens = 20, .hidden = 24, .shards = {150, 150}, .dtype = dtype});
      for (int64_t i = 0; i < 20; ++i) {
        problem.x.set(i, 0, 2.0);
        problem.target.set_id(i, (1 - masked) * 150 + i);
      }
      for (int64_t v = 0; v < 300; ++v) {
        if (v / 150 == masked) problem.set_weight_row(v, 0.0);
        problem.set_weight(v, 0, v / 150 == masked ? -3e38 : 0.0);
      }
      const std::vector<Result> both = run_and_check(problem, {});
      Case alone = problem;
      alone.weight = {problem.weight[static_cast<size_t>(1 - masked)]};
      alone.vocab_start = {0};
      alone.vocab_size = 150;
      for (int64_t i = 0; i < 20; ++i) alone.target.set_id(i, i);
      const Result one = run(alone, {})[0];
      for (int64_t i = 0; i < 20; ++i) {
        CHECK(both[0].nll.get(i) == doctest::Approx(one.nll.get(i)).epsilon(1e-6));
        CHECK(both[0].entropy.get(i) == doctest::Approx(one.entropy.get(i)).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("padding may begin anywhere in the last shards") {
  for (const bool start_given : {true, false}) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      CAPTURE(start_given);
      Case problem = make_case({.tokens = 20, .hidden = 24, .shards = {64, 64, 64}});
      problem.vocab_size = 100;
      for (int64_t i = 0; i < 20; ++i) problem.target.set_id(i, 5 * i);
      for (int64_t v = 100; v < 192; ++v) problem.set_weight_row(v, std::nan(""));
      std::vector<Result> results(3);
      const auto thrown = on_ranks(
          make_thread_group(3, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
            Context context(member, 1);
            Ask ask;
            ask.memory = memory;
            ask.vocab_size = 100;
            if (start_given) ask.vocab_start = 64 * rank;
            results[static_cast<size_t>(rank)] =
                run_rank(context, inputs_of(problem, rank), options_of(problem, ask), problem, ask);
          });
      REQUIRE(all_returned(thrown));
      check_statistics(problem, results);
      check_gradients(problem, {}, results);
    }
  }
}

TEST_CASE("shards need not lie in the order of the ranks") {
  const Case straight = make_case({.tokens = 21, .hidden = 24, .shards = {100, 60}});
  Case swapped = straight;
  std::swap(swapped.weight[0], swapped.weight[1]);
  swapped.vocab_start = {100, 0};
  const auto group = make_thread_group(2, kPatience);
  std::vector<Result> results(2);
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    Context context(member, 1);
    Ask ask;
    ask.vocab_start = swapped.vocab_start[static_cast<size_t>(rank)];
    results[static_cast<size_t>(rank)] =
        run_rank(context, inputs_of(swapped, rank), options_of(swapped, ask), swapped, ask);
  });
  REQUIRE(all_returned(thrown));
  check_statistics(straight, results);
  std::swap(results[0], results[1]);
  check_gradients(straight, {}, results);
}

TEST_CASE("no tokens are legal on every rank") {
  for (const bool sequence_parallel : {false, true}) {
    const Case problem = make_case({.tokens = 0, .hidden = 16, .shards = {30, 40, 50}});
    std::vector<Result> results(3);
    const auto thrown = on_ranks(
        make_thread_group(3, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
          Context context(member, 1);
          Options options = options_of(problem, {});
          options.sequence_parallel = sequence_parallel;
          results[static_cast<size_t>(rank)] =
              run_rank(context, inputs_of(problem, rank), options, problem, {});
        });
    REQUIRE(all_returned(thrown));
    for (const Result& result : results) {
      for (const double value : result.dw.values()) REQUIRE(value == 0.0);
    }
  }
}

TEST_CASE("dX is the sum of the ranks' parts in the order of a balanced tree") {
  for (const int ranks : {2, 3, 5}) {
    for (const int64_t tokens : {2, 33}) {
      for (const DType dtype : kDTypes) {
        CAPTURE(ranks);
        CAPTURE(tokens);
        const int64_t hidden = 24;
        const Case problem = make_case(
            {.tokens = tokens, .hidden = hidden, .shards = uneven_shards(ranks), .dtype = dtype});
        std::vector<std::shared_ptr<WatchedGroup>> watched;
        std::vector<std::shared_ptr<Group>> group;
        for (const auto& member : make_thread_group(ranks, kPatience)) {
          watched.push_back(std::make_shared<WatchedGroup>(member));
          group.push_back(watched.back());
        }
        std::vector<Result> results(static_cast<size_t>(ranks));
        const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
          Context context(member, 1);
          results[static_cast<size_t>(rank)] =
              run_rank(context, inputs_of(problem, rank), options_of(problem, {}), problem, {});
        });
        REQUIRE(all_returned(thrown));

        // Rank r owns the tokens [r · ceil(M/R), (r + 1) · ceil(M/R)).
        const int64_t block = (tokens + ranks - 1) / ranks;
        const auto stride = static_cast<size_t>(block * hidden);
        int64_t wrong = 0;
        for (int64_t i = 0; i < tokens; ++i) {
          const std::vector<float>& parts = watched[static_cast<size_t>(i / block)]->received;
          REQUIRE(parts.size() == stride * static_cast<size_t>(ranks));
          for (int64_t h = 0; h < hidden; ++h) {
            const auto at = static_cast<size_t>(i % block * hidden + h);
            const float sum = tree_sum(parts, stride, at, 0, ranks);
            const float expected = dtype == DType::kBFloat16 ? round_to_bf16(sum) : sum;
            for (const Result& result : results) wrong += result.dx.get(i, h) != expected ? 1 : 0;
          }
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("sequence parallel takes and gives token shards of any size") {
  for (const std::vector<int64_t>& shares :
       {std::vector<int64_t>{20, 1, 12}, std::vector<int64_t>{0, 33, 0},
        std::vector<int64_t>{11, 11, 11}, std::vector<int64_t>{0, 0, 33}}) {
    for (const DType dtype : kDTypes) {
      const Case problem = make_case({.tokens = 33,
                                      .hidden = 24,
                                      .shards = uneven_shards(3),
                                      .dtype = dtype,
                                      .ignore_every = 8});
      const std::vector<Result> whole = run_and_check(problem, {});
      std::vector<Result> results(3);
      std::vector<Tensor> x;
      int64_t begin = 0;
      for (const int64_t share : shares) {
        x.push_back(rows_of(problem.x, begin, begin + share));
        begin += share;
      }
      const auto thrown = on_ranks(
          make_thread_group(3, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
            Context context(member, 1);
            Inputs inputs = inputs_of(problem, rank);
            inputs.x = x[static_cast<size_t>(rank)].view();
            Options options = options_of(problem, {});
            options.sequence_parallel = true;
            results[static_cast<size_t>(rank)] = run_rank(context, inputs, options, problem, {});
          });
      REQUIRE(all_returned(thrown));
      begin = 0;
      for (size_t rank = 0; rank < 3; ++rank) {
        CHECK(same_bits(results[rank].nll, whole[rank].nll));
        CHECK(same_bits(results[rank].lse, whole[rank].lse));
        CHECK(same_bits(results[rank].entropy, whole[rank].entropy));
        CHECK(same_bits(results[rank].dw, whole[rank].dw));
        CHECK(same_bits(results[rank].dx, rows_of(whole[rank].dx, begin, begin + shares[rank])));
        begin += shares[rank];
      }
    }
  }
}

TEST_CASE("ranks may want different gradients and remember in different ways") {
  const Case problem = make_case({.tokens = 33, .hidden = 24, .shards = uneven_shards(3)});
  for (const bool use_h : {false, true}) {
    Ask all;
    all.use_h = use_h;
    const std::vector<Result> want = run(problem, all);
    std::vector<Result> results(3);
    const auto thrown = on_ranks(
        make_thread_group(3, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
          Context context(member, 1);
          Ask ask = all;
          ask.weight_grad = rank != 1;
          ask.input_grad = rank != 2;
          if (rank == 0) ask.memory = MemoryPolicy::stash();
          results[static_cast<size_t>(rank)] =
              run_rank(context, inputs_of(problem, rank), options_of(problem, ask), problem, ask);
        });
    REQUIRE(all_returned(thrown));
    CHECK(same_bits(results[0].dx, want[0].dx));
    CHECK(same_bits(results[1].dx, want[1].dx));
    CHECK(same_bits(results[0].dw, want[0].dw));
    CHECK(same_bits(results[2].dw, want[2].dw));
  }
}

TEST_CASE("a gradient of x that nobody wants is not exchanged") {
  const Case problem = make_case({.tokens = 33, .hidden = 24, .shards = {100, 200}});
  std::atomic<int> exchanges_with{0};
  std::atomic<int> exchanges_without{0};
  for (const bool wanted : {true, false}) {
    const auto thrown = on_ranks(
        make_thread_group(2, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
          const auto watched = std::make_shared<WatchedGroup>(member);
          Context context(watched, 1);
          Ask ask;
          ask.input_grad = wanted;
          run_rank(context, inputs_of(problem, rank), options_of(problem, ask), problem, ask);
          (wanted ? exchanges_with : exchanges_without) += watched->exchanges;
        });
    REQUIRE(all_returned(thrown));
  }
  CHECK(exchanges_without < exchanges_with);
}

TEST_CASE("assume_uniform saves exchanges and no bits change") {
  const Case problem = make_case({.tokens = 33, .hidden = 24, .shards = {100, 200}});
  const std::vector<Result> want = run(problem, {});
  std::vector<Result> results(2);
  std::vector<int> first(2), second(2);
  const auto thrown = on_ranks(
      make_thread_group(2, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
        const auto watched = std::make_shared<WatchedGroup>(member);
        Context context(watched, 1);
        Ask ask;
        const auto at = static_cast<size_t>(rank);
        run_rank(context, inputs_of(problem, rank), options_of(problem, ask), problem, ask);
        first[at] = watched->exchanges;
        ask.assume_uniform = true;
        results[at] =
            run_rank(context, inputs_of(problem, rank), options_of(problem, ask), problem, ask);
        second[at] = watched->exchanges - first[at];
      });
  REQUIRE(all_returned(thrown));
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(second[rank] < first[rank]);
    CHECK(same_bits(results[rank].nll, want[rank].nll));
    CHECK(same_bits(results[rank].dx, want[rank].dx));
    CHECK(same_bits(results[rank].dw, want[rank].dw));
  }
}

TEST_CASE("one context serves calls of many shapes one after the other") {
  const std::vector<int64_t> tokens = {65, 3, 130, 1, 0, 65};
  const auto thrown = on_ranks(
      make_thread_group(3, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
        Context context(member, 1);
        for (const int64_t count : tokens) {
          for (const DType dtype : kDTypes) {
            const Case problem = make_case({.tokens = count,
                                            .hidden = 16 + count % 5,
                                            .shards = {40, 530, 9},
                                            .dtype = dtype});
            const Result mine =
                run_rank(context, inputs_of(problem, rank), options_of(problem, {}), problem, {});
            const Result fresh = run(problem, {})[static_cast<size_t>(rank)];
            const bool equal = same_bits(mine.nll, fresh.nll) && same_bits(mine.dx, fresh.dx) &&
                               same_bits(mine.dw, fresh.dw);
            if (!equal) throw Error(ErrorKind::kState, "stale: " + std::to_string(count));
          }
        }
      });
  REQUIRE(all_returned(thrown));
}

TEST_CASE("disjoint groups run side by side") {
  const Case a = make_case({.tokens = 33, .hidden = 24, .shards = {100, 200}, .seed = 1});
  const Case b = make_case({.tokens = 50, .hidden = 16, .shards = {70, 30}, .seed = 2});
  std::vector<std::shared_ptr<Group>> all = make_thread_group(2, kPatience);
  for (const auto& member : make_thread_group(2, kPatience)) all.push_back(member);
  std::vector<Result> results(4);
  const auto thrown = on_ranks(all, [&](int thread, const std::shared_ptr<Group>& member) {
    const Case& problem = thread < 2 ? a : b;
    Context context(member, 1);
    results[static_cast<size_t>(thread)] =
        run_rank(context, inputs_of(problem, thread % 2), options_of(problem, {}), problem, {});
  });
  REQUIRE(all_returned(thrown));
  check_statistics(a, {results[0], results[1]});
  check_gradients(a, {}, {results[0], results[1]});
  check_statistics(b, {results[2], results[3]});
  check_gradients(b, {}, {results[2], results[3]});
}

TEST_CASE("the bits of a group are the same on every run") {
  const Case problem = make_case({.tokens = 66, .hidden = 40, .shards = uneven_shards(5)});
  const std::vector<Result> want = run(problem, {});
  for (int repetition = 0; repetition < 5; ++repetition) {
    Ask ask;
    ask.threads = 1 + repetition % 3;
    const std::vector<Result> again = run(problem, ask);
    for (size_t rank = 0; rank < 5; ++rank) {
      CHECK(same_bits(again[rank].nll, want[rank].nll));
      CHECK(same_bits(again[rank].entropy, want[rank].entropy));
      CHECK(same_bits(again[rank].dx, want[rank].dx));
      CHECK(same_bits(again[rank].dw, want[rank].dw));
    }
  }
}
