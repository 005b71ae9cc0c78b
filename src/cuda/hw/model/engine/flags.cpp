// SPDX-License-Identifier: Apache-2.0
// Ordering: what strong accesses and fences pass on, waits for flags, and the instructions themselves.
#include <cstring>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/meeting.h"

namespace hw::model {

// --- ordering ------------------------------------------------------------------------------------------

void release_to_gpu(Thread& thread) {
  publish_to_cta(thread);
  merge_words(thread.gpu->stores, thread.cta->stores);
}
void release_to(Thread& thread, Scope scope) {
  publish_to_cta(thread);
  if (scope == Scope::kCta) return;
  release_to_gpu(thread);
  if (scope == Scope::kSys) machine->memory->drain(thread.gpu->stores);
}
void stamp_release(Knowledge& known, const Cta& cta) {
  known.generic.at[cta.index] = ++machine->now;
  ++machine->now;  // what the CTA does from here on is not included
}

const Flag* GlobalMemory::find_flag(const void* p) const {
  const auto found = flags_.find(p);
  return found == flags_.end() ? nullptr : &found->second;
}

void publish_flag(Thread& thread, const void* p, Order order, Scope scope, bool replaces) {
  Flag& flag = machine->memory->flag(p);
  if (replaces) flag = Flag{};
  Knowledge known;
  if (order == Order::kRelease || order == Order::kAcqRel) {
    known = thread.known;
    stamp_release(known, *thread.cta);
  } else if (thread.has_fenced) {
    known = thread.fenced;
    scope = std::min(scope, thread.fence_scope);
  } else {
    return;
  }
  if (scope < Scope::kGpu) return;  // nobody outside the CTA or cluster may rely on it
  // Within the GPU of the last writer; a chain of writers on several GPUs needs .sys anyway.
  if (flag.gpu != thread.gpu) flag.for_gpu = {};
  flag.gpu = thread.gpu;
  flag.for_gpu.join(known);
  if (scope == Scope::kSys) flag.for_system.join(known);
}

void acquire_flag(Thread& thread, const void* p, Order order, Scope scope) {
  const Flag* flag = machine->memory->find_flag(p);
  if (flag == nullptr || scope < Scope::kGpu) return;
  Knowledge of_gpu, of_system;
  if (flag->gpu == thread.gpu) of_gpu.join(flag->for_gpu);
  if (scope == Scope::kSys) of_system.join(flag->for_system);
  // A flag in global memory is no wait that tcgen05 operations follow.
  of_gpu.sync_time = of_system.sync_time = 0;
  thread.observed_gpu.join(of_gpu);
  thread.observed_system.join(of_system);
  if (order != Order::kAcquire && order != Order::kAcqRel) return;
  thread.known.join(of_gpu);
  thread.known.join(of_system);
}

namespace {

bool reached(const Wait& wait) {
  const uint64_t seen = machine->memory->peek(wait.flag, wait.flag_bytes);
  return wait.flag_bytes == 4 ? static_cast<int32_t>(static_cast<uint32_t>(seen) -
                                                     static_cast<uint32_t>(wait.value)) >= 0
                              : static_cast<int64_t>(seen - wait.value) >= 0;
}

}  // namespace

uint64_t GlobalMemory::peek(const void* p, int bytes) const {
  uint64_t value = 0;
  std::memcpy(&value, p, static_cast<size_t>(bytes));
  return value;
}
void GlobalMemory::poke(void* p, uint64_t value, int bytes) {
  write_memory(static_cast<char*>(p), &value, static_cast<size_t>(bytes));
  poll_flags();
}

void GlobalMemory::poll_flags() {
  auto& waiters = machine->flag_waiters;
  for (size_t i = 0; i < waiters.size();) {
    const Wait& wait = waiters[i]->wait;
    if (reached(wait) || (wait.raised != nullptr && peek(wait.raised, 4) != 0)) {
      make_ready(waiters[i]);
      waiters[i] = waiters.back();
      waiters.pop_back();
    } else {
      ++i;
    }
  }
}

bool GlobalMemory::expire_peer_wait() {
  auto& waiters = machine->flag_waiters;
  for (size_t i = 0; i < waiters.size(); ++i) {
    if (waiters[i]->wait.stop != Stop::kPeer) continue;
    waiters[i]->wait.expired = true;
    make_ready(waiters[i]);
    waiters.erase(waiters.begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  }
  return false;
}

// --- instructions ------------------------------------------------------------------------------------

namespace {

void check_alignment(const void* p, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0) return;
  fault(format("%s at %s: not aligned to %d bytes", what, machine->memory->name_of(p).c_str(),
               bytes));
}

/// Strong accesses act on memory itself: what this thread has held back there comes first.
void settle_own(Thread& thread, const void* p, int bytes) {
  GlobalMemory& memory = *machine->memory;
  const auto first = reinterpret_cast<uintptr_t>(p) & ~uintptr_t{3};
  for (uintptr_t word = first;
       word < reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes); word += 4) {
    for (Words* level : {&thread.gpu->stores, &thread.cta->stores, &thread.stores}) {
      const auto held = level->find(word);
      if (held == level->end()) continue;
      Words one{{word, held->second}};
      level->erase(held);
      memory.drain(one);
    }
  }
}

/// The region, for a strong access.
void check_atomic(Thread& thread, const void* p, int bytes, const char* what) {
  check_alignment(p, bytes, what);
  const Region& region =
      machine->memory->region_of(p, static_cast<size_t>(bytes), *thread.gpu, what);
  settle_own(thread, p, bytes);
  const size_t half = static_cast<size_t>(static_cast<const unsigned char*>(p) - region.data) / 2;
  if (what[0] != 's' && region.written[half] == 0) {  // loads and additions, not stores
    fault(format("%s at %s, which nobody has written", what, machine->memory->name_of(p).c_str()));
  }
}

void write_atomic(Thread& thread, void* p, uint64_t value, int bytes) {
  GlobalMemory& memory = *machine->memory;
  memory.mark_write(*thread.cta, static_cast<char*>(p), static_cast<size_t>(bytes), machine->now,
                    thread.site);
  memory.poke(p, value, bytes);
}

}  // namespace

