// SPDX-License-Identifier: Apache-2.0
// The operation: the loss of a language-model head without its logits, and both gradients.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "logitless/context.h"
#include "logitless/plan.h"
#include "logitless/problem.h"
#include "logitless/tensor.h"

namespace logitless {

struct Inputs {
  TensorView x;            // [M, H] bfloat16 or float32 (sequence parallel: [M_r, H])
  TensorView weight;       // [V_r, H] of x's dtype; one of its strides is 1
  TensorView target;       // [M] int64 or int32, global ids or ignore_index
  TensorView temperature;  // absent, or [M] float32: τ per token, positive with finite log2(e)/τ
};

struct Outputs {
  TensorView nll;      // [M] float32, nats
  TensorView lse;      // [M] float32, nats
  TensorView entropy;  // absent (costs nothing), or [M] float32, nats
};

// What backward needs, owned by the caller; sizes come from the Plan. Never modified by backward.
struct Saved {
  TensorView rows;   // absent (no backward will come), or [6, M] float32
  TensorView stash;  // [stash_columns, token_pitch] of x's dtype; absent when stash_columns is 0
};

// Upstream gradients per token, any stride; an absent one is zero and costs nothing.
struct Upstream {
  TensorView nll;      // g [M] float32
  TensorView entropy;  // h [M] float32
  TensorView lse;      // q [M] float32
};

struct Gradients {
  TensorView x;                    // absent (not wanted), or like Inputs::x, written
  TensorView weight;               // absent (not wanted), or [V_r, H]; of x's dtype or float32
  bool accumulate_weight = false;  // add to `weight` (Megatron's main_grad) instead of writing it
};

// The plan of a call with these inputs on one rank of `context`. Local: exchanges nothing.
Plan plan_call(Context& context, const Inputs& inputs, const Options& options,
               const Wanted& wanted);

// Collective. Throws the same Error on every rank for bad input or ranks that disagree.
void forward(Context& context, const Inputs& inputs, const Options& options, const Outputs& outputs,
             const Saved& saved);

// Collective. dX is summed over the ranks in fp32 in the order of a balanced tree and rounded once,
// so its bits are equal on every rank; it is computed if any rank of the group wants it.
// dz_iv = (1/τ_i) [ p_iv (g_i + q_i + (lse_i − entropy_i − s_iv) h_i) − g_i 1(v = y_i) ]
void backward(Context& context, const Inputs& inputs, const Options& options, const Saved& saved,
              const Upstream& upstream, const Gradients& gradients);

// Tells the group that this rank cannot make the call, so that its peers raise too instead of waiting.
// For callers that check or allocate before they call forward() or backward(); `phase` is its name.
// Returns the Error that the peers see, for the caller to throw.
Error announce_failure(Context& context, const char* phase, const Error& failure);

// Memory for Saved, for callers without an allocator of their own.
class SavedBuffers {
 public:
  explicit SavedBuffers(const Plan& plan);
  const Saved& view() const { return view_; }

 private:
  std::vector<std::byte> rows_;
  std::vector<std::byte> stash_;
  Saved view_;
};

// What ran the last call of this thread: "cpu".
const char* last_backend();

}  // namespace logitless
