// SPDX-License-Identifier: Apache-2.0
// Threads that meet: warps, CTAs, named barriers, clusters.
#pragma once

#include "cuda/hw/model/engine/report.h"
#include "cuda/hw/model/engine/scheduler.h"

namespace hw::model {

struct WarpCall {
  WarpOp op;
  const char* what;
  int argument = 0;
  bool aligned = true;  // PTX .aligned: the lanes must have come the same way
  uint32_t in = 0;
  uint32_t* registers = nullptr;
};

/// Waits until every live lane of the warp is here; the last one runs `last(rendezvous)`, then all go
/// on, knowing what each of them knew. Returns this lane's `out`.
uint32_t meet_warp(const WarpCall& call, const std::function<void(Rendezvous&)>& last = {});

/// What a thread has stored and not published becomes its CTA's.
void publish_to_cta(Thread& thread);

}  // namespace hw::model
