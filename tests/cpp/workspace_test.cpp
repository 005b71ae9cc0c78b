// SPDX-License-Identifier: Apache-2.0
// Query, configure, release, and how much memory a call really takes.
#include <doctest/doctest.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <string>

#include "checks.h"

using namespace logitless;
using namespace logitless::testing;

namespace {

constexpr int64_t kHidden = 8;
constexpr int64_t kVocab = 64;

Capacity capacity(int64_t tokens) { return {tokens, kHidden, kVocab, DType::kBFloat16}; }

Case case_of(int64_t tokens) {
  return make_case({.tokens = tokens, .hidden = kHidden, .shards = {kVocab}});
}

Result call(Context& context, const Case& problem, int rank = 0) {
  return run_rank(context, inputs_of(problem, rank), options_of(problem, {}), problem, {});
}

bool same_results(const Result& a, const Result& b) {
  return same_bits(a.nll, b.nll) && same_bits(a.entropy, b.entropy) && same_bits(a.dx, b.dx) &&
         same_bits(a.dw, b.dw);
}

}  // namespace

TEST_CASE("a query is exact and allocates nothing") {
  const Context context(single_rank(), 2);
  CHECK(context.query(capacity(8192)) > context.query(capacity(4096)));
  CHECK(context.query(capacity(8192)) == context.query(capacity(8192)));
  // Capacities that no machine has are only numbers.
  CHECK(context.query({int64_t{1} << 30, 16384, 1 << 20, DType::kFloat32}) > int64_t{1} << 31);
}

TEST_CASE("a capacity holds the workspace of every call within it") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Context context(single_rank(), 2);
    const int64_t bytes = context.query({130, 72, 2700, dtype});
    for (const int64_t tokens : {1, 64, 65, 130}) {
      for (const int64_t rows : {1, 600, 2700}) {
        const Case problem =
            make_case({.tokens = tokens, .hidden = 72, .shards = {rows}, .dtype = dtype});
        for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
          Ask ask;
          ask.memory = memory;
          const Plan plan = plan_call(context, inputs_of(problem, 0), options_of(problem, ask),
                                      {true, true, true});
          CHECK(plan.workspace_bytes() <= bytes);
        }
      }
    }
  }
}

TEST_CASE("a capacity that is none is refused") {
  const Context context(single_rank(), 1);
  for (const Capacity& wrong :
       {Capacity{-1, 8, 64, DType::kBFloat16}, Capacity{10, 0, 64, DType::kBFloat16},
        Capacity{10, 8, 0, DType::kBFloat16}}) {
    CHECK(thrown_by([&] { context.query(wrong); }).kind() == ErrorKind::kValue);
  }
}

TEST_CASE("what is configured is immutable until it is released") {
  Context context(single_rank(), 1);
  const int64_t bytes = context.query(capacity(8192));
  context.configure(capacity(8192));
  CHECK(context.query(capacity(8192)) == bytes);
  context.configure(capacity(8192));  // the same again changes nothing
  for (const int64_t other : {4096, 8193}) {
    for (const Error& error : {thrown_by([&] { context.query(capacity(other)); }),
                               thrown_by([&] { context.configure(capacity(other)); })}) {
      CHECK(error.kind() == ErrorKind::kState);
      CHECK(says(error, {"8192", std::to_string(other)}));
    }
  }
  const Error error = thrown_by([&] { context.query({8192, 16, kVocab, DType::kBFloat16}); });
  CHECK(says(error, {"8192 tokens x 8 hidden", "8192 tokens x 16 hidden"}));

  CHECK(same_results(call(context, case_of(100)), run(case_of(100), {})[0]));
  CHECK(same_results(call(context, case_of(8192)), run(case_of(8192), {})[0]));
  CHECK(same_results(call(context, case_of(100)), run(case_of(100), {})[0]));
  const Case large = case_of(8193);
  const Error beyond = thrown_by([&] { call(context, large); });
  CHECK(beyond.kind() == ErrorKind::kState);
  CHECK(says(beyond, {"8192", "8193"}));
  CHECK(same_results(call(context, case_of(100)), run(case_of(100), {})[0]));

  context.release();
  CHECK(same_results(call(context, large), run(large, {})[0]));
  context.configure(capacity(4096));
  CHECK(context.query(capacity(4096)) > 0);
}

TEST_CASE("a call beyond the configured hidden size or vocabulary is an error with both") {
  Context context(single_rank(), 1);
  context.configure({100, 16, 64, DType::kBFloat16});
  const Case hidden = make_case({.tokens = 10, .hidden = 24, .shards = {64}});
  CHECK(says(thrown_by([&] { call(context, hidden); }), {"16", "24"}));
  const Case vocab = make_case({.tokens = 10, .hidden = 16, .shards = {65}});
  CHECK(says(thrown_by([&] { call(context, vocab); }), {"64", "65"}));
}

