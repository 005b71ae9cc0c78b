// SPDX-License-Identifier: Apache-2.0
// Backward on one rank: the stashed columns by two products, the others slice by slice by three.
#pragma once

#include "cpu/products.h"
#include "cpu/workers.h"
#include "head/backend.h"

namespace logitless::cpu {

void compute_gradients(const LocalCall& call, Workers& workers, Products& products,
                       const Saved& saved, const Upstream& upstream, const LocalGradients& out);

}  // namespace logitless::cpu
