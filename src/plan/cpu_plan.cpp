// SPDX-License-Identifier: Apache-2.0
#include "plan/cpu_plan.h"

#include <algorithm>
#include <string>

#include "plan/cpu_rows.h"
#include "plan/cpu_tiles.h"
#include "plan/regions.h"

namespace logitless::cpu {

namespace {

constexpr int64_t kFloat = sizeof(float);

struct Sizes {
  int64_t tokens, padded_tokens, pitch, hidden, live, element, workers, block;
  bool widen;
};

Sizes sizes_of(const Problem& problem, const Machine& machine) {
  return {.tokens = problem.tokens,
          .padded_tokens = round_up(problem.tokens, kTileTokens),
          .pitch = round_up(problem.tokens, kTokenPitch),
          .hidden = problem.hidden,
          .live = problem.live_rows(),
          .element = size_of(problem.dtype),
          .workers = machine.threads,
          .block = token_block(problem),
          .widen = problem.dtype == DType::kBFloat16 && !machine.native_bf16};
}

void add(Layout& layout, std::string_view name, int64_t bytes) {
  layout.add(std::string(name), bytes);
}

void add_projection(Layout& layout, const Sizes& s) {
  add(layout, region::kPackedTokens, s.workers * kTileTokens * s.hidden * s.element);
  add(layout, region::kLogits, s.workers * kTileVocab * kTileTokens * kFloat);
}

// With sequence parallelism x is gathered where it is needed and dropped with the workspace.
void add_gathered_tokens(Layout& layout, const Problem& problem, const Sizes& s) {
  if (!problem.sequence_parallel || problem.ranks == 1) return;
  add(layout, region::kTokenBlock, s.block * s.hidden * s.element);
  add(layout, region::kGatheredTokens, problem.ranks * s.block * s.hidden * s.element);
}

int64_t projection_operands(const Sizes& s) { return (kTileVocab + kTileTokens) * s.hidden; }

int64_t gradient_operands(const Sizes& s, const Wanted& wanted) {
  const int64_t columns = std::min(s.hidden, kGradHidden);
  int64_t floats = 0;
  if (wanted.input_grad) {
    floats = std::max(floats, kInputGradDepth * (kInputGradTokens + columns));
  }
  if (wanted.weight_grad) {
    floats = std::max(floats, kWeightGradDepth * (kWeightGradVocab + columns));
  }
  return floats;
}

Layout backward_regions(const Problem& problem, const Wanted& wanted, bool stash,
                        int64_t slice_columns, const Machine& machine) {
  const Sizes s = sizes_of(problem, machine);
  const bool slices = slice_columns > 0;
  Layout layout;
  add(layout, region::kRows,
      s.padded_tokens * static_cast<int64_t>(sizeof(float)) * kBackwardRowArrays);
  add_gathered_tokens(layout, problem, s);
  if (slices) {
    add_projection(layout, s);
    add(layout, region::kSlice, slice_columns * s.pitch * s.element);
  }
  if (s.widen) {
    const int64_t floats =
        std::max(gradient_operands(s, wanted), slices ? projection_operands(s) : 0);
    add(layout, region::kWidened, s.workers * floats * kFloat);
  }
  if (wanted.weight_grad) {
    add(layout, region::kTargetOrder, s.tokens * static_cast<int64_t>(sizeof(int32_t)));
    if (stash) add(layout, region::kScaledTokens, s.pitch * s.hidden * s.element);
    if (slices) add(layout, region::kLiveTokens, s.pitch * s.hidden * s.element);
    add(layout, region::kWeightGradTiles,
        s.workers * kWeightGradVocab * std::min(s.hidden, kGradHidden) * kFloat);
  }
  if (wanted.input_grad) {
    if (stash) {
      add(layout, region::kInputGradTiles,
          s.workers * kInputGradTokens * std::min(s.hidden, kGradHidden) * kFloat);
    }
    if (slices || problem.ranks > 1) {
      const int64_t rows =
          problem.ranks > 1 ? std::max(s.tokens, problem.ranks * s.block) : s.tokens;
      add(layout, region::kInputGradSum, rows * s.hidden * kFloat);
    }
    if (problem.ranks > 1) {
      const int64_t elements = problem.ranks * s.block * s.hidden;
      if (problem.sequence_parallel) add(layout, region::kInputGradSend, elements * kFloat);
      add(layout, region::kInputGradParts, elements * kFloat);
      add(layout, region::kInputGradBlock, s.block * s.hidden * s.element);
    }
  }
  return layout;
}

}  // namespace

int64_t token_block(const Problem& problem) {
  return problem.token_block > 0 ? problem.token_block : ceil_div(problem.tokens, problem.ranks);
}

Layout forward_layout(const Problem& problem, const Wanted& wanted, const Machine& machine) {
  const Sizes s = sizes_of(problem, machine);
  Layout layout;
  add(layout, region::kRows,
      s.padded_tokens * static_cast<int64_t>(sizeof(float)) * kForwardRowArrays);
  add_gathered_tokens(layout, problem, s);
  add_projection(layout, s);
  if (s.widen) add(layout, region::kWidened, s.workers * projection_operands(s) * kFloat);
  const int64_t kinds = wanted.entropy ? 3 : 2;  // sum, maximum, and the moment for the entropy
  add(layout, region::kColumnStatistics,
      ceil_div(s.live, kTileVocab) * kinds * s.padded_tokens * kFloat);
  const int64_t ranks = problem.ranks == 1 ? 1 : problem.ranks + 1;  // mine, and everybody's
  add(layout, region::kStatistics, ranks * 4 * s.tokens * kFloat);
  return layout;
}

Layout backward_layout(const Problem& problem, const Wanted& wanted, int64_t stash_columns,
                       const Machine& machine) {
  const int64_t recomputed = problem.live_rows() - stash_columns;
  return backward_regions(problem, wanted, stash_columns > 0, std::min(recomputed, kSliceVocab),
                          machine);
}

int64_t capacity_bytes(const Problem& problem, const Machine& machine) {
  Problem widest = problem;
  widest.sequence_parallel = problem.ranks > 1;
  const Wanted all{.entropy = true, .input_grad = true, .weight_grad = true};
  const int64_t slice = std::min(problem.live_rows(), kSliceVocab);
  return std::max(forward_layout(widest, all, machine).bytes(),
                  backward_regions(widest, all, true, slice, machine).bytes());
}

}  // namespace logitless::cpu
