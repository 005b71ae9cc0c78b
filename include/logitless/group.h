// SPDX-License-Identifier: Apache-2.0
// The ranks that share one vocabulary. Two collectives are all the generic combiner needs.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "logitless/error.h"
#include "logitless/tensor.h"

namespace logitless {

// Blocks are contiguous and of equal size on every rank. `what` names the exchange in error messages.
// A member that fails must be told to abort(), so that its peers fail too instead of waiting.
class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // all[r] = mine of rank r; `all` holds size() blocks of `bytes`.
  virtual void all_gather(const void* mine, void* all, int64_t bytes, const Device& device,
                          const char* what) = 0;
  // receive[r] = block rank() of rank r's `send`; both hold size() blocks of `bytes`.
  virtual void all_to_all(const void* send, void* receive, int64_t bytes, const Device& device,
                          const char* what) = 0;
  // This rank gives up; the reason reaches the others where the transport can carry it.
  virtual void abort(const Error& reason) noexcept { (void)reason; }
};

// A group of one: its exchanges are copies of nothing.
std::shared_ptr<Group> single_rank();

// `ranks` members in one process, to be used by one thread each. A wait longer than `timeout` throws
// Error(kTimeout) that says who waited for whom. After a time-out or an abort every member's calls fail
// until every member has called reset_thread_group (collective).
std::vector<std::shared_ptr<Group>> make_thread_group(int ranks, std::chrono::milliseconds timeout);
void reset_thread_group(Group& member);

}  // namespace logitless
