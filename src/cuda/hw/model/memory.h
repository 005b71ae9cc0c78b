// SPDX-License-Identifier: Apache-2.0
// Shared and global memory, generic proxy. The device model's half of ptx/memory.h.
#pragma once

#include <type_traits>

#include "cuda/hw/model/barrier.h"

namespace hw {

namespace model {

void shared_store(uint32_t address, const void* value, int bytes, Site site);
void shared_load(uint32_t address, void* value, int bytes, Site site);
void store_matrix(uint32_t address, const uint32_t (&values)[4], Site site);
void fence_proxy_async(bool global, Site site);
void global_load(const void* address, void* value, int bytes, Site site);
void global_store(void* address, const void* value, int bytes, Site site);
uint64_t atomic_load(const void* address, int bytes, Order order, Scope scope, Site site);
void atomic_store(void* address, uint64_t value, int bytes, Order order, Scope scope, Site site);
uint64_t atomic_add(void* address, uint64_t value, int bytes, Order order, Scope scope, Site site);
void fence(Scope scope, Site site);
void flag_wait(const void* flag, uint32_t value, Order order, Scope scope, Site site);

}  // namespace model

template <int kBytes, int kAlign>
inline uint32_t address(const Buffer<kBytes, kAlign>& buffer, Site site = Site::current()) {
  return model::shared_address(&buffer, site);
}

inline void st_shared(uint32_t address, uint32_t value, Site site = Site::current()) {
  model::shared_store(address, &value, 4, site);
}
inline void st_shared(uint32_t address, float value, Site site = Site::current()) {
  model::shared_store(address, &value, 4, site);
}
inline void st_shared(uint32_t address, Vec2 value, Site site = Site::current()) {
  model::shared_store(address, &value, 8, site);
}
inline void st_shared(uint32_t address, Vec4 value, Site site = Site::current()) {
  model::shared_store(address, &value, 16, site);
}
/// T: uint32_t, float, Vec2 or Vec4.
template <class T>
inline T ld_shared(uint32_t address, Site site = Site::current()) {
  T value;
  model::shared_load(address, &value, sizeof(T), site);
  return value;
}
/// stmatrix, four 8x8 blocks of 16-bit elements: lane i gives the row address of row i % 8 of block
/// i / 8, and holds elements (lane / 4, 2 (lane % 4) + {0, 1}) of each block (PTX ISA, "stmatrix").
inline void store_matrix(uint32_t row_address, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3,
                         Site site = Site::current()) {
  model::store_matrix(row_address, {v0, v1, v2, v3}, site);
}

/// A scalar in shared memory.
template <class T>
class Cell {
 public:
  T load(Site site = Site::current()) const {
    T value;
    model::shared_load(model::shared_address(&value_, site), &value, sizeof(T), site);
    return value;
  }
  void store(T value, Site site = Site::current()) {
    model::shared_store(model::shared_address(&value_, site), &value, sizeof(T), site);
  }

 private:
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  T value_;
};
template <class T>
inline uint32_t address(const Cell<T>& cell, Site site = Site::current()) {
  return model::shared_address(&cell, site);
}

/// Generic accesses of shared memory before it, asynchronous ones after it.
inline void fence_proxy_async(Site site = Site::current()) {
  model::fence_proxy_async(false, site);
}
/// The same for global memory.
inline void fence_proxy_async_global(Site site = Site::current()) {
  model::fence_proxy_async(true, site);
}

/// Weak accesses; T has 2, 4, 8 or 16 bytes and its natural alignment.
template <class T>
inline std::remove_const_t<T> ld(Global<T> p, Site site = Site::current()) {
  std::remove_const_t<T> value;
  model::global_load(p.address(), &value, sizeof(T), site);
  return value;
}
template <class T>
inline void st(Global<T> p, std::type_identity_t<T> value, Site site = Site::current()) {
  model::global_store(p.address(), &value, sizeof(T), site);
}
/// Strong accesses; T is uint32_t, int32_t or uint64_t.
template <Order kOrder, Scope kScope, class T>
inline std::remove_const_t<T> ld(Global<T> p, Site site = Site::current()) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kAcquire);
  return static_cast<std::remove_const_t<T>>(
      model::atomic_load(p.address(), sizeof(T), kOrder, kScope, site));
}
template <Order kOrder, Scope kScope, class T>
inline void st(Global<T> p, std::type_identity_t<T> value, Site site = Site::current()) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kRelease);
  model::atomic_store(p.address(), static_cast<uint64_t>(value), sizeof(T), kOrder, kScope, site);
}
/// The value before the addition.
template <Order kOrder, Scope kScope, class T>
inline T add(Global<T> p, std::type_identity_t<T> value, Site site = Site::current()) {
  return static_cast<T>(model::atomic_add(p.address(), static_cast<uint64_t>(value), sizeof(T),
                                          kOrder, kScope, site));
}
/// fence.acq_rel.
template <Scope kScope>
inline void fence(Site site = Site::current()) {
  model::fence(kScope, site);
}
/// Until *flag has reached `value`, counted modulo 2^32. Local: a time-out is a bug of the kernel,
/// says who waits for what, and traps. Waits on other ranks: wait_peer.
template <Order kOrder, Scope kScope>
inline void wait_flag(Global<uint32_t> flag, uint32_t value, Site site = Site::current()) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kAcquire);
  model::flag_wait(flag.address(), value, kOrder, kScope, site);
}

}  // namespace hw
