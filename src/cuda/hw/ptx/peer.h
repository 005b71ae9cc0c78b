// SPDX-License-Identifier: Apache-2.0
// Other GPUs (PTX ISA, "multimem", "fence.proxy.alias"; NVSHMEM for messages).
#pragma once

#include "cuda/hw/ptx/memory.h"

#if defined(LOGITLESS_NVSHMEM)
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

namespace hw {

HW_FN Float4 multimem_load_add(Multicast<float> p) {
  Float4 v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p.address())
               : "memory");
  return v;
}
HW_FN Vec4 multimem_load_add(Multicast<Bf16> p) {
  Vec4 v;
  asm volatile(
      "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p.address())
      : "memory");
  return v;
}
template <class T>
HW_FN void multimem_store(Multicast<T> p, Vec4 value) {
  // The type is that of the registers; bits travel as they are.
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p.address()),
               "f"(__uint_as_float(value.x)), "f"(__uint_as_float(value.y)),
               "f"(__uint_as_float(value.z)), "f"(__uint_as_float(value.w))
               : "memory");
}
template <Order kOrder, Scope kScope>
HW_FN void multimem_add(Multicast<uint32_t> p, uint32_t value) {
  static_assert(kOrder == Order::kRelaxed || kOrder == Order::kRelease);
  static_assert(kScope == Scope::kGpu || kScope == Scope::kSys);
  if constexpr (kOrder == Order::kRelease && kScope == Scope::kSys) {
    asm volatile("multimem.red.release.sys.global.add.u32 [%0], %1;" ::"l"(p.address()), "r"(value)
                 : "memory");
  } else if constexpr (kOrder == Order::kRelease) {
    asm volatile("multimem.red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p.address()), "r"(value)
                 : "memory");
  } else if constexpr (kScope == Scope::kSys) {
    asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p.address()), "r"(value)
                 : "memory");
  } else {
    asm volatile("multimem.red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p.address()), "r"(value)
                 : "memory");
  }
}
HW_FN void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

/// NVSHMEM's message. Its device code is relocatable and never linked into kernels with wgmma: a file
/// that sends defines LOGITLESS_NVSHMEM.
template <class T, class U>
HW_FN void put_signal(Global<T> destination, Global<U> source, uint32_t bytes,
                      Global<uint64_t> signal, uint64_t value, int peer) {
#if defined(LOGITLESS_NVSHMEM)
  nvshmemx_putmem_signal_nbi_warp(destination.address(), source.address(), bytes, signal.address(),
                                  value, NVSHMEM_SIGNAL_SET, peer);
#else
  static_assert(sizeof(T) == 0, "put_signal needs NVSHMEM: compile with LOGITLESS_NVSHMEM");
#endif
}

namespace ptx {

/// The first to give up stops the others and writes the report. It is known by raising the flag: a
/// compare-and-swap in the host's memory is not atomic over PCIe.
HW_FN void give_up_on_peer(const Abort& abort, const PeerWait& who, uint32_t expected,
                           uint32_t seen) {
  PeerFailure* failure = abort.failure.address();
  if (atomicExch(abort.raised.address(), 1U) != 0 || failure == nullptr) return;
  failure->rank = who.rank;
  failure->peer = who.peer;
  failure->what = who.what;
  failure->expected = expected;
  failure->seen = seen;
  store<Order::kRelease, Scope::kSys, uint32_t>(&failure->state, 1);
}

}  // namespace ptx

template <Scope kScope = Scope::kSys, class T>
HW_FN bool wait_peer(Global<T> flag, std::type_identity_t<T> value, const Abort& abort,
                     const PeerWait& who) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Count = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  using Signed = std::make_signed_t<Count>;
  constexpr uint32_t kPollsPerLook = 32;  // at the clock, and at what others have raised
  uint64_t start = 0;
  for (uint32_t polls = 0;; ++polls) {
    const auto seen = static_cast<Count>(ld<Order::kAcquire, kScope>(flag));
    // Counted modulo its size, like every flag.
    if (static_cast<Signed>(seen - static_cast<Count>(value)) >= 0) return true;
    if (polls % kPollsPerLook != kPollsPerLook - 1) continue;
    if (ld<Order::kRelaxed, Scope::kGpu>(abort.raised) != 0) return false;
    const uint64_t now = ptx::nanoseconds();
    if (start == 0) start = now;
    if (now - start > abort.patience_ns) {
      ptx::give_up_on_peer(abort, who, static_cast<uint32_t>(value), static_cast<uint32_t>(seen));
      return false;
    }
    __nanosleep(200);
  }
}

}  // namespace hw