TEST_CASE("ranks configure together") {
  const Case problem = make_case({.tokens = 100, .hidden = 16, .shards = {40, 50}});
  const Case large = make_case({.tokens = 101, .hidden = 16, .shards = {40, 50}});
  std::vector<std::optional<Error>> beyond(2), different(2);
  const auto thrown = on_ranks(
      make_thread_group(2, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
        Context context(member, 1);
        const auto at = static_cast<size_t>(rank);
        const int64_t rows = problem.weight[at].rows();
        try {
          context.configure({rank == 0 ? 100 : 99, 16, rows, DType::kBFloat16});
        } catch (const Error& error) {
          different[at] = error;
        }
        context.configure({100, 16, rows, DType::kBFloat16});
        if (!same_results(call(context, problem, rank), run(problem, {})[at])) {
          throw Error(ErrorKind::kState, "other bits than a fresh context");
        }
        try {
          call(context, large, rank);
        } catch (const Error& error) {
          beyond[at] = error;
        }
        if (!same_results(call(context, problem, rank), run(problem, {})[at])) {
          throw Error(ErrorKind::kState, "other bits after a call that did not fit");
        }
      });
  CHECK(all_returned(thrown));
  for (size_t rank = 0; rank < 2; ++rank) {
    REQUIRE(different[rank].has_value());
    CHECK(says(*different[rank], {"tokens", "100", "99"}));
    CHECK(std::string(different[rank]->what()) == std::string(different[0]->what()));
    REQUIRE(beyond[rank].has_value());
    CHECK(says(*beyond[rank], {"100", "101"}));
  }
}

TEST_CASE("a call beyond one rank's capacity fails on every rank and strands nobody") {
  const Case problem = make_case({.tokens = 20, .hidden = 16, .shards = {40, 50}});
  std::vector<std::optional<Error>> first(2);
  const auto group = make_thread_group(2, std::chrono::seconds(20));
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    Context context(member, 1);
    // Rank 1 configured for fewer vocabulary rows than its shard has.
    context.configure({20, 16, 40, DType::kBFloat16});
    try {
      call(context, problem, rank);
    } catch (const Error& error) {
      first[static_cast<size_t>(rank)] = error;
    }
  });
  CHECK(all_returned(thrown));
  for (const auto& error : first) {
    REQUIRE(error.has_value());
    CHECK(error->kind() == ErrorKind::kState);
    CHECK(says(*error, {"40", "50"}));
  }
}

#if !defined(__SANITIZE_ADDRESS__)  // its shadow memory and quarantine would be measured instead

namespace {

// VmHWM or VmRSS of this process, in bytes.
int64_t status_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kibibytes = 0;
    if (word == name + ":" && status >> kibibytes) return kibibytes * 1024;
  }
  return -1;
}

// By how much `body` raised the resident memory at its peak.
int64_t peak_growth(const std::function<void()>& body) {
  std::ofstream("/proc/self/clear_refs") << "5";  // VmHWM := VmRSS
  const int64_t before = status_bytes("VmHWM");
  REQUIRE(before > 0);
  REQUIRE(before <= status_bytes("VmRSS") + (int64_t{1} << 20));
  body();
  return status_bytes("VmHWM") - before;
}

}  // namespace

TEST_CASE("a call takes its workspace and no more, far less than the logits") {
  const int64_t tokens = 2048;
  const int64_t vocab = 32768;
  const int64_t logits = tokens * vocab * 2;  // 128 MiB in bfloat16
  for (const bool entropy_gradient : {false, true}) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      CAPTURE(entropy_gradient);
      const Case problem = make_case({.tokens = tokens, .hidden = 32, .shards = {vocab}});
      Context context(single_rank(), 2);
      call(context, make_case({.tokens = 2, .hidden = 32, .shards = {600}}));  // starts the library
      context.release();

      Options options = options_of(problem, {});
      options.memory = memory;
      const Inputs inputs = inputs_of(problem, 0);
      const Plan plan = plan_call(context, inputs, options, {true, true, true});
      Tensor nll = Tensor::vector(DType::kFloat32, tokens);
      Tensor lse = Tensor::vector(DType::kFloat32, tokens);
      Tensor entropy = Tensor::vector(DType::kFloat32, tokens);
      Tensor rows = Tensor::matrix(DType::kFloat32, 6, tokens);
      Tensor stash = Tensor::matrix(DType::kBFloat16, plan.stash_columns, plan.token_pitch);
      Tensor dx = Tensor::matrix(DType::kBFloat16, tokens, 32);
      Tensor dw = Tensor::matrix(DType::kBFloat16, vocab, 32);
      const Saved saved{rows.view(), plan.stash_columns > 0 ? stash.view() : TensorView{}};
      Upstream upstream;
      upstream.nll = problem.grad_nll.view();
      if (entropy_gradient) upstream.entropy = problem.grad_entropy.view();

      const int64_t grown = peak_growth([&] {
        forward(context, inputs, options, {nll.view(), lse.view(), entropy.view()}, saved);
        backward(context, inputs, options, saved, upstream, {dx.view(), dw.view(), false});
      });
      MESSAGE("workspace " << plan.workspace_bytes() << " bytes, measured growth " << grown
                           << " bytes, bfloat16 logits " << logits << " bytes");
      // Stacks, code that oneDNN generates, and what its products pack in each thread.
      constexpr int64_t kLibraries = int64_t{16} << 20;
      CHECK(grown <= plan.workspace_bytes() + kLibraries);
      CHECK(grown < logits / 2);
    }
  }
}

#endif
