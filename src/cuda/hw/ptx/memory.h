// SPDX-License-Identifier: Apache-2.0
// Shared and global memory, generic proxy (PTX ISA, "Data movement", "Memory consistency model").
#pragma once

#include <type_traits>

#include "cuda/hw/ptx/barrier.h"

namespace hw {

template <int kBytes, int kAlign>
HW_FN uint32_t address(const Buffer<kBytes, kAlign>& buffer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(&buffer));
}

HW_FN void st_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
HW_FN void st_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
HW_FN void st_shared(uint32_t address, Vec2 value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y)
               : "memory");
}
HW_FN void st_shared(uint32_t address, Vec4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
template <class T>
HW_FN T ld_shared(uint32_t address) {
  T value;
  if constexpr (std::is_same_v<T, float>) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  } else if constexpr (std::is_same_v<T, uint32_t>) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  } else if constexpr (std::is_same_v<T, Vec2>) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "r"(address)
                 : "memory");
  } else {
    static_assert(std::is_same_v<T, Vec4>, "uint32_t, float, Vec2 or Vec4");
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
  }
  return value;
}
HW_FN void store_matrix(uint32_t row_address, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(v0), "r"(v1), "r"(v2), "r"(v3)
      : "memory");
}

/// Volatile: other threads write it.
template <class T>
class Cell {
 public:
  HW_FN T load() const { return *const_cast<const volatile T*>(&value_); }
  HW_FN void store(T value) { *const_cast<volatile T*>(&value_) = value; }

 private:
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  T value_;
};
template <class T>
HW_FN uint32_t address(const Cell<T>& cell) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(&cell));
}

namespace ptx {

template <class T>
constexpr bool kOneAccess =
    (sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16) &&
    alignof(T) == sizeof(T) && std::is_trivially_copyable_v<T>;
/// Strong accesses go through integer registers, bit for bit.
template <class T>
constexpr bool kStrong = std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

}  // namespace ptx

HW_FN void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
HW_FN void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Plain accesses: the alignment of T (Vec4, Float4) makes them one instruction of its size.
template <class T>
HW_FN std::remove_const_t<T> ld(Global<T> p) {
  static_assert(ptx::kOneAccess<T>, "2, 4, 8 or 16 bytes, aligned to their size");
  return *p.address();
}
template <class T>
HW_FN void st(Global<T> p, std::type_identity_t<T> value) {
  static_assert(ptx::kOneAccess<T>, "2, 4, 8 or 16 bytes, aligned to their size");
  *p.address() = value;
}

// A strong access is four words of its name: operation, order, scope, type.
#define HW_LOAD(order, scope)                                                                  \
  if constexpr (sizeof(T) == 4) {                                                              \
    uint32_t v;                                                                                \
    asm volatile("ld." order "." scope ".global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); \
    return v;                                                                                  \
  } else {                                                                                     \
    uint64_t v;                                                                                \
    asm volatile("ld." order "." scope ".global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); \
    return v;                                                                                  \
  }
#define HW_STORE(order, scope)                                           \
  if constexpr (sizeof(T) == 4) {                                        \
    asm volatile("st." order "." scope ".global.b32 [%0], %1;" ::"l"(p), \
                 "r"(static_cast<uint32_t>(value))                       \
                 : "memory");                                            \
  } else {                                                               \
    asm volatile("st." order "." scope ".global.b64 [%0], %1;" ::"l"(p), \
                 "l"(static_cast<uint64_t>(value))                       \
                 : "memory");                                            \
  }
#define HW_ADD(order, scope)                                             \
  if constexpr (sizeof(T) == 4) {                                        \
    uint32_t v;                                                          \
    asm volatile("atom.add." order "." scope ".global.u32 %0, [%1], %2;" \
                 : "=r"(v)                                               \
                 : "l"(p), "r"(static_cast<uint32_t>(value))             \
                 : "memory");                                            \
    return v;                                                            \
  } else {                                                               \
    uint64_t v;                                                          \
    asm volatile("atom.add." order "." scope ".global.u64 %0, [%1], %2;" \
                 : "=l"(v)                                               \
                 : "l"(p), "l"(static_cast<uint64_t>(value))             \
                 : "memory");                                            \
    return v;                                                            \
  }
