// SPDX-License-Identifier: Apache-2.0
// Sizes before anything is allocated: views, the stash under every memory policy, and the plan's own words.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "checks.h"

using namespace logitless;
using namespace logitless::testing;

namespace {

Problem problem_of(int64_t tokens, int64_t vocab_rows, DType dtype = DType::kBFloat16) {
  Problem problem;
  problem.tokens = tokens;
  problem.hidden = 64;
  problem.vocab_rows = vocab_rows;
  problem.vocab_size = vocab_rows;
  problem.dtype = dtype;
  return problem;
}

constexpr Wanted kBoth{.entropy = false, .input_grad = true, .weight_grad = true};

Machine machine() { return {.device = {}, .threads = 2, .native_bf16 = true}; }

}  // namespace

TEST_CASE("a view counts its elements and knows whether it is there") {
  CHECK_FALSE(TensorView{}.present());
  CHECK(TensorView{}.numel() == 0);
  float values[6] = {};
  const TensorView vector = vector_view(values, 6);
  CHECK(vector.present());
  CHECK(vector.numel() == 6);
  CHECK(vector.strides[0] == 1);
  const TensorView matrix = matrix_view(values, 2, 3);
  CHECK(matrix.numel() == 6);
  CHECK(matrix.strides[0] == 3);
  CHECK(matrix.strides[1] == 1);
  CHECK(matrix.dtype == DType::kFloat32);
  CHECK(matrix_view(values, 0, 3).present());
  CHECK(size_of(DType::kBFloat16) == 2);
  CHECK(size_of(DType::kInt64) == 8);
  CHECK(std::string(to_string(DType::kBFloat16)) == "bfloat16");
}

TEST_CASE("rows of a shard beyond the vocabulary are not live") {
  Problem problem = problem_of(16, 64);
  problem.vocab_start = 100;
  problem.vocab_size = 130;
  CHECK(problem.live_rows() == 30);
  problem.vocab_size = 100;
  CHECK(problem.live_rows() == 0);
  problem.vocab_size = 50;
  CHECK(problem.live_rows() == 0);
  problem.vocab_size = 1000;
  CHECK(problem.live_rows() == 64);
}

TEST_CASE("stash and recompute are taken at their word") {
  for (const int64_t tokens : {1, 16, 17, 4096, 1 << 20}) {
    for (const int64_t rows : {1, 513, 2500, 1 << 18}) {
      CAPTURE(tokens);
      CAPTURE(rows);
      CHECK(stash_columns(problem_of(tokens, rows), MemoryPolicy::stash()) == rows);
      CHECK(stash_columns(problem_of(tokens, rows), MemoryPolicy::recompute()) == 0);
    }
  }
  Problem padded = problem_of(16, 64);
  padded.vocab_size = 40;
  CHECK(stash_columns(padded, MemoryPolicy::stash()) == 40);
}

TEST_CASE("the automatic stash ends at one gibibyte") {
  const auto columns = [](int64_t tokens, int64_t rows, DType dtype) {
    return stash_columns(problem_of(tokens, rows, dtype), MemoryPolicy::automatic());
  };
  // 4096 tokens: a bfloat16 column is 8 KiB, so 131072 of them are exactly the budget.
  CHECK(columns(4096, 131071, DType::kBFloat16) == 131071);
  CHECK(columns(4096, 131072, DType::kBFloat16) == 131072);
  CHECK(columns(4096, 131073, DType::kBFloat16) == 131072);
  CHECK(columns(4096, 65536, DType::kFloat32) == 65536);
  CHECK(columns(4096, 65537, DType::kFloat32) == 65536);
  // 4097 tokens have a pitch of 4112: 130561 columns would fit, 130560 is the multiple of 512 below.
  CHECK(columns(4097, 131072, DType::kBFloat16) == 130560);
  CHECK(columns(4097, 130561, DType::kBFloat16) == 130561);
  CHECK(columns(4097, 130562, DType::kBFloat16) == 130560);
  // So many tokens that not even 512 columns fit.
  CHECK(columns(int64_t{1} << 21, 1000, DType::kBFloat16) == 0);
}

TEST_CASE("a budget in bytes stashes what fits in blocks of 512 columns") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t tokens : {1, 100, 4096}) {
      CAPTURE(tokens);
      const int64_t rows = 10000;
      const Problem problem = problem_of(tokens, rows, dtype);
      const int64_t column = (tokens + 15) / 16 * 16 * size_of(dtype);
      const int64_t saved_rows = 24 * tokens;
      const int64_t minimum = saved_rows + 2048 * column;
      const auto columns = [&](int64_t bytes) {
        return stash_columns(problem, MemoryPolicy::at_most(bytes));
      };
      CHECK(columns(minimum) == 0);
      CHECK(columns(minimum + 512 * column - 1) == 0);
      CHECK(columns(minimum + 512 * column) == 512);
      CHECK(columns(minimum + 1024 * column - 1) == 512);
      CHECK(columns(minimum + 1024 * column) == 1024);
      // Everything fits when no slice is needed any more.
      CHECK(columns(saved_rows + rows * column) == rows);
      CHECK(columns(saved_rows + rows * column - 1) == (rows - 2048) / 512 * 512);
      for (const int64_t bytes : {minimum - 1, int64_t{1}, int64_t{0}}) {
        const Error error = thrown_by([&] { columns(bytes); });
        CHECK(error.kind() == ErrorKind::kValue);
        CHECK(says(error, {std::to_string(minimum), std::to_string(bytes)}));
      }
    }
  }
}

