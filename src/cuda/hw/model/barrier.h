// SPDX-License-Identifier: Apache-2.0
// mbarriers. The device model's half of ptx/barrier.h.
#pragma once

#include "cuda/hw/model/thread.h"

namespace hw {

namespace model {

uint32_t shared_address(const void* object, Site site);
void barrier_init(uint32_t barrier, uint32_t arrivals, Site site);
void fence_barrier_init(Site site);
void barrier_arrive(uint32_t barrier, Scope scope, bool remote, Site site);
void barrier_expect(uint32_t barrier, uint32_t bytes, bool arrive, bool remote, Site site);
void barrier_wait(uint32_t barrier, uint32_t parity, Scope scope, Site site);
bool barrier_test(uint32_t barrier, uint32_t parity, Scope scope, Site site);
void store_async(uint32_t address, uint32_t value, uint32_t barrier, Site site);

}  // namespace model

/// 32-bit shared::cluster address: the CTA's rank in bits 24 and up, the offset below.
inline uint32_t address(const Barrier& barrier, Site site = Site::current()) {
  return model::shared_address(&barrier, site);
}
/// The same place in the pair's even CTA, and in CTA `rank` of the cluster.
inline uint32_t leader_address(uint32_t address) { return address & 0xFEFFFFFFU; }
inline uint32_t cta_address(uint32_t address, int rank) {
  return (address & 0x00FFFFFFU) | static_cast<uint32_t>(rank) << 24;
}

inline void barrier_init(Barrier& barrier, uint32_t arrivals, Site site = Site::current()) {
  model::barrier_init(address(barrier, site), arrivals, site);
}
/// Makes the initialisations of this thread visible to the cluster and to asynchronous copies.
inline void fence_barrier_init(Site site = Site::current()) { model::fence_barrier_init(site); }

/// Release at the scope of this CTA.
inline void arrive(Barrier& barrier, Site site = Site::current()) {
  model::barrier_arrive(address(barrier, site), Scope::kCta, false, site);
}
/// At any CTA of the cluster. kCta orders nothing for another CTA's threads; kCluster does, and costs.
template <Scope kScope = Scope::kCta>
inline void arrive_at(uint32_t barrier, Site site = Site::current()) {
  model::barrier_arrive(barrier, kScope, true, site);
}
inline void arrive_expect(Barrier& barrier, uint32_t bytes, Site site = Site::current()) {
  model::barrier_expect(address(barrier, site), bytes, true, false, site);
}
inline void arrive_expect_at(uint32_t barrier, uint32_t bytes, Site site = Site::current()) {
  model::barrier_expect(barrier, bytes, true, true, site);
}
/// Announces bytes without arriving.
inline void expect(Barrier& barrier, uint32_t bytes, Site site = Site::current()) {
  model::barrier_expect(address(barrier, site), bytes, false, false, site);
}
/// Until the phase with this parity has completed; acquires at kScope. Local: a time-out is a bug of
/// the kernel, says who waits for what, and traps.
template <Scope kScope = Scope::kCta>
inline void wait(Barrier& barrier, uint32_t parity, Site site = Site::current()) {
  model::barrier_wait(address(barrier, site), parity, kScope, site);
}
/// Whether the phase with this parity has completed.
template <Scope kScope = Scope::kCta>
inline bool test(Barrier& barrier, uint32_t parity, Site site = Site::current()) {
  return model::barrier_test(address(barrier, site), parity, kScope, site);
}
/// Writes a word into a CTA of the cluster and reports 4 bytes to a barrier of that CTA.
inline void store_async(uint32_t address, uint32_t value, uint32_t barrier,
                        Site site = Site::current()) {
  model::store_async(address, value, barrier, site);
}

}  // namespace hw
