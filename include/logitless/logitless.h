// SPDX-License-Identifier: Apache-2.0
// Everything a C++ user needs. The flat C API is in logitless/c_api.h.
#pragma once

#include "logitless/context.h"  // IWYU pragma: export
#include "logitless/error.h"    // IWYU pragma: export
#include "logitless/group.h"    // IWYU pragma: export
#include "logitless/head.h"     // IWYU pragma: export
#include "logitless/plan.h"     // IWYU pragma: export
#include "logitless/problem.h"  // IWYU pragma: export
#include "logitless/tensor.h"   // IWYU pragma: export
