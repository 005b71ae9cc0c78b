// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "logitless/group.h"

namespace logitless {

namespace {

class SingleRank final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_gather(const void* mine, void* all, int64_t bytes, const Device&, const char*) override {
    std::memcpy(all, mine, static_cast<size_t>(bytes));
  }
  void all_to_all(const void* send, void* receive, int64_t bytes, const Device&,
                  const char*) override {
    std::memcpy(receive, send, static_cast<size_t>(bytes));
  }
};

}  // namespace

std::shared_ptr<Group> single_rank() { return std::make_shared<SingleRank>(); }

}  // namespace logitless
