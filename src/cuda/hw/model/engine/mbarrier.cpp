// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/mbarrier.h"

#include <cstdlib>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/meeting.h"
#include "cuda/hw/model/engine/shared_memory.h"

namespace hw::model {

MBarrier& barrier_at(Cta& cta, uint32_t offset, bool from_outside, const char* what) {
  const auto found = cta.barriers.find(offset & 0xFFFFFF);
  if (found == cta.barriers.end()) {
    fault(format("%s: no mbarrier has been initialised at %s of CTA %d", what,
                 shared_name(offset).c_str(), cta.rank));
  }
  if (from_outside && !found->second.fenced) {
    fault(format("%s: mbarrier %s of CTA %d was initialised without fence.mbarrier_init", what,
                 shared_name(offset).c_str(), cta.rank));
  }
  return found->second;
}

namespace {

constexpr int64_t kMostBytes = (1 << 20) - 1;  // of the tx-count (PTX ISA, "mbarrier")

void settle(MBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  ++machine->now;
  ++b.phase;
  b.pending = b.count;
  b.announced = b.delivered = 0;
  b.local_done = b.local;
  b.cluster_done = b.cluster;
  b.local_done.sync_time = b.cluster_done.sync_time = machine->now;
  b.local = b.cluster = {};
  wake_all(b.waiting);
}

void check_bytes(const MBarrier& b, uint32_t offset, const char* what) {
  if (std::llabs(b.bytes) <= kMostBytes) return;
  fault(format("%s: mbarrier %s has %lld bytes outstanding, more than its tx-count can hold", what,
               shared_name(offset).c_str(), static_cast<long long>(b.bytes)));
}

void announce(MBarrier& b, uint32_t offset, int64_t bytes, const char* what) {
  b.bytes += bytes;
  b.announced += bytes;
  check_bytes(b, offset, what);
}

void count_arrival(MBarrier& b, uint32_t offset, const char* what) {
  if (b.pending == 0) {
    fault(format("%s: mbarrier %s gets more arrivals in a phase than its count, %u", what,
                 shared_name(offset).c_str(), b.count));
  }
  --b.pending;
}

/// The barrier and its CTA for an arrival of the running thread.
MBarrier& arrived_at(uint32_t address, bool remote, const char* what) {
  const Thread& thread = *machine->current;
  Cta& cta = cta_of(*thread.cta->cluster, address, what);
  if (!remote && &cta != thread.cta) fault(format("%s: a local arrival at CTA %d", what, cta.rank));
  return barrier_at(cta, address, &cta != thread.cta, what);
}

/// What the arrival passes on to those who wait.
void pass_on(MBarrier& b, uint32_t address, Scope scope) {
  Thread& thread = *machine->current;
  publish_to_cta(thread);
  const bool own = address >> 24 == static_cast<uint32_t>(thread.cta->rank);
  if (own) b.local.join(thread.known);
  if (scope != Scope::kCta) {
    release_to_gpu(thread);
    Knowledge known = thread.known;
    stamp_release(known, *thread.cta);
    b.cluster.join(known);
  }
  // An arrival of any scope orders tcgen05 operations that were fenced before it; accumulators are
  // handed back in this way.
  b.local.tensor.join(thread.known.tensor, machine->cta_count());
  ++machine->now;
}

}  // namespace

void arrive_plain(Cta& cta, uint32_t offset, const Knowledge& known, const char* what) {
  MBarrier& b = barrier_at(cta, offset, true, what);
  count_arrival(b, offset, what);
  b.local.tensor.join(known.tensor, machine->cta_count());
  settle(b);
}

void deliver(Cta& cta, uint32_t offset, int64_t bytes, const char* what) {
  MBarrier& b = barrier_at(cta, offset, true, what);
  b.bytes -= bytes;
  b.delivered += bytes;
  check_bytes(b, offset, what);
  settle(b);
}

// --- instructions ------------------------------------------------------------------------------------

void barrier_init(uint32_t address, uint32_t arrivals, Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 23);
  Cta& cta = *thread.cta;
  const uint32_t offset = address & 0xFFFFFF;
  check_range(cta, offset, 8, "mbarrier.init");
  if (offset % 8 != 0) fault("mbarrier.init: not aligned to 8 bytes");
  if (cta.barriers.count(offset) != 0) {
    fault(format("mbarrier.init: %s is initialised twice", shared_name(offset).c_str()));
  }
  if (arrivals < 1 || arrivals >= 1U << 20) {
    fault(format("mbarrier.init: %s with a count of %u", shared_name(offset).c_str(), arrivals));
  }
  MBarrier b{};
  b.count = b.pending = arrivals;
  cta.barriers[offset] = b;
}

