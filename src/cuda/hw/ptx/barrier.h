// SPDX-License-Identifier: Apache-2.0
// mbarriers (PTX ISA, "mbarrier"), and waits that end: a local wait that lasts too long is a bug of the
// kernel. It leaves a record in host memory, which outlives the trap, and traps.
#pragma once

#include "cuda/hw/ptx/thread.h"

namespace hw {

/// Who waited for what when a kernel trapped; hw::launch_failure() turns it into a sentence.
struct LocalFailure {
  uint32_t state;  // 0: nothing happened; 1: being written; 2: complete
  uint32_t kind;   // 1: an mbarrier; 2: a flag
  uint32_t block, thread;
  uint32_t expected, seen;  // parity, or the flag's value
  uint64_t place;           // the barrier's offset in Smem, or the flag's address
};

namespace ptx {

/// In nanoseconds. No tile takes a millisecond: whoever waits this long waits for ever.
inline constexpr uint64_t kLocalPatience = 20'000'000'000;

/// Where the record goes; set by launch, one variable for each source file. Null: the trap says nothing.
static __device__ LocalFailure* local_failure = nullptr;
/// Who writes the record. Not in host memory: over PCIe a compare-and-swap there is not atomic.
static __device__ uint32_t failure_claimed = 0;

/// Where Smem lies: the only dynamic shared memory there is.
HW_FN unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char shared[];
  return shared;
}
HW_FN uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
/// No call and no stack: a wgmma kernel with a call in it would lose its pipelining.
HW_FN void give_up(uint32_t kind, uint64_t place, uint32_t expected, uint32_t seen) {
  LocalFailure* record = local_failure;
  if (record != nullptr && atomicCAS(&failure_claimed, 0U, 1U) == 0) {
    record->kind = kind;
    record->block = blockIdx.x;
    record->thread = threadIdx.x;
    record->expected = expected;
    record->seen = seen;
    record->place = place;
    asm volatile("st.release.sys.global.u32 [%0], 2;" ::"l"(&record->state) : "memory");
  } else if (record != nullptr) {
    for (int i = 0; i < 1000; ++i) __nanosleep(1000);  // a trap now would end the writer as well
  }
  __trap();
}
template <Scope kScope>
HW_FN bool try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  if constexpr (kScope == Scope::kCta) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
  return done != 0;
}

}  // namespace ptx

HW_FN uint32_t address(const Barrier& barrier) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
}
/// The rank of a CTA stands in bits 24 and up.
HW_FN uint32_t leader_address(uint32_t address) { return address & 0xFEFFFFFFU; }
HW_FN uint32_t cta_address(uint32_t address, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

HW_FN void barrier_init(Barrier& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals)
               : "memory");
}
HW_FN void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

HW_FN void arrive(Barrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
template <Scope kScope = Scope::kCta>
HW_FN void arrive_at(uint32_t barrier) {
  static_assert(kScope == Scope::kCta || kScope == Scope::kCluster);
  if constexpr (kScope == Scope::kCta) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
  } else {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
  }
}
HW_FN void arrive_expect(Barrier& barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
               "r"(bytes)
               : "memory");
}
HW_FN void arrive_expect_at(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
HW_FN void expect(Barrier& barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)),
               "r"(bytes)
               : "memory");
}
template <Scope kScope = Scope::kCta>
HW_FN void wait(Barrier& barrier, uint32_t parity) {
  static_assert(kScope == Scope::kCta || kScope == Scope::kCluster);
  const uint32_t at = address(barrier);
  if (ptx::try_wait<kScope>(at, parity)) return;
  const uint64_t start = ptx::nanoseconds();
  while (!ptx::try_wait<kScope>(at, parity)) {
    if (ptx::nanoseconds() - start > ptx::kLocalPatience) {
      const auto smem = static_cast<uint32_t>(__cvta_generic_to_shared(ptx::shared_memory()));
      // The phase with this parity is open: the last that completed has the other.
      ptx::give_up(1, at - smem, parity, parity ^ 1);
    }
  }
}
template <Scope kScope = Scope::kCta>
HW_FN bool test(Barrier& barrier, uint32_t parity) {
  uint32_t done;
  if constexpr (kScope == Scope::kCta) {
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(address(barrier)), "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address(barrier)), "r"(parity)
        : "memory");
  }
  return done != 0;
}
HW_FN void store_async(uint32_t address, uint32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(value), "r"(barrier)
      : "memory");
}

}  // namespace hw
