// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/scheduler.h"

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/report.h"

namespace hw::model {

Machine* machine = nullptr;
Self* self = nullptr;

namespace {

constexpr uint64_t kMostSteps = 200'000'000;  // a kernel that polls for ever ends here

/// Someone is starved for a while: a lane, a warp, a CTA, a cluster or a whole GPU.
struct Victim {
  int level = 0;
  const Thread* thread = nullptr;
  uint64_t until = 0;

  void choose(uint64_t step) {
    const bool from_the_start = step == 1 && random_below(2) == 0;
    level = static_cast<int>(from_the_start ? 3 + random_below(3) : random_below(6));
    thread = machine->threads[random_below(static_cast<uint32_t>(machine->threads.size()))].get();
    until = step + (256U << random_below(8));
  }
  bool starves(const Thread* other) const {
    switch (level) {
      case 1:
        return other == thread;
      case 2:
        return other->warp == thread->warp;
      case 3:
        return other->cta == thread->cta;
      case 4:
        return other->cta->cluster == thread->cta->cluster;
      case 5:
        return other->gpu == thread->gpu;
      default:
        return false;
    }
  }
};

/// Runs the head of a random channel; false if the one it met would rather wait.
bool run_asynchronous(bool idle) {
  Machine& m = *machine;
  const auto count = static_cast<uint32_t>(m.channels.size());
  uint32_t i = random_below(count);
  for (int tries = 0; tries < 8 && m.channels[i]->lazy; ++tries) i = random_below(count);
  Channel* channel = m.channels[i];
  if (channel->lazy && !idle) return false;
  if (!channel->queue.empty()) run_head(*channel);
  if (channel->queue.empty()) {
    channel->listed = false;
    m.channels[i] = m.channels.back();
    m.channels.pop_back();
    if (channel->transient) m.free_channels.push_back(channel);
  }
  return true;
}

bool wants_asynchronous(bool can_run) {
  switch (machine->timing) {
    case Timing::kEarly:
      return true;
    case Timing::kMixed:
      return !can_run || random_below(8) == 0;
    case Timing::kLate:
      return !can_run || random_below(512) == 0;
  }
  return true;
}

/// Two are drawn, the heavier warp wins; a victim runs when nobody else is drawn.
size_t draw(const Victim& victim) {
  const auto& ready = machine->ready;
  const auto count = static_cast<uint32_t>(ready.size());
  uint32_t i = random_below(count);
  const uint32_t j = random_below(count);
  if (ready[j]->warp->weight > ready[i]->warp->weight) i = j;
  for (int tries = 0; tries < 48 && victim.starves(ready[i]); ++tries) i = random_below(count);
  return i;
}

void reweigh() {
  for (auto& cluster : machine->clusters) {
    for (auto& cta : cluster->ctas) {
      for (auto& warp : cta->warps) warp->weight = random_below(8);
    }
  }
}

void resume(Thread* thread) {
  Machine& m = *machine;
  m.current = thread;
  self = &thread->id;
  ++m.switches;
  switch_context(m.scheduler, thread->context);
  m.current = nullptr;
}

/// Nothing can run: held-back writes arrive, then waits on other ranks end, then it is a deadlock.
bool unstick() {
  Machine& m = *machine;
  if (m.memory->drain_everything()) return true;
  m.memory->poll_flags();
  if (!m.ready.empty()) return true;
  return m.memory->expire_peer_wait();
}

}  // namespace

uint32_t random_below(uint32_t n) {
  uint64_t& x = machine->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return static_cast<uint32_t>((x * 0x9E3779B97F4A7C15U >> 32) % n);
}

Thread& enter_here(Site site) {
  Thread& thread = *machine->current;
  thread.site = site;
  return thread;
}
Thread& enter(Site site) {
  enter_here(site);
  maybe_yield();
  return *machine->current;
}
void note_path(Thread& thread, uint32_t what) { thread.path = thread.path * 31 + what; }

void make_ready(Thread* thread) { machine->ready.push_back(thread); }
void wake_all(std::vector<Thread*>& threads) {
  for (Thread* thread : threads) make_ready(thread);
  threads.clear();
}
void block(const Wait& wait) {
  Thread* thread = machine->current;
  thread->wait = wait;
  switch_context(thread->context, machine->scheduler);
  thread->wait.stop = Stop::kNone;
}
void yield_now() {
  Thread* thread = machine->current;
  make_ready(thread);
  switch_context(thread->context, machine->scheduler);
}
void maybe_yield() {
  if (random_below(16) == 0) yield_now();
}

void enqueue(Channel& channel, std::function<void()> work) {
  channel.queue.push_back(std::move(work));
  channel.lazy = machine->timing != Timing::kEarly && random_below(3) == 0;
  if (channel.listed) return;
  channel.listed = true;
  machine->channels.push_back(&channel);
}
Channel& transient_channel() {
  Machine& m = *machine;
  if (m.free_channels.empty()) {
    m.pool.push_back(std::make_unique<Channel>());
    m.pool.back()->transient = true;
    m.free_channels.push_back(m.pool.back().get());
  }
  Channel* channel = m.free_channels.back();
  m.free_channels.pop_back();
  return *channel;
}
void run_head(Channel& channel) {
  auto work = std::move(channel.queue.front());
  channel.queue.pop_front();
  ++machine->async_operations;
  work();
}

void schedule() {
  Machine& m = *machine;
  Victim victim;
  for (uint64_t step = 1; m.live > 0 && !m.failed; ++step) {
    if (step % 4096 == 0) reweigh();
    if (step >= victim.until) victim.choose(step);
    if (step > kMostSteps)
      fault(format("no end after %llu steps", static_cast<unsigned long long>(step)));
    const bool can_run = !m.ready.empty();
    if (m.timing == Timing::kMixed && random_below(16) == 0) m.memory->drain_some();
    if (m.timing == Timing::kEarly && random_below(2) == 0) m.memory->drain_some();
    if (!m.channels.empty() && wants_asynchronous(can_run) && run_asynchronous(!can_run)) continue;
    if (!can_run) {
      if (unstick()) continue;
      m.failed = true;
      m.failure = deadlock_report();
      return;
    }
    const size_t i = draw(victim);
    Thread* thread = m.ready[i];
    if (victim.starves(thread) && !m.channels.empty()) {
      run_asynchronous(true);
      continue;
    }
    m.ready[i] = m.ready.back();
    m.ready.pop_back();
    resume(thread);
  }
}

}  // namespace hw::model
