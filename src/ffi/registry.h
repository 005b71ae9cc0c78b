// SPDX-License-Identifier: Apache-2.0
// Contexts by number, for callers that cannot hold a C++ object.
#pragma once

#include <cstdint>
#include <memory>

#include "logitless/context.h"

namespace logitless::ffi_glue {

// Number 0 always exists: one rank, one worker per core.
int64_t register_context(std::shared_ptr<Group> group, int threads);
std::shared_ptr<Context> find_context(int64_t number);
void forget_context(int64_t number);

}  // namespace logitless::ffi_glue
