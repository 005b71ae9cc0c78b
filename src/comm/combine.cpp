// SPDX-License-Identifier: Apache-2.0
#include "comm/combine.h"

#include <algorithm>
#include <cstring>

#include "tensor/rows.h"

namespace logitless {

namespace {

constexpr int64_t kBlock = 256;  // floats summed at a time, on the stack

void tree_sum_block(const float* parts, int first, int last, int64_t stride, int64_t count,
                    float* to) {
  if (last - first == 1) {
    std::copy_n(parts + first * stride, count, to);
    return;
  }
  const int middle = tree_middle(first, last);
  float right[kBlock];
  tree_sum_block(parts, first, middle, stride, count, to);
  tree_sum_block(parts, middle, last, stride, count, right);
  for (int64_t i = 0; i < count; ++i) to[i] += right[i];
}

int64_t tokens_of(const Agreement& agreement, int rank) {
  const auto place = static_cast<size_t>(rank);
  return agreement.token_offsets[place + 1] - agreement.token_offsets[place];
}

// Copies rows between [R][block] and [M], both of `row_bytes`.
template <typename Copy>
void for_each_owner(const Agreement& agreement, int ranks, int64_t row_bytes, const Copy& copy) {
  for (int rank = 0; rank < ranks; ++rank) {
    copy(rank * agreement.token_block() * row_bytes,
         agreement.token_offsets[static_cast<size_t>(rank)] * row_bytes,
         static_cast<size_t>(tokens_of(agreement, rank) * row_bytes));
  }
}

}  // namespace

void tree_sum(const float* parts, int ranks, int64_t part_stride, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kBlock) {
    tree_sum_block(parts + i, 0, ranks, part_stride, std::min(kBlock, count - i), to + i);
  }
}

TensorView gather_tokens(Group& group, const Agreement& agreement, const Arena& arena,
                         const TensorView& shard) {
  const int64_t hidden = shard.shape[1];
  const int64_t row_bytes = hidden * size_of(shard.dtype);
  const int64_t block = agreement.token_block();
  auto* mine = arena.get<std::byte>(region::kTokenBlock);
  auto* gathered = arena.get<std::byte>(region::kGatheredTokens);
  std::memset(mine, 0, static_cast<size_t>(block * row_bytes));
  for (int64_t token = 0; token < shard.shape[0]; ++token)
    copy_row(shard, token, mine + token * row_bytes);
  group.all_gather(mine, gathered, block * row_bytes, shard.device, "token shards");
  // Close the gaps between blocks in place: a row never moves to a higher address.
  for_each_owner(agreement, group.size(), row_bytes,
                 [gathered](int64_t from, int64_t to, size_t bytes) {
                   std::memmove(gathered + to, gathered + from, bytes);
                 });
  return matrix_view(gathered, shard.dtype, agreement.token_offsets.back(), hidden);
}

void reduce_input_grad(Group& group, const Agreement& agreement, const Plan& plan,
                       const Arena& arena, const TensorView& dx) {
  const int64_t hidden = plan.problem.hidden;
  const int64_t block = agreement.token_block();
  const int64_t tokens = agreement.token_offsets.back();
  const int64_t part_bytes = block * hidden * static_cast<int64_t>(sizeof(float));
  auto* sum = arena.get<float>(region::kInputGradSum);
  float* send = sum;
  if (plan.problem.sequence_parallel) {
    send = arena.get<float>(region::kInputGradSend);
    std::memset(send, 0, static_cast<size_t>(group.size() * part_bytes));
    for_each_owner(agreement, group.size(), hidden, [&](int64_t to, int64_t from, size_t floats) {
      std::copy_n(sum + from, floats, send + to);
    });
  } else {
    std::fill(sum + tokens * hidden, sum + group.size() * block * hidden, 0.0F);
  }
  auto* parts = arena.get<float>(region::kInputGradParts);
  group.all_to_all(send, parts, part_bytes, plan.machine.device, "dX parts");

  // The tree sum overwrites the first part, block by block after it was read.
  const int64_t mine = tokens_of(agreement, group.rank());
  tree_sum(parts, group.size(), block * hidden, mine * hidden, parts);
  if (plan.problem.sequence_parallel) {
    if (!dx.present()) return;
    for (int64_t token = 0; token < mine; ++token)
      write_row(parts + token * hidden, hidden, dx, token, 0);
    return;
  }
  auto* rounded = arena.get<std::byte>(region::kInputGradBlock);
  const TensorView rounded_view = matrix_view(rounded, plan.problem.dtype, block, hidden);
  const int64_t row_bytes = hidden * size_of(plan.problem.dtype);
  std::memset(rounded, 0, static_cast<size_t>(block * row_bytes));
  for (int64_t token = 0; token < mine; ++token) {
    write_row(parts + token * hidden, hidden, rounded_view, token, 0);
  }
  auto* gathered = reinterpret_cast<std::byte*>(sum);  // the parts in it were sent
  group.all_gather(rounded, gathered, block * row_bytes, plan.machine.device, "dX");
  if (!dx.present()) return;
  for (int64_t token = 0; token < tokens; ++token) {
    copy_row_to(gathered + token * row_bytes, dx, token);  // even parts: blocks follow without gaps
  }
}

}  // namespace logitless
