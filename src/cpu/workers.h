// SPDX-License-Identifier: Apache-2.0
// Threads that live as long as one call: nothing survives it, so a process may fork between calls.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace logitless::cpu {

class Workers {
 public:
  // Throws Error(kUnavailable) where the system refuses a thread; none is left running then.
  explicit Workers(int count);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int count() const { return static_cast<int>(threads_.size()); }

  // Runs work(task, worker) for every task in [0, tasks), each once, handed out in order.
  // Returns when all are done; rethrows the first exception.
  void run(int64_t tasks, const std::function<void(int64_t task, int worker)>& work);

 private:
  Workers() = default;
  void serve(int worker);
  void drain(int worker);

  std::mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable finished_;
  const std::function<void(int64_t, int)>* work_ = nullptr;
  int64_t tasks_ = 0;
  int64_t next_ = 0;
  uint64_t round_ = 0;
  int busy_ = 0;
  bool closing_ = false;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;
};

// Cores this process may run on.
int available_cores();

}  // namespace logitless::cpu
