// SPDX-License-Identifier: Apache-2.0
#include "logitless/context.h"

#include <new>
#include <string>

#include "head/backend.h"
#include "head/context_state.h"
#include "plan/cpu_plan.h"
#include "plan/cpu_tiles.h"

namespace logitless {

namespace {

std::string describe(const Capacity& capacity) {
  return std::to_string(capacity.tokens) + " tokens x " + std::to_string(capacity.hidden) +
         " hidden x " + std::to_string(capacity.vocab_rows) + " vocabulary rows of " +
         to_string(capacity.dtype);
}

void check_capacity(const Capacity& capacity) {
  if (capacity.tokens >= 0 && capacity.hidden >= 1 && capacity.vocab_rows >= 1) return;
  throw Error(
      ErrorKind::kValue,
      "capacity: expected tokens >= 0, hidden >= 1 and vocab_rows >= 1, got " + describe(capacity));
}

Header header_of(const Capacity& capacity) {
  Header header;
  header.tokens = header.x_tokens = capacity.tokens;
  header.hidden = capacity.hidden;
  header.vocab_rows = capacity.vocab_rows;
  set_text(header.dtype, to_string(capacity.dtype));
  return header;
}

}  // namespace

std::byte* Workspace::reserve(int64_t bytes) {
  if (bytes > bytes_) {
    release();
    auto* memory = static_cast<std::byte*>(
        ::operator new(static_cast<size_t>(bytes), std::align_val_t{64}, std::nothrow));
    if (memory == nullptr) {
      throw Error(ErrorKind::kMemory,
                  "workspace: expected to allocate " + std::to_string(bytes) + " bytes, got none");
    }
    memory_.reset(memory);
    bytes_ = bytes;
  }
  return memory_.get();
}

void Workspace::release() {
  memory_.reset();
  bytes_ = 0;
}

ContextState::ContextState(std::shared_ptr<Group> members, int wanted_threads)
    : group(std::move(members)), threads(wanted_threads) {
  if (!group) throw Error(ErrorKind::kValue, "group: expected a group, got null");
  if (threads < 0) {
    throw Error(ErrorKind::kValue, "threads: expected at least 0, got " + std::to_string(threads));
  }
}

Machine ContextState::machine(const Device& device) const {
  return backend_for(device).machine(threads);
}

int64_t ContextState::capacity_bytes(const Capacity& capacity) const {
  Problem problem{.tokens = capacity.tokens,
                  .hidden = capacity.hidden,
                  .vocab_rows = capacity.vocab_rows,
                  .vocab_start = 0,
                  .vocab_size = capacity.vocab_rows,
                  .dtype = capacity.dtype,
                  .ranks = group->size()};
  return cpu::capacity_bytes(problem, machine(Device{}));
}

void ContextState::make_room(const Plan& plan) {
  const int64_t bytes = plan.workspace_bytes();
  if (configured) {
    const Problem& p = plan.problem;
    const Capacity call{p.tokens, p.hidden, p.vocab_rows, p.dtype};
    const bool fits = call.tokens <= configured->tokens && call.hidden <= configured->hidden &&
                      call.vocab_rows <= configured->vocab_rows && call.dtype == configured->dtype;
    if (!fits || bytes > workspace.bytes()) {
      throw Error(ErrorKind::kState, "workspace: configured for at most " + describe(*configured) +
                                         " (" + std::to_string(workspace.bytes()) +
                                         " bytes), got a call with " + describe(call) + " (" +
                                         std::to_string(bytes) + " bytes)");
    }
  }
  workspace.reserve(bytes);
}

Agreement ContextState::agree(const char* phase, bool assume_uniform,
                              const std::function<Header()>& describe) {
  Header mine;
  try {
    try {
      mine = describe();
    } catch (const std::bad_alloc&) {
      throw Error(ErrorKind::kMemory, "out of memory");
    }
  } catch (const Error& failure) {
    // Peers that vouch for this call exchange no header; one among their data would break Gloo.
    if (assume_uniform) throw;
    throw announce(*group, phase, failure);
  }
  set_text(mine.phase, phase);
  if (assume_uniform && known_ && known_header_->vocab_rows == mine.vocab_rows &&
      known_header_->vocab_start == mine.vocab_start &&
      known_header_->vocab_size == mine.vocab_size && known_header_->tokens == mine.tokens &&
      known_header_->x_tokens == mine.x_tokens &&
      known_header_->sequence_parallel == mine.sequence_parallel) {
    Agreement agreement = *known_;
    agreement.any_wants_input_grad = mine.wants_input_grad != 0;
    agreement.least_target = mine.least_target;
    agreement.most_target = mine.most_target;
    return agreement;
  }
  Agreement agreement = logitless::agree(*group, mine);
  known_ = agreement;
  known_header_ = mine;
  return agreement;
}

void ContextState::run(const std::function<void()>& body) {
  try {
    try {
      body();
    } catch (const std::bad_alloc&) {
      throw Error(ErrorKind::kMemory, "out of memory");
    }
  } catch (const Error& failure) {
    group->abort(failure);
    throw;
  } catch (const std::exception& failure) {
    group->abort(Error(ErrorKind::kState, failure.what()));
    throw;
  }
}

Context::Context(std::shared_ptr<Group> group, int threads)
    : state_(std::make_unique<ContextState>(std::move(group), threads)) {}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;

int64_t Context::query(const Capacity& capacity) const {
  const std::lock_guard lock(state_->mutex);
  check_capacity(capacity);
  if (state_->configured && *state_->configured != capacity) {
    throw Error(ErrorKind::kState, "workspace: configured for " + describe(*state_->configured) +
                                       ", got a query for " + describe(capacity));
  }
  return state_->capacity_bytes(capacity);
}

void Context::configure(const Capacity& capacity) {
  const std::lock_guard lock(state_->mutex);
  state_->agree("configure", false, [&] {
    check_capacity(capacity);
    if (state_->configured && *state_->configured != capacity) {
      throw Error(ErrorKind::kState, "workspace: configured for " + describe(*state_->configured) +
                                         ", got a configuration for " + describe(capacity));
    }
    state_->workspace.reserve(state_->capacity_bytes(capacity));
    return header_of(capacity);
  });
  state_->configured = capacity;
}

void Context::release() {
  const std::lock_guard lock(state_->mutex);
  state_->workspace.release();
  state_->configured.reset();
}

}  // namespace logitless
