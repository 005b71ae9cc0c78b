// SPDX-License-Identifier: Apache-2.0
// A context is one rank's membership in a group, its threads, and its workspace.
#pragma once

#include <cstdint>
#include <memory>

#include "logitless/group.h"
#include "logitless/plan.h"

namespace logitless {

// The largest call that a configured context takes.
struct Capacity {
  int64_t tokens = 0;
  int64_t hidden = 0;
  int64_t vocab_rows = 0;
  DType dtype = DType::kBFloat16;
  bool operator==(const Capacity&) const = default;
};

class ContextState;

// Calls on one context are serialised; independent contexts run side by side.
// Nothing that backward needs lives in a context, so any number of losses may be in flight.
class Context {
 public:
  // threads = 0: one worker per core this process may run on.
  explicit Context(std::shared_ptr<Group> group = single_rank(), int threads = 0);
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;

  // Exact workspace bytes of a configuration; allocates nothing.
  // Throws Error(kState) printing both where another capacity is reserved already.
  int64_t query(const Capacity& capacity) const;
  // Reserves the workspace. Collective: every rank's call must name the same tokens, hidden size and dtype.
  // Immutable until release(); configuring anything else is an Error(kState) that prints both.
  void configure(const Capacity& capacity);
  // Frees the workspace; the next call sizes its own.
  void release();

  ContextState& state() { return *state_; }

 private:
  std::unique_ptr<ContextState> state_;
};

}  // namespace logitless
