// SPDX-License-Identifier: Apache-2.0
#include "cpu/workers.h"

#include <sched.h>

#include <algorithm>
#include <string>
#include <system_error>

#include "cpu/products.h"
#include "logitless/error.h"

namespace logitless::cpu {

// Delegates, so that the destructor joins the threads that were started where one cannot be.
Workers::Workers(int count) : Workers() {
  threads_.reserve(static_cast<size_t>(count));
  try {
    for (int worker = 0; worker < count; ++worker) {
      threads_.emplace_back([this, worker] { serve(worker); });
    }
  } catch (const std::system_error& reason) {
    throw Error(ErrorKind::kUnavailable, "threads: expected " + std::to_string(count) +
                                             " to start, got " + std::to_string(threads_.size()) +
                                             " (" + reason.what() + ")");
  }
}

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  posted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::run(int64_t tasks, const std::function<void(int64_t, int)>& work) {
  if (tasks <= 0) return;
  std::unique_lock lock(mutex_);
  work_ = &work;
  tasks_ = tasks;
  next_ = 0;
  failure_ = nullptr;
  busy_ = count();
  ++round_;
  posted_.notify_all();
  finished_.wait(lock, [this] { return busy_ == 0; });
  work_ = nullptr;
  if (failure_) std::rethrow_exception(failure_);
}

void Workers::serve(int worker) {
  use_one_product_thread();
  uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [&] { return closing_ || round_ != seen; });
      if (closing_) return;
      seen = round_;
    }
    drain(worker);
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) finished_.notify_one();
  }
}

void Workers::drain(int worker) {
  for (;;) {
    int64_t task = 0;
    {
      // A task is a matrix product of a millisecond: a lock per task costs nothing.
      const std::lock_guard lock(mutex_);
      if (failure_ || next_ == tasks_) return;
      task = next_++;
    }
    try {
      (*work_)(task, worker);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      return;
    }
  }
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace logitless::cpu
