// SPDX-License-Identifier: Apache-2.0
// Check, agree, compute this shard's gradients, sum dX over the ranks.
#include <algorithm>

#include "comm/combine.h"
#include "head/session.h"
#include "head/validate.h"
#include "plan/cpu_tiles.h"

namespace logitless {

namespace {

int64_t upstream_bits(const Upstream& upstream) {
  return (upstream.nll.present() ? 1 : 0) | (upstream.entropy.present() ? 2 : 0) |
         (upstream.lse.present() ? 4 : 0);
}

// An entropy gradient needs the logits again: every column is recomputed.
TensorView usable_stash(const Problem& problem, const Saved& saved, const Upstream& upstream) {
  return upstream.entropy.present() ? TensorView{} : live_stash(problem, saved.stash);
}

}  // namespace

void backward(Context& context, const Inputs& inputs, const Options& options, const Saved& saved,
              const Upstream& upstream, const Gradients& gradients) {
  ContextState& state = context.state();
  Group& group = *state.group;
  const std::lock_guard lock(state.mutex);
  const bool many = group.size() > 1;
  const auto plan_for = [&](const Inputs& in, const Agreement* agreement) {
    const bool input_grad =
        agreement == nullptr ? many || gradients.x.present() : agreement->any_wants_input_grad;
    const Wanted wanted{.entropy = upstream.entropy.present(),
                        .input_grad = input_grad,
                        .weight_grad = gradients.weight.present()};
    Problem problem = problem_of(group, in, options, agreement);
    TensorView stash = upstream.entropy.present() ? TensorView{} : saved.stash;
    if (agreement == nullptr) {
      // Which rows are vocabulary is known once the group agrees; a stash of a broken tile tells before.
      const int64_t columns = stash.present() ? std::min(stash.shape[0], problem.vocab_rows) : 0;
      if (columns % cpu::kTileVocab != 0) problem.vocab_size = columns;
      if (stash.present()) stash.shape[0] = columns;
    }
    stash = live_stash(problem, stash);
    return make_backward_plan(problem, wanted, stash.present() ? stash.shape[0] : 0,
                              state.machine(in.x.device));
  };

  Inputs in;
  const Agreement agreement = state.agree("backward", options.assume_uniform, [&] {
    in = checked(inputs, options);
    check_backward(in, saved, upstream, gradients);
    state.make_room(plan_for(in, nullptr));
    Header header = header_of(in, options, group.size());
    header.upstream = upstream_bits(upstream);
    header.wants_input_grad = gradients.x.present() ? 1 : 0;
    return header;
  });
  check_targets(agreement, in, options);

  state.run([&] {
    const Plan plan = plan_for(in, &agreement);
    state.make_room(plan);
    const Arena arena(state.workspace.data(), plan.backward);
    const TensorView x =
        options.sequence_parallel && many ? gather_tokens(group, agreement, arena, in.x) : in.x;
    const Backend& backend = backend_for(in.x.device);
    const bool exchange = many && agreement.any_wants_input_grad;
    backend.gradients({plan, arena, x, in.weight, in.target, in.temperature, options.temperature,
                       options.ignore_index},
                      {saved.rows, usable_stash(plan.problem, saved, upstream)}, upstream,
                      {.x = many ? TensorView{} : gradients.x,
                       .x_part = exchange,
                       .weight = gradients.weight,
                       .accumulate_weight = gradients.accumulate_weight});
    if (exchange) reduce_input_grad(group, agreement, plan, arena, gradients.x);
    set_last_backend(backend.name());
  });
}

Error announce_failure(Context& context, const char* phase, const Error& failure) {
  ContextState& state = context.state();
  const std::lock_guard lock(state.mutex);
  return announce(*state.group, phase, failure);
}

}  // namespace logitless
