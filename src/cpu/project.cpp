// SPDX-License-Identifier: Apache-2.0
#include "cpu/project.h"

#include <algorithm>

#include "cpu/pack.h"
#include "plan/cpu_tiles.h"

namespace logitless::cpu {

Operand weight_operand(const TensorView& weight) {
  if (weight.strides[1] == 1) return {.transposed = false, .stride = weight.strides[0]};
  return {.transposed = true, .stride = weight.strides[1]};
}

void project(const LocalCall& call, Workers& workers, Products& products,
             const ProjectionRange& range, const Epilogue& epilogue) {
  const int64_t hidden = call.plan.problem.hidden;
  const int64_t element = size_of(call.plan.problem.dtype);
  const int64_t token_tiles = ceil_div(range.tokens, kTileTokens);
  const int64_t vocab_tiles = ceil_div(range.end - range.begin, kTileVocab);
  auto* packed = call.arena.get<std::byte>(region::kPackedTokens);
  auto* logits = call.arena.get<float>(region::kLogits);

  // Tokens vary fastest: all workers share one block of the weight while it is in the cache.
  workers.run(token_tiles * vocab_tiles, [&](int64_t task, int worker) {
    LogitsTile tile{.logits = logits + worker * kTileVocab * kTileTokens,
                    .token = task % token_tiles * kTileTokens,
                    .tokens = 0,
                    .column = range.begin + task / token_tiles * kTileVocab,
                    .columns = 0};
    tile.tokens = std::min(kTileTokens, range.tokens - tile.token);
    tile.columns = std::min(kTileVocab, range.end - tile.column);
    std::byte* tokens = packed + worker * kTileTokens * hidden * element;
    pack_tokens(call.x, tile.token, tile.tokens, range.index, tokens);
    products.run({.m = tile.columns,
                  .n = kTileTokens,
                  .k = hidden,
                  .a = weight_operand(call.weight),
                  .b = {.transposed = true, .stride = hidden},
                  .c_stride = kTileTokens,
                  .dtype = call.plan.problem.dtype},
                 element_at(call.weight, tile.column, 0), tokens, tile.logits, worker);
    epilogue(tile);
  });
}

}  // namespace logitless::cpu
