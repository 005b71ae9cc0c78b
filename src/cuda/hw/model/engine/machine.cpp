// SPDX-License-Identifier: Apache-2.0
// A run: builds the GPUs' clusters, starts them as they fit, and looks at what they leave behind.
#include <chrono>
#include <cstdlib>
#include <stdexcept>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/meeting.h"
#include "cuda/hw/model/engine/shared_memory.h"

namespace hw::model {

void finish_bulk_stores();  // copies.cpp

Machine::~Machine() {
  for (Cta* cta : ctas) std::free(cta->generic);
}

namespace {

void start_cluster(Machine& m, int number) {
  Cluster& cluster = *m.clusters[static_cast<size_t>(number)];
  cluster.started = true;
  for (auto& thread : m.threads) {
    if (thread->cta->cluster == &cluster) make_ready(thread.get());
  }
}

// --- what must be true when a CTA ends -------------------------------------------------------------------

void check_thread_end(const Thread& thread) {
  if (!thread.open_group.empty()) fault("exits with bulk stores that it has not committed");
  for (const auto& group : thread.groups) {
    for (const auto& store : group) {
      if (!store->read) {
        fault(format(
            "exits while a bulk store (%s) has still to read shared memory: a bulk wait is missing",
            name_of(store->site).c_str()));
      }
    }
  }
}

void check_cta_end(Cta& cta) {
  for (const auto& [offset, barrier] : cta.barriers) {
    if (barrier.bytes == 0) continue;
    fault(format("CTA %d exits, and mbarrier %s expected %lld bytes and got %lld", cta.rank,
                 shared_name(offset).c_str(), static_cast<long long>(barrier.announced),
                 static_cast<long long>(barrier.delivered)));
  }
  for (uint32_t i = 0; i < cta.words.size(); ++i) {
    if (cta.words[i].in_flight == 0) continue;
    fault(format("CTA %d exits while an asynchronous copy writes %s", cta.rank,
                 shared_name(i * 4).c_str()));
  }
  for (const auto& group : cta.groups) {
    if (!group->channel.queue.empty()) fault(format("CTA %d exits with wgmma in flight", cta.rank));
  }
  for (const Range& taken : cta.tmem_allocations) {
    fault(format("CTA %d exits with %u columns of TMEM allocated at column %u", cta.rank,
                 taken.bytes, taken.offset));
  }
}

void end_cta(Machine& m, Cta& cta) {
  cta.exited = true;
  merge_words(cta.cluster->gpu->stores, cta.stores);
  check_cta_end(cta);
  for (const auto& other : cta.cluster->ctas) {
    if (!other->exited) return;
  }
  if (m.next_cluster < static_cast<int>(m.clusters.size())) start_cluster(m, m.next_cluster++);
}

/// The last one of a warp to leave may be what the others wait for.
void leave_warp(Warp& warp) {
  if (warp.meeting.mask != 0 && warp.alive > 0) {
    fault(format("exits while other lanes of its warp are at %s",
                 name_of(warp.meeting.site).c_str()));
  }
}

void run_thread() {
  entered();
  Machine& m = *machine;
  Thread& thread = *m.current;
  m.body(m.params, thread.cta->generic + kSharedBase);
  thread.done = true;
  --m.live;
  --thread.warp->alive;
  ++m.now;
  publish_to_cta(thread);
  check_thread_end(thread);
  leave_warp(*thread.warp);
  if (--thread.cta->alive == 0) end_cta(m, *thread.cta);
  switch_context(thread.context, m.scheduler);
  std::abort();
}

// --- building ----------------------------------------------------------------------------------------------

void add_warp(Machine& m, Cta& cta, int index) {
  auto warp = std::make_unique<Warp>();
  warp->cta = &cta;
  warp->index = index;
  warp->weight = random_below(8);
  warp->registers = std::min(255, 65536 / m.shape.threads) / 8 * 8;
  for (int lane = 0; lane < 32; ++lane) {
    auto thread = std::make_unique<Thread>();
    thread->id = {index * 32 + lane, index, lane, cta.rank, cta.cluster->id, m.shape.clusters};
    thread->cta = &cta;
    thread->warp = warp.get();
    thread->gpu = cta.cluster->gpu;
    prepare(thread->context, m.threads.size(), run_thread);
    warp->lanes[static_cast<size_t>(lane)] = thread.get();
    m.threads.push_back(std::move(thread));
  }
  cta.warps.push_back(std::move(warp));
  if (index % 4 == 0) cta.groups.push_back(std::make_unique<WarpGroup>());
}

void add_cta(Machine& m, Cluster& cluster, int rank) {
  auto cta = std::make_unique<Cta>();
  cta->cluster = &cluster;
  cta->rank = rank;
  cta->index = m.cta_count();
  cta->alive = m.shape.threads;
  make_cta_memory(*cta,
                  kSharedBase + static_cast<uint32_t>((m.shape.shared_bytes + 1023) / 1024 * 1024));
  cta->tmem.assign(static_cast<size_t>(kTmemLanes) * kTmemColumns, 0);
  m.ctas.push_back(cta.get());
  for (int warp = 0; warp < m.shape.threads / 32; ++warp) add_warp(m, *cta, warp);
  cluster.ctas.push_back(std::move(cta));
}

void build(Machine& m) {
  for (int rank = 0; rank < m.memory->ranks(); ++rank) {
    m.gpus.push_back(std::make_unique<Gpu>());
    m.gpus.back()->rank = rank;
  }
  for (int number = 0; number < m.shape.clusters; ++number) {
    auto cluster = std::make_unique<Cluster>();
    cluster->id = number;
    cluster->gpu = m.gpus[static_cast<size_t>(number / m.options.clusters_per_rank)].get();
    for (int rank = 0; rank < m.shape.cluster; ++rank) add_cta(m, *cluster, rank);
    m.clusters.push_back(std::move(cluster));
  }
  m.live = static_cast<int>(m.threads.size());
}

void check_shape(const World& world, const Shape& s, const Options& o) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("launch: " + what);
  };
  if (s.threads < 32 || s.threads > 1024 || s.threads % 32 != 0) {
    refuse(format("expected 32 to 1024 threads in whole warps, got %d", s.threads));
  }
  if (s.cluster < 1 || s.cluster > 16)
    refuse(format("expected a cluster of 1 to 16 CTAs, got %d", s.cluster));
  if (s.clusters < 1 || s.clusters * s.cluster > kMaxCtas) {
    refuse(format("expected 1 to %d CTAs, got %d clusters of %d", kMaxCtas, s.clusters, s.cluster));
  }
  if (o.clusters_per_rank < 1 || (s.clusters - 1) / o.clusters_per_rank >= world.ranks()) {
    refuse(format("%d clusters, %d for each rank, need more than the world's %d ranks", s.clusters,
                  o.clusters_per_rank, world.ranks()));
  }
  if (s.shared_bytes + kSharedBase > kSharedLimit) {
    refuse(format("expected at most %u bytes of shared memory, got %zu", kSharedLimit - kSharedBase,
                  s.shared_bytes));
  }
}

