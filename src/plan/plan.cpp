// SPDX-License-Identifier: Apache-2.0
#include "logitless/plan.h"

#include <algorithm>

#include "logitless/error.h"
#include "plan/cpu_plan.h"
#include "plan/cpu_tiles.h"

namespace logitless {

namespace {

constexpr int64_t kSavedBytesPerToken = 6 * sizeof(float);  // k, K, S_rest, S, T, e

int64_t column_bytes(const Problem& problem) {
  return round_up(problem.tokens, cpu::kTokenPitch) * size_of(problem.dtype);
}

}  // namespace

int64_t stash_columns(const Problem& problem, const MemoryPolicy& policy) {
  const int64_t live = problem.live_rows();
  const int64_t column = column_bytes(problem);
  const auto whole_tiles = [](int64_t columns) {
    return columns / cpu::kTileVocab * cpu::kTileVocab;
  };
  switch (policy.kind) {
    case MemoryPolicy::Kind::kStash:
      return live;
    case MemoryPolicy::Kind::kRecompute:
      return 0;
    case MemoryPolicy::Kind::kAuto:
      if (live * column <= kAutomaticStashBytes) return live;
      return whole_tiles(kAutomaticStashBytes / column);
    case MemoryPolicy::Kind::kBytes:
      break;
  }
  const int64_t rows = kSavedBytesPerToken * problem.tokens;
  const int64_t minimum = rows + std::min(live, cpu::kSliceVocab) * column;
  if (policy.bytes < minimum) {
    throw Error(ErrorKind::kValue, "memory: expected at least " + std::to_string(minimum) +
                                       " bytes for " + std::to_string(problem.tokens) +
                                       " tokens, got " + std::to_string(policy.bytes));
  }
  if (rows + live * column <= policy.bytes) return live;
  return whole_tiles((policy.bytes - minimum) / column);
}

Plan make_plan(const Problem& problem, const Wanted& wanted, const MemoryPolicy& policy,
               const Machine& machine) {
  Plan plan{.problem = problem,
            .wanted = wanted,
            .policy = policy,
            .machine = machine,
            .forward = {},
            .backward = {}};
  plan.token_pitch = round_up(problem.tokens, cpu::kTokenPitch);
  if (wanted.backward()) {
    plan.stash_columns = stash_columns(problem, policy);
    plan.rows_bytes = kSavedBytesPerToken * problem.tokens;
    plan.stash_bytes = plan.stash_columns * column_bytes(problem);
  }
  plan.forward = cpu::forward_layout(problem, wanted, machine);
  if (wanted.backward()) {
    plan.backward = cpu::backward_layout(problem, wanted, plan.stash_columns, machine);
    // A gradient of the entropy recomputes every column, whatever is stashed.
    const Layout recompute = cpu::backward_layout(problem, wanted, 0, machine);
    if (wanted.entropy && recompute.bytes() > plan.backward.bytes()) plan.backward = recompute;
  }
  return plan;
}

Plan make_backward_plan(const Problem& problem, const Wanted& wanted, int64_t stash_columns,
                        const Machine& machine) {
  Plan plan{.problem = problem,
            .wanted = wanted,
            .policy = {},
            .machine = machine,
            .forward = {},
            .backward = {}};
  plan.token_pitch = round_up(problem.tokens, cpu::kTokenPitch);
  plan.stash_columns = stash_columns;
  plan.rows_bytes = kSavedBytesPerToken * problem.tokens;
  plan.stash_bytes = stash_columns * column_bytes(problem);
  plan.backward = cpu::backward_layout(problem, wanted, stash_columns, machine);
  return plan;
}

}  // namespace logitless
