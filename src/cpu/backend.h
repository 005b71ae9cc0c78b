// SPDX-License-Identifier: Apache-2.0
// The CPU backend: the design's algorithm with oneDNN products, threads and the memory of a tile row.
#pragma once

#include "head/backend.h"

namespace logitless::cpu {

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  Machine machine(int threads) const override;
  void statistics(const LocalCall& call, const LocalStatistics& out,
                  const TensorView& stash) const override;
  void gradients(const LocalCall& call, const Saved& saved, const Upstream& upstream,
                 const LocalGradients& out) const override;
};

}  // namespace logitless::cpu
