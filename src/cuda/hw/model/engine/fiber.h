// SPDX-License-Identifier: Apache-2.0
// Contexts of execution with stacks of their own: one for every CUDA thread of a run.
#pragma once

#include <cstddef>

namespace hw::model {

/// Where a context stopped.
struct Context {
  void* saved = nullptr;  // stack pointer, or a ucontext_t on machines without a switch of ours
  const void* stack = nullptr;
  size_t stack_bytes = 0;
};

/// Makes `context` start at `entry`, which must never return, on stack number `index`. Stacks are kept
/// for the life of the process; a page below each one faults.
void prepare(Context& context, size_t index, void (*entry)());
/// The first thing an entry does.
void entered();
/// Leaves `from`, which continues when something switches to it.
void switch_context(Context& from, Context& to);

}  // namespace hw::model