void global_load(const void* address, void* value, int bytes, Site site) {
  Thread& thread = enter_here(site);
  const auto* p = static_cast<const char*>(address);
  check_alignment(p, bytes, "ld.global");
  GlobalMemory& memory = *machine->memory;
  memory.check_read(*thread.cta, thread.known.generic, p, static_cast<size_t>(bytes), "ld.global");
  memory.check_alias(thread.alias, p, static_cast<size_t>(bytes), "ld.global");
  memory.read_generic(thread, p, value, static_cast<size_t>(bytes));
  memory.mark_read(*thread.cta, p, static_cast<size_t>(bytes), machine->now, site);
}

void global_store(void* address, const void* value, int bytes, Site site) {
  Thread& thread = enter_here(site);
  auto* p = static_cast<char*>(address);
  check_alignment(p, bytes, "st.global");
  GlobalMemory& memory = *machine->memory;
  memory.check_write(*thread.cta, thread.known.generic, p, static_cast<size_t>(bytes), "st.global");
  memory.mark_write(*thread.cta, p, static_cast<size_t>(bytes), machine->now, site);
  hold_back(thread.stores, reinterpret_cast<uintptr_t>(p), value, static_cast<size_t>(bytes),
            thread.cta->index);
}

uint64_t atomic_load(const void* address, int bytes, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 6);
  check_atomic(thread, address, bytes, "ld");
  acquire_flag(thread, address, order, scope);
  return machine->memory->peek(address, bytes);
}

void atomic_store(void* address, uint64_t value, int bytes, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 7);
  check_atomic(thread, address, bytes, "st");
  if (order == Order::kRelease) release_to(thread, scope);
  publish_flag(thread, address, order, scope, true);
  write_atomic(thread, address, value, bytes);
}

uint64_t atomic_add(void* address, uint64_t value, int bytes, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 8);
  check_atomic(thread, address, bytes, "atom.add");
  if (order == Order::kRelease || order == Order::kAcqRel) release_to(thread, scope);
  acquire_flag(thread, address, order, scope);
  publish_flag(thread, address, order, scope, false);
  const uint64_t old = machine->memory->peek(address, bytes);
  write_atomic(thread, address, old + value, bytes);
  return old;
}

void fence(Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 9);
  release_to(thread, scope);
  if (scope >= Scope::kGpu) thread.known.join(thread.observed_gpu);
  if (scope == Scope::kSys) thread.known.join(thread.observed_system);
  thread.fenced = thread.known;
  stamp_release(thread.fenced, *thread.cta);
  thread.has_fenced = true;
  thread.fence_scope = scope;
}

void flag_wait(const void* flag, uint32_t value, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 10);
  check_atomic(thread, flag, 4, "ld");
  const Wait wait{
      .stop = Stop::kFlag, .what = "a flag", .flag = flag, .flag_bytes = 4, .value = value};
  while (!reached(wait)) {
    machine->flag_waiters.push_back(&thread);
    block(wait);
  }
  acquire_flag(thread, flag, order, scope);
}

bool peer_wait(const void* flag, int bytes, uint64_t value, Scope scope, const Abort& abort,
               const PeerWait& who, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 11);
  GlobalMemory& memory = *machine->memory;
  check_atomic(thread, flag, bytes, "ld");
  check_atomic(thread, abort.raised.address(), 4, "ld");
  const Wait wait{.stop = Stop::kPeer,
                  .what = "another rank",
                  .flag = flag,
                  .flag_bytes = bytes,
                  .value = value,
                  .raised = abort.raised.address()};
  while (!reached(wait)) {
    if (memory.peek(abort.raised.address(), 4) != 0) return false;
    machine->flag_waiters.push_back(&thread);
    block(wait);
    if (!thread.wait.expired || reached(wait)) continue;
    ++machine->peer_timeouts;
    auto* failure = abort.failure.address();
    memory.region_of(failure, sizeof *failure, *thread.gpu, "the report of a peer's failure");
    if (memory.peek(&failure->state, 4) == 0) {
      const PeerFailure report{1,
                               who.rank,
                               who.peer,
                               who.what,
                               static_cast<uint32_t>(value),
                               static_cast<uint32_t>(memory.peek(flag, bytes))};
      memory.write_memory(reinterpret_cast<char*>(failure), &report, sizeof report);
    }
    memory.poke(abort.raised.address(), 1, 4);
    return false;
  }
  acquire_flag(thread, flag, Order::kAcquire, scope);
  return true;
}

}  // namespace hw::model
