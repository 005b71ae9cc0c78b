// SPDX-License-Identifier: Apache-2.0
// Names of the workspace regions, and the arena that turns them into pointers.
#pragma once

#include <cstddef>
#include <string_view>

#include "logitless/error.h"
#include "logitless/plan.h"

namespace logitless {

namespace region {
inline constexpr std::string_view kRows = "row constants";
inline constexpr std::string_view kPackedTokens = "packed token tiles";
inline constexpr std::string_view kLogits = "logits tiles";
inline constexpr std::string_view kWidened = "operands widened to float32";
inline constexpr std::string_view kColumnStatistics = "statistics per 512 columns";
inline constexpr std::string_view kStatistics = "statistics of every rank";
inline constexpr std::string_view kGatheredTokens = "gathered token shards";
inline constexpr std::string_view kTokenBlock = "this rank's token shard";
inline constexpr std::string_view kTargetOrder = "tokens in target order";
inline constexpr std::string_view kScaledTokens = "scaled tokens X'";
inline constexpr std::string_view kLiveTokens = "tokens, ignored rows zeroed";
inline constexpr std::string_view kSlice = "slice of dZ";
inline constexpr std::string_view kInputGradTiles = "dX tiles";
inline constexpr std::string_view kInputGradSum = "dX in float32";
inline constexpr std::string_view kWeightGradTiles = "dW tiles";
inline constexpr std::string_view kInputGradSend = "dX parts by owner";
inline constexpr std::string_view kInputGradParts = "dX parts of every rank";
inline constexpr std::string_view kInputGradBlock = "dX of this rank's tokens";
}  // namespace region

// One call's workspace, laid out as its plan says.
class Arena {
 public:
  Arena(std::byte* base, const Layout& layout) : base_(base), layout_(&layout) {}

  // 0 where the plan has no such region.
  int64_t bytes(std::string_view name) const {
    const Region* region = find(name);
    return region == nullptr ? 0 : region->bytes;
  }

  template <typename T>
  T* get(std::string_view name) const {
    const Region* region = find(name);
    if (region == nullptr) {
      throw Error(ErrorKind::kState,
                  "workspace: the plan has no region '" + std::string(name) + "'");
    }
    return reinterpret_cast<T*>(base_ + region->offset);
  }

 private:
  const Region* find(std::string_view name) const {
    for (const Region& region : layout_->regions()) {
      if (region.name == name) return &region;
    }
    return nullptr;
  }

  std::byte* base_;
  const Layout* layout_;
};

}  // namespace logitless
