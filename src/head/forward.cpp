// SPDX-License-Identifier: Apache-2.0
// Check, agree, compute this shard's statistics, join everybody's.
#include <algorithm>
#include <cstring>

#include "comm/combine.h"
#include "head/merge.h"
#include "head/session.h"
#include "head/validate.h"
#include "plan/cpu_tiles.h"

namespace logitless {

namespace {

thread_local const char* last_backend_name = "none";

}  // namespace

void set_last_backend(const char* name) { last_backend_name = name; }
const char* last_backend() { return last_backend_name; }

Problem problem_of(const Group& group, const Inputs& inputs, const Options& options,
                   const Agreement* agreement) {
  Problem problem{.tokens = inputs.target.shape[0],
                  .hidden = inputs.x.shape[1],
                  .vocab_rows = inputs.weight.shape[0],
                  .vocab_start = 0,
                  .vocab_size = inputs.weight.shape[0],
                  .dtype = inputs.x.dtype,
                  .ranks = group.size(),
                  .sequence_parallel = options.sequence_parallel};
  if (options.sequence_parallel) {
    problem.token_block = std::max(inputs.x.shape[0], ceil_div(problem.tokens, problem.ranks));
  }
  if (agreement != nullptr) {
    problem.vocab_start = agreement->shards[static_cast<size_t>(group.rank())].start;
    problem.vocab_size = agreement->vocab_size;
    if (options.sequence_parallel) problem.token_block = agreement->token_block();
  }
  return problem;
}

Plan plan_call(Context& context, const Inputs& inputs, const Options& options,
               const Wanted& wanted) {
  ContextState& state = context.state();
  const Inputs in = checked(inputs, options);
  Problem problem = problem_of(*state.group, in, options, nullptr);
  if (options.vocab_start >= 0 || options.vocab_size >= 0) {
    problem.vocab_start = std::max<int64_t>(options.vocab_start, 0);
    problem.vocab_size =
        options.vocab_size >= 0 ? options.vocab_size : problem.vocab_start + problem.vocab_rows;
  }
  return make_plan(problem, wanted, options.memory, state.machine(in.x.device));
}

void forward(Context& context, const Inputs& inputs, const Options& options, const Outputs& outputs,
             const Saved& saved) {
  ContextState& state = context.state();
  Group& group = *state.group;
  const std::lock_guard lock(state.mutex);
  const Wanted wanted{.entropy = outputs.entropy.present()};
  const auto plan_for = [&](const Inputs& in, const Agreement* agreement) {
    return make_plan(problem_of(group, in, options, agreement), wanted, options.memory,
                     state.machine(in.x.device));
  };

  Inputs in;
  const Agreement agreement = state.agree("forward", options.assume_uniform, [&] {
    in = checked(inputs, options);
    check_outputs(in, outputs);
    check_saved(in, saved);
    state.make_room(plan_for(in, nullptr));
    Header header = header_of(in, options, group.size());
    header.wants_entropy = wanted.entropy ? 1 : 0;
    return header;
  });
  check_targets(agreement, in, options);

  state.run([&] {
    const Plan plan = plan_for(in, &agreement);
    const TensorView stash = live_stash(plan.problem, saved.stash);
    state.make_room(plan);
    const Arena arena(state.workspace.data(), plan.forward);
    const bool gather = options.sequence_parallel && group.size() > 1;
    const TensorView x = gather ? gather_tokens(group, agreement, arena, in.x) : in.x;
    const Backend& backend = backend_for(in.x.device);
    const int64_t tokens = plan.problem.tokens;
    auto* mine = arena.get<float>(region::kStatistics);
    const LocalStatistics local{mine, mine + tokens, mine + 2 * tokens, mine + 3 * tokens};
    backend.statistics({plan, arena, x, in.weight, in.target, in.temperature, options.temperature,
                        options.ignore_index},
                       local, stash);
    float* all = mine;
    if (group.size() > 1) {
      all = mine + 4 * tokens;
      group.all_gather(mine, all, 4 * tokens * static_cast<int64_t>(sizeof(float)), in.x.device,
                       "statistics");
    }
    merge(agreement, group.rank(), in.target, options.ignore_index, all, outputs, saved.rows);
    set_last_backend(backend.name());
  });
}

}  // namespace logitless
