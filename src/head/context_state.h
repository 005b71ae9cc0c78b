// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>

#include "comm/agreement.h"
#include "logitless/context.h"
#include "logitless/head.h"

namespace logitless {

// Uninitialised memory on a cache line's boundary.
class Workspace {
 public:
  // At least `bytes`; contents are lost where it grows. Throws Error(kMemory) with the bytes wanted.
  std::byte* reserve(int64_t bytes);
  std::byte* data() const { return memory_.get(); }
  int64_t bytes() const { return bytes_; }
  void release();

 private:
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t bytes_ = 0;
};

class ContextState {
 public:
  ContextState(std::shared_ptr<Group> members, int wanted_threads);

  Machine machine(const Device& device) const;
  int64_t capacity_bytes(const Capacity& capacity) const;
  // Makes room for a call, or says why it does not fit what was configured.
  void make_room(const Plan& plan);

  // Agrees on what `describe` returns, having called it; its Error is announced to the group first.
  // Skips the exchange where the caller vouches for uniform calls and the shards are known.
  Agreement agree(const char* phase, bool assume_uniform, const std::function<Header()>& describe);

  // Runs the part after the agreement: a failure there reaches the peers by abort().
  void run(const std::function<void()>& body);

  std::shared_ptr<Group> group;
  int threads;
  std::mutex mutex;  // one call at a time
  Workspace workspace;
  std::optional<Capacity> configured;

 private:
  std::optional<Header> known_header_;
  std::optional<Agreement> known_;
};

}  // namespace logitless
