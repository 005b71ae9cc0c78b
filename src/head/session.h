// SPDX-License-Identifier: Apache-2.0
// What forward and backward share: the problem behind checked arguments, and the call's last backend.
#pragma once

#include "comm/agreement.h"
#include "head/backend.h"
#include "head/context_state.h"
#include "logitless/head.h"

namespace logitless {

// The problem as one rank sees it. Before the agreement (`agreement` null) it is an upper bound: the whole
// shard is vocabulary.
Problem problem_of(const Group& group, const Inputs& inputs, const Options& options,
                   const Agreement* agreement);

void set_last_backend(const char* name);

}  // namespace logitless
