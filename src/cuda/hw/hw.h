// SPDX-License-Identifier: Apache-2.0
// The instruction layer: one function, one instruction, no policy. Kernels include this file and
// nothing else of CUDA, so that one source runs on a GPU (ptx/, by nvcc) and on a CPU (model/, by
// any C++20 compiler). The two folders mirror each other file for file.
//
// A kernel is a type:
//
//   struct Product {
//     struct Params { ... };                     // plain data; one __grid_constant__ argument
//     struct Smem { ... };                       // the whole shared memory of a CTA
//     static constexpr int kThreads = 384, kCluster = 2;
//     static HW_FN void run(const Params& p, Smem& s);
//     static void describe(hw::Names& names);    // optional: names of Smem's parts, for reports
//   };
#pragma once

#include "cuda/hw/types.h"
// types.h first: the others build on it
#include "cuda/hw/descriptors.h"
#include "cuda/hw/layouts.h"
#include "cuda/hw/names.h"

#if defined(__CUDACC__)
#include "cuda/hw/ptx/thread.h"
// thread.h first: the others build on it
#include "cuda/hw/ptx/barrier.h"
#include "cuda/hw/ptx/copy.h"
#include "cuda/hw/ptx/memory.h"
#include "cuda/hw/ptx/numbers.h"
#include "cuda/hw/ptx/peer.h"
#include "cuda/hw/ptx/tcgen05.h"
#include "cuda/hw/ptx/wgmma.h"
// launch.h last: it knows them all
#include "cuda/hw/ptx/launch.h"
#else
#include "cuda/hw/model/thread.h"
// thread.h first: the others build on it
#include "cuda/hw/model/barrier.h"
#include "cuda/hw/model/copy.h"
#include "cuda/hw/model/memory.h"
#include "cuda/hw/model/numbers.h"
#include "cuda/hw/model/peer.h"
#include "cuda/hw/model/tcgen05.h"
#include "cuda/hw/model/wgmma.h"
// launch.h last: it knows them all
#include "cuda/hw/model/launch.h"
#endif