void fence_barrier_init(Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 24);
  for (auto& [offset, barrier] : thread.cta->barriers) barrier.fenced = true;
  maybe_yield();
}

void barrier_arrive(uint32_t address, Scope scope, bool remote, Site site) {
  constexpr auto kWhat = "mbarrier.arrive";
  note_path(enter(site), 2);
  MBarrier& b = arrived_at(address, remote, kWhat);
  pass_on(b, address, scope);
  count_arrival(b, address, kWhat);
  settle(b);
}

void barrier_expect(uint32_t address, uint32_t bytes, bool arrive, bool remote, Site site) {
  const auto* what = arrive ? "mbarrier.arrive.expect_tx" : "mbarrier.expect_tx";
  note_path(enter(site), 3);
  MBarrier& b = arrived_at(address, remote, what);
  announce(b, address, bytes, what);
  if (!arrive) return;
  pass_on(b, address, Scope::kCta);
  count_arrival(b, address, what);
  settle(b);
}

namespace {

void learn(Thread& thread, const MBarrier& b, Scope scope) {
  thread.known.join(b.local_done);
  if (scope != Scope::kCta) thread.known.join(b.cluster_done);
}
bool completed(const MBarrier& b, uint32_t parity) { return (b.phase & 1) != (parity & 1); }

}  // namespace

void barrier_wait(uint32_t address, uint32_t parity, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 4);
  const uint32_t offset = address & 0xFFFFFF;
  MBarrier& b = barrier_at(*thread.cta, offset, false, "mbarrier.try_wait");
  while (!completed(b, parity)) {
    b.waiting.push_back(&thread);
    block({.stop = Stop::kBarrier, .what = "mbarrier", .a = offset, .b = parity});
  }
  learn(thread, b, scope);
}

bool barrier_test(uint32_t address, uint32_t parity, Scope scope, Site site) {
  Thread& thread = enter(site);
  MBarrier& b = barrier_at(*thread.cta, address & 0xFFFFFF, false, "mbarrier.test_wait");
  if (!completed(b, parity)) {
    yield_now();  // who polls must not keep others from running
    return false;
  }
  learn(thread, b, scope);
  return true;
}

void store_async(uint32_t address, uint32_t value, uint32_t barrier, Site site) {
  constexpr auto kWhat = "st.async";
  Thread& thread = enter_here(site);
  note_path(thread, 5);
  Cluster& cluster = *thread.cta->cluster;
  Cta* cta = &cta_of(cluster, address, kWhat);
  const uint32_t offset = address & 0xFFFFFF;
  if (offset % 4 != 0) fault("st.async: not aligned to 4 bytes");
  if (barrier >> 24 != address >> 24) {
    fault(format("st.async: its word is in CTA %u, its mbarrier in CTA %u", address >> 24,
                 barrier >> 24));
  }
  barrier_at(*cta, barrier, true, kWhat);
  begin_async_write(*cta, offset, 4, kWhat);
  enqueue(transient_channel(), [=] {
    if (cta->exited) fault("st.async into a CTA that has exited");
    async_write(*cta, offset, &value, 4);
    end_async_write(*cta, offset, 4);
    deliver(*cta, barrier, 4, kWhat);
  });
  maybe_yield();
}

}  // namespace hw::model
