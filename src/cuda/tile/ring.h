// SPDX-License-Identifier: Apache-2.0
// A ring of buffers between those who fill and those who drain. Included by kernels.
#pragma once

#include "cuda/hw/hw.h"

namespace logitless::tile {

/// A pair of barriers for each of kStages buffers, named by what they announce:
///
///   producer: wait(finished) -> fill  -> arrive(arrived)
///   consumer: wait(arrived)  -> drain -> arrive(finished)
template <int kStages>
struct Ring {
  hw::Barrier arrived[kStages];
  hw::Barrier finished[kStages];

  HW_FN void init(uint32_t arrivals, uint32_t finishes) {
    HW_UNROLL for (int stage = 0; stage < kStages; ++stage) {
      hw::barrier_init(arrived[stage], arrivals);
      hw::barrier_init(finished[stage], finishes);
    }
  }
  /// Names for a ring that is member `ring` of Smem: "inputs.arrived", "inputs.finished".
  template <class S>
  static void describe(hw::Names& names, const char* arrived, const char* finished,
                       Ring S::* ring) {
    const size_t base = hw::Names::offset_of(ring);
    names.add(arrived, &Ring::arrived, base);
    names.add(finished, &Ring::finished, base);
  }
};

/// Where one side of a ring stands. A producer starts one phase ahead: a fresh barrier counts as having
/// completed the phase before its first, so that its first pass never blocks.
template <int kStages>
struct RingState {
  int stage = 0;
  uint32_t phase = 0;

  HW_FN static RingState producer() { return {0, 1}; }
  HW_FN static RingState consumer() { return {0, 0}; }
  HW_FN void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace logitless::tile
