// SPDX-License-Identifier: Apache-2.0
#include "logitless/plan.h"
#include "plan/cpu_tiles.h"

namespace logitless {

int Layout::add(std::string name, int64_t bytes) {
  constexpr int64_t kAlignment = 64;  // one cache line: no two workers' regions share one
  regions_.push_back({std::move(name), bytes_, bytes});
  bytes_ += round_up(bytes, kAlignment);
  return static_cast<int>(regions_.size()) - 1;
}

}  // namespace logitless
