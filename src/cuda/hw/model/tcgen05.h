// SPDX-License-Identifier: Apache-2.0
// Blackwell's tensor core and its memory (TMEM). The device model's half of ptx/tcgen05.h.
#pragma once

#include "cuda/hw/model/memory.h"

namespace hw {

namespace model {

void tmem_alloc(CtaGroup group, uint32_t destination, uint32_t columns, Site site);
void tmem_relinquish(CtaGroup group, Site site);
void tmem_dealloc(CtaGroup group, uint32_t base, uint32_t columns, Site site);
void tcgen05_mma(CtaGroup group, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                 bool accumulate, Site site);
void tcgen05_commit(CtaGroup group, uint32_t barrier, uint32_t ctas, bool multicast, Site site);
void tcgen05_fence(bool after, Site site);
void tmem_ld(uint32_t address, uint32_t* values, int columns, Site site);
void tmem_st(uint32_t address, const uint32_t* values, int columns, Site site);
void tmem_wait(bool loads, Site site);

}  // namespace model

/// A whole warp takes `columns` (a power of two, 32 ... 512) of TMEM and finds their address in
/// `destination`. With two CTAs, one warp of each.
template <CtaGroup kGroup>
inline void tmem_alloc(Cell<uint32_t>& destination, uint32_t columns, Site site = Site::current()) {
  model::tmem_alloc(kGroup, address(destination, site), columns, site);
}
template <CtaGroup kGroup>
inline void tmem_relinquish(Site site = Site::current()) {
  model::tmem_relinquish(kGroup, site);
}
template <CtaGroup kGroup>
inline void tmem_dealloc(uint32_t base, uint32_t columns, Site site = Site::current()) {
  model::tmem_dealloc(kGroup, base, columns, site);
}
/// D (+)= A B^T in TMEM, bf16 in, f32 out, K = 16; one thread issues it, of the even CTA of a pair.
template <CtaGroup kGroup>
inline void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
                        Site site = Site::current()) {
  model::tcgen05_mma(kGroup, d, a, b, instruction, accumulate, site);
}
/// The barrier gets one arrival when every earlier tcgen05.mma of this thread has finished.
template <CtaGroup kGroup>
inline void tcgen05_commit(Barrier& barrier, Site site = Site::current()) {
  model::tcgen05_commit(kGroup, address(barrier, site), 0, false, site);
}
/// The same, at the same place of every CTA in the mask.
template <CtaGroup kGroup>
inline void tcgen05_commit_multicast(Barrier& barrier, uint16_t ctas, Site site = Site::current()) {
  model::tcgen05_commit(kGroup, address(barrier, site), ctas, true, site);
}
/// Later tcgen05 operations of this thread come after what it has synchronised with.
inline void tcgen05_after_sync(Site site = Site::current()) { model::tcgen05_fence(true, site); }
/// Earlier tcgen05 operations of this thread come before what it will synchronise with.
inline void tcgen05_before_sync(Site site = Site::current()) { model::tcgen05_fence(false, site); }

/// 32x32b.xN: lane l of warp w reads kColumns words of TMEM lane 32 (w % 4) + l. Not to be touched
/// before tmem_wait_ld.
template <int kColumns>
inline void tmem_ld(uint32_t address, uint32_t (&values)[kColumns], Site site = Site::current()) {
  static_assert(kColumns == 8 || kColumns == 16 || kColumns == 32 || kColumns == 64);
  model::tmem_ld(address, values, kColumns, site);
}
template <int kColumns>
inline void tmem_wait_ld(uint32_t (&)[kColumns], Site site = Site::current()) {
  model::tmem_wait(true, site);
}
template <int kColumns>
inline void tmem_st(uint32_t address, const uint32_t (&values)[kColumns],
                    Site site = Site::current()) {
  static_assert(kColumns == 8 || kColumns == 16 || kColumns == 32 || kColumns == 64);
  model::tmem_st(address, values, kColumns, site);
}
inline void tmem_wait_st(Site site = Site::current()) { model::tmem_wait(false, site); }

}  // namespace hw
