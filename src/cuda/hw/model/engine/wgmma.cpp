// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cuda/hw/model/engine/meeting.h"
#include "cuda/hw/model/engine/tensor_core.h"

namespace hw::model {
namespace {

WarpGroup& group_of(const Thread& thread) { return *thread.cta->groups[thread.id.warp / 4]; }
int place_in_group(const Thread& thread) { return thread.id.thread % 128; }

void run(const Cta& cta, WgmmaOperation& op) {
  static float a[64 * kProductK], b[kProductK * 256];
  load_operand(cta, decode_wgmma(op.a, "wgmma A"), op.major_a, 64, a, kProductK, 1, "wgmma A");
  load_operand(cta, decode_wgmma(op.b, "wgmma B"), op.major_b, op.n, b, 1, op.n, "wgmma B");
  multiply(&op.accumulator->value[0][0], 256, a, b, op.n, 64, op.n, op.accumulate);
  op.done = true;
}

Accumulator* accumulator_at(const Thread& thread, const float* d) {
  for (Accumulator* each : thread.accumulators) {
    if (each->registers[place_in_group(thread)] == d) return each;
  }
  return nullptr;
}

/// The registers now belong to the tensor core: who looks at them finds poison.
void take(Thread& thread, Accumulator& accumulator, float* d) {
  const int t = place_in_group(thread);
  accumulator.registers[t] = d;
  thread.accumulators.push_back(&accumulator);
  for (int v = 0; v < accumulator.n / 2; ++v) {
    accumulator.value[wgmma_row(t, v)][wgmma_column(t, v)] = d[v];
  }
  std::memset(d, 0xFF, static_cast<size_t>(accumulator.n) / 2 * sizeof(float));
}
void give_back(Accumulator& accumulator, int t) {
  for (int v = 0; v < accumulator.n / 2; ++v) {
    accumulator.registers[t][v] = accumulator.value[wgmma_row(t, v)][wgmma_column(t, v)];
  }
  accumulator.registers[t] = nullptr;
}

}  // namespace

void wgmma_fence(Site site) {
  Thread& thread = enter_here(site);
  meet_warp({.op = WarpOp::kWgmmaFence, .what = "wgmma.fence"});
  thread.wgmma_fenced = true;
}

void wgmma(float* d, int n, uint64_t a, uint64_t b, bool accumulate, Major major_a, Major major_b,
           Site site) {
  Thread& thread = enter_here(site);
  WarpGroup& group = group_of(thread);
  const int number = thread.wgmma_issued++, t = place_in_group(thread);
  if (!thread.wgmma_fenced)
    fault("wgmma without wgmma.fence since its registers were last touched");
  Accumulator* mine = accumulator_at(thread, d);
  if (number == static_cast<int>(group.operations.size())) {  // the first of the warpgroup
    if (mine == nullptr) {
      group.accumulators.push_back(std::make_unique<Accumulator>());
      group.accumulators.back()->n = n;
    }
    group.operations.push_back(std::make_unique<WgmmaOperation>(
        WgmmaOperation{a, b, n, accumulate, major_a, major_b,
                       mine != nullptr ? mine : group.accumulators.back().get(), site}));
  }
  WgmmaOperation& op = *group.operations[static_cast<size_t>(number)];
  if (op.a != a || op.b != b || op.accumulate != accumulate || op.n != n) {
    fault("wgmma: the threads of the warpgroup disagree on its operands");
  }
  if (mine == nullptr) {
    mine = op.accumulator;
    take(thread, *mine, d);
  }
  if (mine != op.accumulator)
    fault("wgmma: the threads of the warpgroup disagree on the accumulator");
  mine->last_use[t] = number;
  if (++op.joined == 128) {
    const Cta* cta = thread.cta;
    WgmmaOperation* whole = &op;
    enqueue(group.channel, [cta, whole] { run(*cta, *whole); });
    wake_all(group.waiting);
  }
  maybe_yield();
}

void wgmma_commit(Site site) {
  Thread& thread = enter_here(site);
  meet_warp({.op = WarpOp::kWgmmaCommit, .what = "wgmma.commit_group"});
  thread.wgmma_groups.push_back(thread.wgmma_issued);
}

void wgmma_wait(int pending, Site site) {
  Thread& thread = enter_here(site);
  meet_warp({.op = WarpOp::kWgmmaWait, .what = "wgmma.wait_group", .argument = pending});
  WarpGroup& group = group_of(thread);
  const int t = place_in_group(thread);
  const int finished = static_cast<int>(thread.wgmma_groups.size()) - pending;
  const int end = finished > 0 ? thread.wgmma_groups[static_cast<size_t>(finished) - 1] : 0;
  if (end > 0) {
    const WgmmaOperation& last = *group.operations[static_cast<size_t>(end) - 1];
    while (last.joined < 128) {
      group.waiting.push_back(&thread);
      block({.stop = Stop::kOther,
             .what = "waits for the other warps of its warpgroup to issue wgmma"});
    }
    while (!last.done) run_head(group.channel);
  }
  for (size_t i = 0; i < thread.accumulators.size();) {
    Accumulator& each = *thread.accumulators[i];
    if (each.last_use[t] >= end) {
      ++i;
      continue;
    }
    give_back(each, t);
    thread.accumulators[i] = thread.accumulators.back();
    thread.accumulators.pop_back();
  }
  thread.wgmma_fenced = false;
  maybe_yield();
}

}  // namespace hw::model
