// SPDX-License-Identifier: Apache-2.0
// Forward on one rank: anchors, exponentials, their sums per token, and the stash.
#pragma once

#include "cpu/products.h"
#include "cpu/workers.h"
#include "head/backend.h"

namespace logitless::cpu {

void compute_statistics(const LocalCall& call, Workers& workers, Products& products,
                        const LocalStatistics& out, const TensorView& stash);

}  // namespace logitless::cpu
