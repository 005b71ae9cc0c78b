// SPDX-License-Identifier: Apache-2.0
// Blackwell's tensor core and its memory (PTX ISA, "TensorCore 5th generation family instructions").
#pragma once

#include "cuda/hw/ptx/memory.h"

// Elsewhere these functions do not exist, and a kernel that calls them does not compile.
#if !defined(__CUDA_ARCH__) || __CUDA_HAS_ARCH_FAMILY_SPECIFIC(100)
namespace hw {

// The instructions of both CTA groups differ in one digit.
#define HW_BY_GROUP(before, after, ...)                                  \
  do {                                                                   \
    if constexpr (kGroup == CtaGroup::kOne) {                            \
      asm volatile(before "cta_group::1" after::__VA_ARGS__ : "memory"); \
    } else {                                                             \
      asm volatile(before "cta_group::2" after::__VA_ARGS__ : "memory"); \
    }                                                                    \
  } while (false)

template <CtaGroup kGroup>
HW_FN void tmem_alloc(Cell<uint32_t>& destination, uint32_t columns) {
  HW_BY_GROUP("tcgen05.alloc.", ".sync.aligned.shared::cta.b32 [%0], %1;",
              "r"(address(destination)), "r"(columns));
}
template <CtaGroup kGroup>
HW_FN void tmem_relinquish() {
  HW_BY_GROUP("tcgen05.relinquish_alloc_permit.", ".sync.aligned;");
}
template <CtaGroup kGroup>
HW_FN void tmem_dealloc(uint32_t base, uint32_t columns) {
  HW_BY_GROUP("tcgen05.dealloc.", ".sync.aligned.b32 %0, %1;", "r"(base), "r"(columns));
}
template <CtaGroup kGroup>
HW_FN void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate) {
  HW_BY_GROUP("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.",
              ".kind::f16 [%0], %1, %2, %3, p; }", "r"(d), "l"(a), "l"(b), "r"(instruction),
              "r"(static_cast<uint32_t>(accumulate)));
}
template <CtaGroup kGroup>
HW_FN void tcgen05_commit(Barrier& barrier) {
  HW_BY_GROUP("tcgen05.commit.", ".mbarrier::arrive::one.shared::cluster.b64 [%0];",
              "r"(address(barrier)));
}
template <CtaGroup kGroup>
HW_FN void tcgen05_commit_multicast(Barrier& barrier, uint16_t ctas) {
  HW_BY_GROUP("tcgen05.commit.",
              ".mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;",
              "r"(address(barrier)), "h"(ctas));
}
#undef HW_BY_GROUP
HW_FN void tcgen05_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
HW_FN void tcgen05_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

#define HW_OUT_8(i)                                                                     \
  "=r"(values[i]), "=r"(values[(i) + 1]), "=r"(values[(i) + 2]), "=r"(values[(i) + 3]), \
      "=r"(values[(i) + 4]), "=r"(values[(i) + 5]), "=r"(values[(i) + 6]), "=r"(values[(i) + 7])
#define HW_OUT_32(i) HW_OUT_8(i), HW_OUT_8((i) + 8), HW_OUT_8((i) + 16), HW_OUT_8((i) + 24)
#define HW_IN_8(i)                                                                  \
  "r"(values[i]), "r"(values[(i) + 1]), "r"(values[(i) + 2]), "r"(values[(i) + 3]), \
      "r"(values[(i) + 4]), "r"(values[(i) + 5]), "r"(values[(i) + 6]), "r"(values[(i) + 7])
#define HW_IN_32(i) HW_IN_8(i), HW_IN_8((i) + 8), HW_IN_8((i) + 16), HW_IN_8((i) + 24)

template <int kColumns>
HW_FN void tmem_ld(uint32_t address, uint32_t (&values)[kColumns]) {
  static_assert(kColumns == 8 || kColumns == 16 || kColumns == 32 || kColumns == 64);
  if constexpr (kColumns == 8) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x8.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, [%8];"
        : HW_OUT_8(0)
        : "r"(address)
        : "memory");
  } else if constexpr (kColumns == 16) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, [%16];"
        : HW_OUT_8(0), HW_OUT_8(8)
        : "r"(address)
        : "memory");
  } else if constexpr (kColumns == 32) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, [%32];"
        : HW_OUT_32(0)
        : "r"(address)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x64.b32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, [%64];"
        : HW_OUT_32(0), HW_OUT_32(32)
        : "r"(address)
        : "memory");
  }
}
/// The registers pass through, so that no use can move above the wait.
template <int kColumns>
HW_FN void tmem_wait_ld(uint32_t (&values)[kColumns]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  HW_UNROLL for (int i = 0; i < kColumns; ++i) asm volatile("" : "+r"(values[i]));
}
template <int kColumns>
HW_FN void tmem_st(uint32_t address, const uint32_t (&values)[kColumns]) {
  static_assert(kColumns == 8 || kColumns == 16 || kColumns == 32 || kColumns == 64);
  if constexpr (kColumns == 8) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {"
        "%1, %2, %3, %4, %5, %6, %7, %8"
        "};" ::"r"(address),
        HW_IN_8(0)
        : "memory");
  } else if constexpr (kColumns == 16) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {"
        "%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16"
        "};" ::"r"(address),
        HW_IN_8(0), HW_IN_8(8)
        : "memory");
  } else if constexpr (kColumns == 32) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], {"
        "%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32"
        "};" ::"r"(address),
        HW_IN_32(0)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x64.b32 [%0], {"
        "%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, "
        "%33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "
        "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64"
        "};" ::"r"(address),
        HW_IN_32(0), HW_IN_32(32)
        : "memory");
  }
}
HW_FN void tmem_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

#undef HW_IN_32
#undef HW_IN_8
#undef HW_OUT_32
#undef HW_OUT_8

}  // namespace hw
#endif
