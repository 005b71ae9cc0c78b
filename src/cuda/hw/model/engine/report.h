// SPDX-License-Identifier: Apache-2.0
// What the model says when something is wrong.
#pragma once

#include <exception>
#include <string>

#include "cuda/hw/model/engine/machine.h"

namespace hw::model {

[[gnu::format(printf, 1, 2)]] std::string format(const char* text, ...);

/// Ends the run. In a thread: never returns to it. In asynchronous work: throws to the scheduler.
[[noreturn]] void fault(const std::string& what);
struct Abandoned : std::exception {};  // what asynchronous work throws

/// "cluster 0 cta 1 warp 4 lane 3"
std::string name_of(const Thread& thread);
/// "epilogue, product_sm90.h:134"
std::string name_of(const Site& site);
/// "inputs.arrived[2]" for an offset in a CTA's window
std::string shared_name(uint32_t offset);
/// Who waits for what, warp by warp.
std::string deadlock_report();

}  // namespace hw::model
