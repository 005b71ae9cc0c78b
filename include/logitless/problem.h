// SPDX-License-Identifier: Apache-2.0
// What is to be computed: sizes, dtype, the vocabulary shard, and the options of the operation.
//
//   z = x Wᵀ    s = z/τ    lse_i = log Σ_v exp(s_iv)    nll_i = lse_i − s_{i,y_i}    entropy_i = lse_i − Σ_v p_iv s_iv
//
// The sums run over the GLOBAL vocabulary; this rank holds the rows [vocab_start, vocab_start + vocab_rows) of it.
#pragma once

#include <cstdint>

#include "logitless/tensor.h"

namespace logitless {

// What may be kept between forward and backward. The stash holds exponentials of the logits; without it
// backward projects again, in slices of the vocabulary. A function of the shape only, never of free memory.
struct MemoryPolicy {
  enum class Kind : int32_t { kAuto, kStash, kRecompute, kBytes };
  Kind kind = Kind::kAuto;
  int64_t bytes =
      0;  // kBytes: an upper bound on saved rows + stash + one slice of recomputed gradients

  static MemoryPolicy automatic() { return {}; }
  static MemoryPolicy stash() { return {Kind::kStash, 0}; }
  static MemoryPolicy recompute() { return {Kind::kRecompute, 0}; }
  static MemoryPolicy at_most(int64_t bytes) { return {Kind::kBytes, bytes}; }
  bool operator==(const MemoryPolicy&) const = default;
};

// Which results a step will ask for. Nothing that is not asked for is computed or stored.
struct Wanted {
  bool entropy = false;
  bool input_grad = false;
  bool weight_grad = false;
  bool backward() const { return input_grad || weight_grad; }
};

// One rank's part of the problem.
struct Problem {
  int64_t tokens = 0;       // M, the whole batch (with sequence parallelism too)
  int64_t hidden = 0;       // H
  int64_t vocab_rows = 0;   // V_r: rows of this rank's weight
  int64_t vocab_start = 0;  // first global id of this rank's weight
  int64_t vocab_size = 0;   // V: ids at or beyond it are padding and are masked out of everything
  DType dtype = DType::kBFloat16;  // of x, weight and their gradients: bfloat16 or float32
  int32_t ranks = 1;               // R
  bool sequence_parallel = false;  // x and dX are token shards
  int64_t token_block = 0;         // tokens of the largest token shard; 0: ceil(M/R)

  // Rows of this rank's weight that are vocabulary, not padding.
  int64_t live_rows() const {
    const int64_t live = vocab_size - vocab_start;
    return live < 0 ? 0 : (live < vocab_rows ? live : vocab_rows);
  }
};

struct Options {
  float temperature = 1.0F;  // τ; ignored when Inputs::temperature is present
  int64_t ignore_index =
      -100;                  // rows with this target give nll = lse = entropy = 0 and no gradient
  int64_t vocab_start = -1;  // −1: agreed by the group from the sizes of the shards, in rank order
  int64_t vocab_size = -1;   // −1: the sum of the shards
  bool sequence_parallel =
      false;                    // x and its gradient are this rank's token shard; target is whole
  bool assume_uniform = false;  // skip the per-call header: the caller vouches that all ranks agree
  MemoryPolicy memory;
};

}  // namespace logitless
