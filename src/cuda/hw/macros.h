// SPDX-License-Identifier: Apache-2.0
// The four words in which the two sides differ.
#pragma once

#if defined(__CUDACC__)
#define HW_FN __device__ __forceinline__  // a function that kernels call
#define HW_BOTH __host__ __device__ constexpr
#define HW_UNROLL _Pragma("unroll")
#define HW_LOOP _Pragma("unroll 1")
#else
#define HW_FN inline
#define HW_BOTH constexpr
#define HW_UNROLL _Pragma("GCC unroll 1")  // unrolling buys the model nothing
#define HW_LOOP
#endif
