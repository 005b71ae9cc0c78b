// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process. An exchange is: post my pointers, wait for everybody's, copy, wait until
// everybody has copied.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "logitless/group.h"

namespace logitless {

namespace {

enum class Exchange { kAllGather, kAllToAll };

struct Post {
  Exchange exchange = Exchange::kAllGather;
  const std::byte* send = nullptr;
  int64_t bytes = 0;
  std::string what;
};

// What the members share.
class Hub {
 public:
  Hub(int ranks, std::chrono::milliseconds timeout)
      : timeout_(timeout),
        posts_(static_cast<size_t>(ranks)),
        present_(posts_.size(), false),
        resetting_(posts_.size(), false) {}

  int size() const { return static_cast<int>(posts_.size()); }

  void exchange(int rank, Post post, std::byte* receive) {
    const std::string what = post.what;
    std::unique_lock lock(mutex_);
    if (broken_) throw *broken_;
    posts_[static_cast<size_t>(rank)] = std::move(post);
    meet(lock, rank, what);
    require_same_exchange(lock);
    lock.unlock();  // nobody posts again before everybody has met again
    copy(rank, receive);
    lock.lock();
    if (broken_) throw *broken_;
    meet(lock, rank, what);
  }

  void abort(int rank, const Error& reason) {
    const std::lock_guard lock(mutex_);
    fail(Error(reason.kind(), "rank " + std::to_string(rank) + ": " + reason.what()));
  }

  void reset(int rank) {
    std::unique_lock lock(mutex_);
    const uint64_t reset = resets_;
    resetting_[static_cast<size_t>(rank)] = true;
    if (std::find(resetting_.begin(), resetting_.end(), false) == resetting_.end()) {
      // Everybody is here, so nobody is in an exchange any more: clear what the failure left.
      broken_.reset();
      present_.assign(present_.size(), false);
      resetting_.assign(resetting_.size(), false);
      arrived_ = 0;
      ++resets_;
      met_.notify_all();
      return;
    }
    if (!met_.wait_for(lock, timeout_, [&] { return resets_ != reset; })) {
      const Error error(ErrorKind::kTimeout, late(rank, "reset", resetting_));
      resetting_[static_cast<size_t>(rank)] = false;
      throw error;
    }
  }

 private:
  void fail(const Error& reason) {
    if (!broken_) broken_ = std::make_unique<Error>(reason);
    met_.notify_all();
  }

  void meet(std::unique_lock<std::mutex>& lock, int rank, const std::string& what) {
    const uint64_t round = round_;
    present_[static_cast<size_t>(rank)] = true;
    if (++arrived_ == size()) {
      arrived_ = 0;
      present_.assign(present_.size(), false);
      ++round_;
      met_.notify_all();
      return;
    }
    if (!met_.wait_for(lock, timeout_, [&] { return round_ != round || broken_; })) {
      fail(Error(ErrorKind::kTimeout, late(rank, what, present_)));
    }
    if (round_ == round) throw *broken_;
  }

  std::string late(int rank, const std::string& what, const std::vector<bool>& present) const {
    std::string absent;
    for (size_t other = 0; other < present.size(); ++other) {
      if (present[other]) continue;
      absent += (absent.empty() ? "" : ", ") + std::to_string(other);
    }
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3f", static_cast<double>(timeout_.count()) / 1000.0);
    return what + ": rank " + std::to_string(rank) + " waited " + seconds + " s for rank(s) " +
           absent + " of " + std::to_string(size());
  }

  void require_same_exchange(std::unique_lock<std::mutex>&) {
    for (size_t rank = 1; rank < posts_.size(); ++rank) {
      const Post& a = posts_[0];
      const Post& b = posts_[rank];
      if (a.exchange == b.exchange && a.bytes == b.bytes) continue;
      fail(Error(ErrorKind::kState, "exchange: expected the same on every rank, got " + a.what +
                                        " of " + std::to_string(a.bytes) + " bytes on rank 0 and " +
                                        b.what + " of " + std::to_string(b.bytes) +
                                        " bytes on rank " + std::to_string(rank)));
      throw *broken_;
    }
  }

  void copy(int rank, std::byte* receive) const {
    for (size_t from = 0; from < posts_.size(); ++from) {
      const Post& post = posts_[from];
      const int64_t block = post.exchange == Exchange::kAllToAll ? rank : 0;
      std::memcpy(receive + static_cast<int64_t>(from) * post.bytes, post.send + block * post.bytes,
                  static_cast<size_t>(post.bytes));
    }
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable met_;
  std::vector<Post> posts_;
  std::vector<bool> present_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  std::vector<bool> resetting_;  // who asked for a reset
  uint64_t resets_ = 0;
  std::unique_ptr<Error> broken_;
};

class ThreadRank final : public Group {
 public:
  ThreadRank(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  void all_gather(const void* mine, void* all, int64_t bytes, const Device&,
                  const char* what) override {
    hub_->exchange(rank_, {Exchange::kAllGather, static_cast<const std::byte*>(mine), bytes, what},
                   static_cast<std::byte*>(all));
  }
  void all_to_all(const void* send, void* receive, int64_t bytes, const Device&,
                  const char* what) override {
    hub_->exchange(rank_, {Exchange::kAllToAll, static_cast<const std::byte*>(send), bytes, what},
                   static_cast<std::byte*>(receive));
  }
  void abort(const Error& reason) noexcept override {
    try {
      hub_->abort(rank_, reason);
    } catch (...) {  // out of memory for the sentence: peers time out instead
    }
  }
  void reset() { hub_->reset(rank_); }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Group>> make_thread_group(int ranks,
                                                      std::chrono::milliseconds timeout) {
  if (ranks < 1) {
    throw Error(ErrorKind::kValue, "ranks: expected at least 1, got " + std::to_string(ranks));
  }
  const auto hub = std::make_shared<Hub>(ranks, timeout);
  std::vector<std::shared_ptr<Group>> members;
  for (int rank = 0; rank < ranks; ++rank)
    members.push_back(std::make_shared<ThreadRank>(hub, rank));
  return members;
}

void reset_thread_group(Group& member) {
  auto* rank = dynamic_cast<ThreadRank*>(&member);
  if (rank == nullptr) {
    throw Error(ErrorKind::kType,
                "group: expected a member of a thread group, got another kind of group");
  }
  rank->reset();
}

}  // namespace logitless