#define HW_AT_SCOPE(access, order)                  \
  if constexpr (kScope == Scope::kSys) {            \
    access(order, "sys")                            \
  } else if constexpr (kScope == Scope::kGpu) {     \
    access(order, "gpu")                            \
  } else if constexpr (kScope == Scope::kCluster) { \
    access(order, "cluster")                        \
  } else {                                          \
    access(order, "cta")                            \
  }

namespace ptx {

template <Order kOrder, Scope kScope, class T>
HW_FN auto load(const T* p) {
  if constexpr (kOrder == Order::kAcquire) {
    HW_AT_SCOPE(HW_LOAD, "acquire")
  } else {
    HW_AT_SCOPE(HW_LOAD, "relaxed")
  }
}
template <Order kOrder, Scope kScope, class T>
HW_FN void store(T* p, T value) {
  if constexpr (kOrder == Order::kRelease) {
    HW_AT_SCOPE(HW_STORE, "release")
  } else {
    HW_AT_SCOPE(HW_STORE, "relaxed")
  }
}
template <Order kOrder, Scope kScope, class T>
HW_FN auto add(T* p, T value) {
  if constexpr (kOrder == Order::kAcqRel) {
    HW_AT_SCOPE(HW_ADD, "acq_rel")
  } else if constexpr (kOrder == Order::kRelease) {
    HW_AT_SCOPE(HW_ADD, "release")
  } else if constexpr (kOrder == Order::kAcquire) {
    HW_AT_SCOPE(HW_ADD, "acquire")
  } else {
    HW_AT_SCOPE(HW_ADD, "relaxed")
  }
}

}  // namespace ptx
#undef HW_AT_SCOPE
#undef HW_ADD
#undef HW_STORE
#undef HW_LOAD

template <Order kOrder, Scope kScope, class T>
HW_FN std::remove_const_t<T> ld(Global<T> p) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kAcquire);
  static_assert(ptx::kStrong<T>, "an integer of 4 or 8 bytes");
  return static_cast<std::remove_const_t<T>>(ptx::load<kOrder, kScope>(p.address()));
}
template <Order kOrder, Scope kScope, class T>
HW_FN void st(Global<T> p, std::type_identity_t<T> value) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kRelease);
  static_assert(ptx::kStrong<T>, "an integer of 4 or 8 bytes");
  ptx::store<kOrder, kScope, T>(p.address(), value);
}
template <Order kOrder, Scope kScope, class T>
HW_FN T add(Global<T> p, std::type_identity_t<T> value) {
  static_assert(ptx::kStrong<T>, "an integer of 4 or 8 bytes");
  return static_cast<T>(ptx::add<kOrder, kScope, T>(p.address(), value));
}
template <Scope kScope>
HW_FN void fence() {
  if constexpr (kScope == Scope::kSys) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  } else if constexpr (kScope == Scope::kGpu) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  } else if constexpr (kScope == Scope::kCluster) {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
  }
}
template <Order kOrder, Scope kScope>
HW_FN void wait_flag(Global<uint32_t> flag, uint32_t value) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kAcquire);
  uint32_t seen = ld<kOrder, kScope>(flag);
  if (static_cast<int32_t>(seen - value) >= 0) return;
  const uint64_t start = ptx::nanoseconds();
  while (static_cast<int32_t>((seen = ld<kOrder, kScope>(flag)) - value) < 0) {
    if (ptx::nanoseconds() - start > ptx::kLocalPatience) {
      ptx::give_up(2, reinterpret_cast<uint64_t>(flag.address()), value, seen);
    }
  }
}

}  // namespace hw
