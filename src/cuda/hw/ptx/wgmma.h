// SPDX-License-Identifier: Apache-2.0
// Hopper's tensor core (PTX ISA, "Asynchronous warpgroup level matrix instructions").
#pragma once

#include "cuda/hw/ptx/memory.h"

// Elsewhere these functions do not exist, and a kernel that calls them does not compile.
#if !defined(__CUDA_ARCH__) || __CUDA_HAS_ARCH_SPECIFIC(90)
namespace hw {

HW_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
HW_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// The registers pass through, so that no use can move above the wait.
template <int kPending, int kValues>
HW_FN void wgmma_wait(float (&d)[kValues]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  if constexpr (kPending == 0) {
    HW_UNROLL for (int v = 0; v < kValues; ++v) asm volatile("" : "+f"(d[v]));
  }
}

// The names of 32 operands, and the operands themselves.
#define HW_REGISTERS_0                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HW_REGISTERS_32                                                              \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HW_REGISTERS_64                                                              \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HW_REGISTERS_96                                                                          \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HW_VALUES_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define HW_VALUES_32(i)                                                              \
  HW_VALUES_4(i), HW_VALUES_4((i) + 4), HW_VALUES_4((i) + 8), HW_VALUES_4((i) + 12), \
      HW_VALUES_4((i) + 16), HW_VALUES_4((i) + 20), HW_VALUES_4((i) + 24), HW_VALUES_4((i) + 28)
// After kN / 2 registers come the operands, the predicate and the majors.
#define HW_WGMMA(n, registers, at_a, at_b, at_p, at_major_a, at_major_b, ...)                    \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" at_p                                           \
               ", 0; "                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" registers "}, %" at_a \
               ", %" at_b ", p, 1, 1, %" at_major_a ", %" at_major_b "; }"                       \
               : __VA_ARGS__                                                                     \
               : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)),                         \
                 "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB)))

template <int kN, Major kA = Major::kK, Major kB = Major::kK>
HW_FN void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kN % 64 == 0 && kN >= 64 && kN <= 256,
                "instructions exist here for N = 64 ... 256");
  if constexpr (kN == 64) {
    HW_WGMMA("64", HW_REGISTERS_0, "32", "33", "34", "35", "36", HW_VALUES_32(0));
  } else if constexpr (kN == 128) {
    HW_WGMMA("128", HW_REGISTERS_0 ", " HW_REGISTERS_32, "64", "65", "66", "67", "68",
             HW_VALUES_32(0), HW_VALUES_32(32));
  } else if constexpr (kN == 192) {
    HW_WGMMA("192", HW_REGISTERS_0 ", " HW_REGISTERS_32 ", " HW_REGISTERS_64, "96", "97", "98",
             "99", "100", HW_VALUES_32(0), HW_VALUES_32(32), HW_VALUES_32(64));
  } else {
    HW_WGMMA("256", HW_REGISTERS_0 ", " HW_REGISTERS_32 ", " HW_REGISTERS_64 ", " HW_REGISTERS_96,
             "128", "129", "130", "131", "132", HW_VALUES_32(0), HW_VALUES_32(32), HW_VALUES_32(64),
             HW_VALUES_32(96));
  }
}

#undef HW_WGMMA
#undef HW_VALUES_32
#undef HW_VALUES_4
#undef HW_REGISTERS_96
#undef HW_REGISTERS_64
#undef HW_REGISTERS_32
#undef HW_REGISTERS_0

}  // namespace hw
#endif