TEST_CASE("a shard smaller than a slice needs no more than itself") {
  const Problem problem = problem_of(16, 100);
  const int64_t minimum = 24 * 16 + 100 * 32;
  CHECK(stash_columns(problem, MemoryPolicy::at_most(minimum)) == 100);
  const Error error =
      thrown_by([&] { stash_columns(problem, MemoryPolicy::at_most(minimum - 1)); });
  CHECK(says(error, {std::to_string(minimum), std::to_string(minimum - 1)}));
}

TEST_CASE("no tokens need no bytes") {
  for (const MemoryPolicy& policy :
       {MemoryPolicy::automatic(), MemoryPolicy::stash(), MemoryPolicy::at_most(0)}) {
    const Plan plan = make_plan(problem_of(0, 100), kBoth, policy, machine());
    CHECK(plan.saved_bytes() == 0);
    CHECK(plan.stash_columns == 100);
  }
}

TEST_CASE("what is saved is exact") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Problem problem = problem_of(300, 5000, dtype);
    const int64_t esize = size_of(dtype);
    const Plan stash = make_plan(problem, kBoth, MemoryPolicy::stash(), machine());
    CHECK(stash.token_pitch == 304);
    CHECK(stash.rows_bytes == 6 * 300 * 4);
    CHECK(stash.stash_columns == 5000);
    CHECK(stash.stash_bytes == 5000 * 304 * esize);
    CHECK(std::string(stash.mode()) == "stash");

    const Plan recompute = make_plan(problem, kBoth, MemoryPolicy::recompute(), machine());
    CHECK(recompute.stash_bytes == 0);
    CHECK(recompute.saved_bytes() == 6 * 300 * 4);
    CHECK(std::string(recompute.mode()) == "recompute");

    const int64_t budget = 24 * 300 + (2048 + 1024) * 304 * esize;
    const Plan hybrid = make_plan(problem, kBoth, MemoryPolicy::at_most(budget), machine());
    CHECK(hybrid.stash_columns == 1024);
    CHECK(hybrid.stash_bytes == 1024 * 304 * esize);
    CHECK(hybrid.saved_bytes() + 2048 * 304 * esize <= budget);
    CHECK(std::string(hybrid.mode()) == "hybrid");

    const Plan forward_only = make_plan(problem, {}, MemoryPolicy::stash(), machine());
    CHECK(forward_only.saved_bytes() == 0);
    CHECK(forward_only.backward.bytes() == 0);
    CHECK(std::string(forward_only.mode()) == "forward only");
  }
}

TEST_CASE("workspace regions are aligned and do not overlap") {
  for (const MemoryPolicy& policy : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    const Plan plan = make_plan(problem_of(300, 5000), {true, true, true}, policy, machine());
    for (const Layout* layout : {&plan.forward, &plan.backward}) {
      CHECK(layout->regions().size() > 0);
      int64_t end = 0;
      for (const Region& region : layout->regions()) {
        CAPTURE(region.name);
        CHECK(region.offset % 64 == 0);
        CHECK(region.offset >= end);
        end = region.offset + region.bytes;
      }
      CHECK(layout->bytes() >= end);
    }
    CHECK(plan.workspace_bytes() == std::max(plan.forward.bytes(), plan.backward.bytes()));
  }
}

TEST_CASE("a workspace never holds the logits") {
  // 4096 tokens by 131072 ids: the logits are 1 GiB in bfloat16.
  for (const MemoryPolicy& policy : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    Problem problem = problem_of(4096, 131072);
    problem.hidden = 1024;
    const Plan plan = make_plan(problem, {true, true, true}, policy, machine());
    CHECK(plan.workspace_bytes() < int64_t{128} << 20);
  }
}

TEST_CASE("a plan prints what it is made of") {
  const int64_t budget = 24 * 300 + (2048 + 1024) * 304 * 2;
  const Plan plan =
      make_plan(problem_of(300, 5000), kBoth, MemoryPolicy::at_most(budget), machine());
  const std::string text = plan.to_string();
  MESSAGE(text);
  for (const std::string& part : {std::string("300"), std::string("5000"), std::string("bfloat16"),
                                  std::string("hybrid"), std::string("1024")}) {
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
  }
  for (const Layout* layout : {&plan.forward, &plan.backward}) {
    for (const Region& region : layout->regions()) {
      CAPTURE(region.name);
      CHECK(text.find(region.name) != std::string::npos);
    }
  }
}

TEST_CASE("the plan of a call is the plan of its problem") {
  const Case problem = make_case({.tokens = 65, .hidden = 72, .shards = {700}});
  Context context(single_rank(), 1);
  Ask ask;
  ask.memory = MemoryPolicy::stash();
  const Plan plan = plan_call(context, inputs_of(problem, 0), options_of(problem, ask), kBoth);
  CHECK(plan.problem.tokens == 65);
  CHECK(plan.problem.hidden == 72);
  CHECK(plan.problem.vocab_rows == 700);
  CHECK(plan.problem.vocab_size == 700);
  CHECK(plan.stash_columns == 700);
  CHECK(plan.token_pitch == 80);

  ask.vocab_size = 650;
  const Plan padded = plan_call(context, inputs_of(problem, 0), options_of(problem, ask), kBoth);
  CHECK(padded.stash_columns == 650);
}
