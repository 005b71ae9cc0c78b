// SPDX-License-Identifier: Apache-2.0
// What the products of Blackwell's tensor core share with the accesses of its memory.
#pragma once

#include "cuda/hw/model/engine/machine.h"

namespace hw::model {

float* tmem_at(Cta& cta, int lane, int column);
/// All tcgen05 instructions of a CTA use one cta_group.
void check_group(Cta& cta, CtaGroup group, const char* what);
/// A tcgen05 operation after a wait needs fence::after_thread_sync between the two.
void check_fenced(const Thread& thread, const char* what);

}  // namespace hw::model
