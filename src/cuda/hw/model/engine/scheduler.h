// SPDX-License-Identifier: Apache-2.0
// Who runs next, and when asynchronous work happens: as late or as early as the seed says.
#pragma once

#include "cuda/hw/model/engine/machine.h"

namespace hw::model {

/// 0 ... n - 1, from the seed.
uint32_t random_below(uint32_t n);

/// Every instruction begins with one of these: they note where the thread is. `enter` may let others run
/// first; `enter_here` goes straight on.
Thread& enter(Site site);
Thread& enter_here(Site site);
/// A lane has done something that its warp must do together or not at all before the next .aligned
/// operation.
void note_path(Thread& thread, uint32_t what);

void make_ready(Thread* thread);
void wake_all(std::vector<Thread*>& threads);
/// Stops the running thread until somebody makes it ready.
void block(const Wait& wait);
/// Lets others run, now or perhaps.
void yield_now();
void maybe_yield();

void enqueue(Channel& channel, std::function<void()> work);
Channel& transient_channel();
/// Does the head of a channel's queue at once.
void run_head(Channel& channel);

/// Until every thread has ended, or a fault.
void schedule();

}  // namespace hw::model
