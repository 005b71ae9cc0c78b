// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/meeting.h"

#include <bit>

#include "cuda/hw/model/engine/global_memory.h"

namespace hw::model {

void publish_to_cta(Thread& thread) {
  merge_words(thread.cta->stores, thread.stores);
  auto& dirty = thread.cta->dirty;
  dirty.insert(dirty.end(), thread.dirty.begin(), thread.dirty.end());
  thread.dirty.clear();
}

namespace {

void check_same_call(const Rendezvous& r, const Thread& thread, const WarpCall& call) {
  if (r.op != call.op) {
    fault(format("%s: other lanes of the warp are at another warp-wide operation (%s)", call.what,
                 name_of(r.site).c_str()));
  }
  if (r.argument != call.argument) {
    fault(format("%s: the lanes of the warp disagree on the operand, %d and %d", call.what,
                 r.argument, call.argument));
  }
  if (call.aligned && r.path != thread.path) {
    fault(format(
        "%s is .aligned, but the lanes of the warp come by different ways (a warp sync is missing)",
        call.what));
  }
}

}  // namespace

uint32_t meet_warp(const WarpCall& call, const std::function<void(Rendezvous&)>& last) {
  Thread& thread = *machine->current;
  Warp& warp = *thread.warp;
  Rendezvous& r = warp.meeting;
  if (r.mask == 0) {
    r.op = call.op;
    r.argument = call.argument;
    r.path = thread.path;
    r.site = thread.site;
  }
  check_same_call(r, thread, call);
  if (call.op == WarpOp::kSync) thread.path = 0;

  // A warp sync orders memory, and so does a message of the whole warp; an exchange of registers and the
  // tensor cores' own operations do not.
  const bool orders = call.op == WarpOp::kSync || call.op == WarpOp::kPut;
  if (orders) {
    publish_to_cta(thread);
    r.known.join(thread.known);
  }
  r.mask |= 1U << thread.id.lane;
  r.in[thread.id.lane] = call.in;
  r.registers[thread.id.lane] = call.registers;
  if (std::popcount(r.mask) < warp.alive) {
    r.waiting.push_back(&thread);
    block({.stop = Stop::kMeeting, .what = call.what});
    return r.out[thread.id.lane];
  }
  if (last) last(r);
  for (int lane = 0; orders && lane < 32; ++lane) {
    if ((r.mask >> lane & 1) != 0) warp.lanes[lane]->known.join(r.known);
  }
  r.mask = 0;
  r.known = {};
  wake_all(r.waiting);
  const uint32_t out = r.out[thread.id.lane];
  maybe_yield();
  return out;
}

// --- warps -------------------------------------------------------------------------------------------

void warp_sync(Site site) {
  enter_here(site);
  meet_warp({.op = WarpOp::kSync, .what = "warp sync", .aligned = false});
}

bool elect_one(Site site) {
  enter_here(site);
  return meet_warp({.op = WarpOp::kElect, .what = "elect.sync", .aligned = false},
                   [](Rendezvous& r) {
                     // Any lane may be the one; the seed says which.
                     for (int lane = 0; lane < 32; ++lane)
                       r.out[lane] = lane == machine->elected ? 1 : 0;
                   }) != 0;
}

uint32_t warp_exchange(Exchange how, uint32_t value, int argument, Site site) {
  enter_here(site);
  if (argument < 0 || argument > 31)
    fault(format("shfl: lane or mask %d is not in 0..31", argument));
  return meet_warp({.op = WarpOp::kShuffle,
                    .what = how == Exchange::kBallot ? "vote.ballot" : "shfl",
                    .argument = argument | static_cast<int>(how) << 8,
                    .aligned = false,
                    .in = value},
                   [&](Rendezvous& r) {
                     uint32_t votes = 0;
                     for (int lane = 0; lane < 32; ++lane) votes |= (r.in[lane] & 1) << lane;
                     for (int lane = 0; lane < 32; ++lane) {
                       r.out[lane] = how == Exchange::kBallot ? votes
                                     : how == Exchange::kXor  ? r.in[lane ^ argument]
                                                              : r.in[argument];
                     }
                   });
}

void pause(Site site) {
  enter_here(site);
  yield_now();
}

namespace {

int free_registers(const Cta& cta) {
  int free = 65536;
  for (const auto& warp : cta.warps) free -= warp->registers * 32;
  return free;
}

}  // namespace

void set_registers(int registers, bool more, Site site) {
  Thread& thread = enter_here(site);
  Warp& warp = *thread.warp;
  Cta& cta = *thread.cta;
  meet_warp({.op = WarpOp::kRegisters, .what = "setmaxnreg", .argument = registers});
  if (more ? registers < warp.registers : registers > warp.registers) {
    fault(format("setmaxnreg.%s to %d registers, the warp has %d", more ? "inc" : "dec", registers,
                 warp.registers));
  }
  while (more && free_registers(cta) < (registers - warp.registers) * 32) {
    cta.registers_wanted.push_back(&thread);
    block({.stop = Stop::kRegisters, .what = "setmaxnreg", .a = static_cast<uint32_t>(registers)});
  }
  if (warp.registers == registers) return;  // another lane has done it
  warp.registers = registers;
  wake_all(cta.registers_wanted);
}

// --- CTAs ----------------------------------------------------------------------------------------------

namespace {

void meet(Meeting& meeting, int expected, bool stays, const Wait& wait) {
  Machine& m = *machine;
  Thread& thread = *m.current;
  thread.path = 0;
  if (meeting.arrived > 0 && meeting.expected != expected) {
    fault(format("%s: threads disagree on the count, %d and %d", wait.what, meeting.expected,
                 expected));
  }
  meeting.expected = expected;
  publish_to_cta(thread);
  meeting.known.join(thread.known);
  ++m.now;
  if (stays) meeting.waiting.push_back(&thread);
  if (++meeting.arrived < expected) {
    if (stays) block(wait);
    return;
  }
  std::vector<Thread*> waiting = std::move(meeting.waiting);
  meeting.known.sync_time = m.now;
  for (Thread* other : waiting) other->known.join(meeting.known);
  meeting = {};
  for (Thread* other : waiting) {
    if (other != &thread) make_ready(other);
  }
  if (stays) yield_now();
}

Meeting& named_meeting(int id, int threads, const char* what) {
  Cta& cta = *machine->current->cta;
  if (id < 1 || id > 15) fault(format("%s: barrier id %d is not in 1..15", what, id));
  if (threads < 32 || threads % 32 != 0 || threads > machine->shape.threads) {
    fault(format("%s %d: %d threads are no whole warps of this CTA", what, id, threads));
  }
  return cta.named[id];
}

}  // namespace

void cta_sync(Site site) {
  Cta& cta = *enter_here(site).cta;
  meet(cta.sync, cta.alive, true, {.stop = Stop::kMeeting, .what = "the CTA's barrier"});
}
void named_sync(int id, int threads, Site site) {
  enter_here(site);
  meet(named_meeting(id, threads, "bar.sync"), threads, true,
       {.stop = Stop::kMeeting,
        .what = "a named barrier",
        .a = static_cast<uint32_t>(id),
        .b = static_cast<uint32_t>(threads)});
}
void named_arrive(int id, int threads, Site site) {
  enter_here(site);
  meet(named_meeting(id, threads, "bar.arrive"), threads, false,
       {.stop = Stop::kMeeting, .what = "a named barrier", .a = static_cast<uint32_t>(id)});
}

// --- clusters --------------------------------------------------------------------------------------------

void cluster_arrive(bool release, Site site) {
  Thread& thread = enter_here(site);
  meet_warp({.op = WarpOp::kClusterArrive, .what = "barrier.cluster.arrive"});
  Machine& m = *machine;
  Cluster& cluster = *thread.cta->cluster;
  if (cluster.arrived_in.count(&thread) != 0) fault("barrier.cluster.arrive twice without a wait");
  cluster.arrived_in[&thread] = cluster.phase;
  if (release) {
    release_to_gpu(thread);
    Knowledge known = thread.known;
    stamp_release(known, *thread.cta);
    cluster.barrier.known.join(known);
  }
  ++m.now;
  int alive = 0;
  for (auto& cta : cluster.ctas) alive += cta->alive;
  if (++cluster.barrier.arrived < alive) return;
  cluster.done = cluster.barrier.known;
  cluster.done.sync_time = m.now;
  std::vector<Thread*> waiting = std::move(cluster.barrier.waiting);
  cluster.barrier = {};
  ++cluster.phase;
  wake_all(waiting);
}

void cluster_wait(Site site) {
  Thread& thread = enter_here(site);
  Cluster& cluster = *thread.cta->cluster;
  meet_warp({.op = WarpOp::kClusterWait, .what = "barrier.cluster.wait"});
  const auto mine = cluster.arrived_in.find(&thread);
  if (mine == cluster.arrived_in.end()) fault("barrier.cluster.wait without an arrive");
  while (mine->second == cluster.phase) {
    cluster.barrier.waiting.push_back(&thread);
    block({.stop = Stop::kMeeting, .what = "the cluster's barrier"});
  }
  thread.known.join(cluster.done);
  cluster.arrived_in.erase(&thread);
}

}  // namespace hw::model
