// SPDX-License-Identifier: Apache-2.0
// mbarriers: a phase, arrivals still missing, bytes still to come.
#pragma once

#include "cuda/hw/model/engine/machine.h"

namespace hw::model {

/// The barrier at `offset` of `cta`. From outside the CTA, and for asynchronous engines, its
/// initialisation must have been fenced.
MBarrier& barrier_at(Cta& cta, uint32_t offset, bool from_outside, const char* what);
/// One arrival that is nobody's: a commit.
void arrive_plain(Cta& cta, uint32_t offset, const Knowledge& known, const char* what);
/// Bytes have arrived.
void deliver(Cta& cta, uint32_t offset, int64_t bytes, const char* what);

}  // namespace hw::model
