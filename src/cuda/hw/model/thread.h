// SPDX-License-Identifier: Apache-2.0
// Who a thread is, and how threads meet. The device model's half of ptx/thread.h.
// Every function takes the place of its call, so that a report can name file, line and role.
#pragma once

#include <cstring>
#include <source_location>

#include "cuda/hw/types.h"

namespace hw {

using Site = std::source_location;

namespace model {

struct Self {
  int thread, warp, lane, cta_rank, cluster_id, cluster_count;
};
extern Self* self;  // the running thread; the scheduler sets it

void cta_sync(Site site);
void warp_sync(Site site);
void named_sync(int id, int threads, Site site);
void named_arrive(int id, int threads, Site site);
void cluster_arrive(bool release, Site site);
void cluster_wait(Site site);
bool elect_one(Site site);
enum class Exchange { kIndex, kXor, kBallot };
uint32_t warp_exchange(Exchange how, uint32_t value, int argument, Site site);
void set_registers(int registers, bool more, Site site);
void pause(Site site);

}  // namespace model

inline int thread() { return model::self->thread; }
inline int warp() { return model::self->warp; }
inline int lane() { return model::self->lane; }
inline int cta_rank() { return model::self->cta_rank; }
inline int cluster_id() { return model::self->cluster_id; }
inline int cluster_count() { return model::self->cluster_count; }

inline void cta_sync(Site site = Site::current()) { model::cta_sync(site); }
inline void warp_sync(Site site = Site::current()) { model::warp_sync(site); }
inline void named_sync(int id, int threads, Site site = Site::current()) {
  model::named_sync(id, threads, site);
}
inline void named_arrive(int id, int threads, Site site = Site::current()) {
  model::named_arrive(id, threads, site);
}
inline void cluster_arrive(Site site = Site::current()) { model::cluster_arrive(true, site); }
inline void cluster_arrive_relaxed(Site site = Site::current()) {
  model::cluster_arrive(false, site);
}
inline void cluster_wait(Site site = Site::current()) { model::cluster_wait(site); }
inline bool elect_one(Site site = Site::current()) { return model::elect_one(site); }

inline uint32_t shfl(uint32_t value, int lane, Site site = Site::current()) {
  return model::warp_exchange(model::Exchange::kIndex, value, lane, site);
}
/// Lane 0's value in every lane, so that a GPU may branch on it as a warp. A warp-wide operation like shfl:
/// never in code that only some lanes reach.
inline int uniform(int value, Site site = Site::current()) {
  return static_cast<int>(
      model::warp_exchange(model::Exchange::kIndex, static_cast<uint32_t>(value), 0, site));
}
inline uint32_t shfl_xor(uint32_t value, int mask, Site site = Site::current()) {
  return model::warp_exchange(model::Exchange::kXor, value, mask, site);
}
inline float shfl_xor(float value, int mask, Site site = Site::current()) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = shfl_xor(bits, mask, site);
  std::memcpy(&value, &bits, 4);
  return value;
}
/// Bit i: what lane i says.
inline uint32_t ballot(bool predicate, Site site = Site::current()) {
  return model::warp_exchange(model::Exchange::kBallot, predicate ? 1 : 0, 0, site);
}

template <int kRegisters>
inline void registers_down(Site site = Site::current()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  model::set_registers(kRegisters, false, site);
}
template <int kRegisters>
inline void registers_up(Site site = Site::current()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  model::set_registers(kRegisters, true, site);
}
/// Gives other threads the machine for about a microsecond.
inline void pause(Site site = Site::current()) { model::pause(site); }

}  // namespace hw
