// SPDX-License-Identifier: Apache-2.0
// Layer (a): one rank's statistics and partial gradients, on one kind of device.
#pragma once

#include "logitless/head.h"
#include "logitless/plan.h"
#include "plan/regions.h"

namespace logitless {

// One rank's part of a call, checked and agreed. x is the whole batch [M, H].
struct LocalCall {
  const Plan& plan;
  Arena arena;
  TensorView x;
  TensorView weight;
  TensorView target;
  TensorView temperature;  // absent: `tau`
  float tau = 1.0F;
  int64_t ignore_index = -100;
};

// Of this rank's shard, [4, M] float32: k, S (without the target), T = Σ E·(u − k) (likewise), and the
// target's exponent u_y − k where this rank owns it.
struct LocalStatistics {
  float* anchor;
  float* sum;
  float* moment;
  float* target_exponent;
};

// dX: either the finished gradient (one rank) or this rank's fp32 part.
struct LocalGradients {
  TensorView x;         // absent, or [M, H] of x's dtype: the finished dX
  bool x_part = false;  // leave this rank's part of dX in the region kInputGradSum, [M, H] float32
  TensorView weight;    // absent, or [V_r, H]
  bool accumulate_weight = false;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual Machine machine(int threads) const = 0;
  virtual void statistics(const LocalCall& call, const LocalStatistics& out,
                          const TensorView& stash) const = 0;
  virtual void gradients(const LocalCall& call, const Saved& saved, const Upstream& upstream,
                         const LocalGradients& out) const = 0;
};

// Throws Error(kUnavailable) with the reason where this build has none for the device.
const Backend& backend_for(const Device& device);

}  // namespace logitless
