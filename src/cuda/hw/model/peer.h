// SPDX-License-Identifier: Apache-2.0
// Other GPUs: multicast memory, one-sided messages, waits that end softly. The device model's half of
// ptx/peer.h.
#pragma once

#include "cuda/hw/model/memory.h"

namespace hw {

namespace model {

void multimem_load_add(const void* address, uint32_t* values, bool bf16, Site site);
void multimem_store(void* address, const uint32_t* values, Site site);
void multimem_add(void* address, uint32_t value, Order order, Scope scope, Site site);
void fence_proxy_alias(Site site);
void put_signal(void* destination, const void* source, uint32_t bytes, uint64_t* signal,
                uint64_t value, int peer, Site site);
bool peer_wait(const void* flag, int bytes, uint64_t value, Scope scope, const Abort& abort,
               const PeerWait& who, Site site);

}  // namespace model

/// The sum over the group of four floats at this place (multimem.ld_reduce.relaxed.sys.add.v4.f32);
/// the switch promises no order.
inline Float4 multimem_load_add(Multicast<float> p, Site site = Site::current()) {
  Float4 value;
  model::multimem_load_add(p.address(), reinterpret_cast<uint32_t*>(&value), false, site);
  return value;
}
/// Eight bf16, added in f32 (.acc::f32.v4.bf16x2).
inline Vec4 multimem_load_add(Multicast<Bf16> p, Site site = Site::current()) {
  Vec4 value;
  model::multimem_load_add(p.address(), reinterpret_cast<uint32_t*>(&value), true, site);
  return value;
}
/// Sixteen bytes to this place of every GPU of the group (multimem.st.relaxed.sys).
template <class T>
inline void multimem_store(Multicast<T> p, Vec4 value, Site site = Site::current()) {
  model::multimem_store(p.address(), reinterpret_cast<const uint32_t*>(&value), site);
}
/// Adds to the counter at this place of every GPU of the group (multimem.red).
template <Order kOrder, Scope kScope>
inline void multimem_add(Multicast<uint32_t> p, uint32_t value, Site site = Site::current()) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kRelease);
  model::multimem_add(p.address(), value, kOrder, kScope, site);
}
/// Between accesses of the same bytes through their own and their multicast address.
inline void fence_proxy_alias(Site site = Site::current()) { model::fence_proxy_alias(site); }

/// One warp sends `bytes` of its memory to the same symmetric place at rank `peer`, then sets the
/// peer's signal. Only this message is ordered before its signal. Not to be reused before the peer
/// answers. `destination` and `signal` are this rank's addresses of symmetric memory.
template <class T, class U>
inline void put_signal(Global<T> destination, Global<U> source, uint32_t bytes,
                       Global<uint64_t> signal, uint64_t value, int peer,
                       Site site = Site::current()) {
  model::put_signal(destination.address(), source.address(), bytes, signal.address(), value, peer,
                    site);
}
/// Until *flag has reached `value` (acquire at kScope), or the time of `abort` is over, or another
/// wait has given up: then false, and the first tells the host who waited for what. One thread calls.
template <Scope kScope = Scope::kSys, class T>
inline bool wait_peer(Global<T> flag, std::type_identity_t<T> value, const Abort& abort,
                      const PeerWait& who, Site site = Site::current()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  return model::peer_wait(flag.address(), sizeof(T), value, kScope, abort, who, site);
}

}  // namespace hw