void seed(Machine& m, uint64_t value) {
  m.random = value * 0x9E3779B97F4A7C15U + 88172645463325252U;
  for (int i = 0; i < 8; ++i) random_below(2);
  m.timing = static_cast<Timing>(value % 3);
  m.elected = static_cast<int>(random_below(32));
}

}  // namespace

Report run(World& world, const Shape& shape, const Options& options, Body body,
           const void* params) {
  check_shape(world, shape, options);
  const auto started = std::chrono::steady_clock::now();
  Machine m;
  machine = &m;
  m.options = options;
  m.shape = shape;
  m.body = body;
  m.params = params;
  m.memory = &world.memory();
  m.memory->begin_run();
  seed(m, options.seed);
  build(m);
  m.next_cluster = std::min(shape.clusters, options.resident_clusters);
  for (int number = 0; number < m.next_cluster; ++number) start_cluster(m, number);
  try {
    schedule();
    if (!m.failed) {
      finish_bulk_stores();
      m.memory->drain_everything();
    }
  } catch (const Abandoned&) {  // asynchronous work has failed; m.failure says how
  }
  m.memory->end_run();
  Report report;
  report.ok = !m.failed;
  report.what = m.failure;
  report.switches = m.switches;
  report.async_operations = m.async_operations;
  report.peer_timeouts = m.peer_timeouts;
  report.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  machine = nullptr;
  return report;
}

}  // namespace hw::model
