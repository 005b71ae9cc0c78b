// SPDX-License-Identifier: Apache-2.0
// dW = dzᵀ·x, tile by tile, every token in one fp32 sum: rounded once.
#pragma once

#include "cpu/products.h"
#include "cpu/workers.h"
#include "head/backend.h"
#include "plan/cpu_rows.h"

namespace logitless::cpu {

class WeightGrad {
 public:
  WeightGrad(const LocalCall& call, Workers& workers, Products& products, const GradientRows& rows,
             const LocalGradients& out);

  bool wanted() const { return out_.weight.present(); }
  void add_stash(const TensorView& stash);
  // dz [columns][token_pitch] of the vocabulary rows from `first` on.
  void add_slice(const void* dz, int64_t first, int64_t columns);
  // Rows of the shard that are padding get a zero gradient.
  void finish();

 private:
  void sort_targets();
  // exponentials or dz [columns][token_pitch] times tokens [token_pitch, H], scaled.
  void multiply(const void* left, int64_t first, int64_t columns, const void* tokens, float scale,
                bool add_targets);
  void add_target_terms(float* tile, int64_t first, int64_t columns, int64_t hidden,
                        int64_t width) const;

  const LocalCall& call_;
  Workers& workers_;
  Products& products_;
  const GradientRows& rows_;
  const LocalGradients& out_;
  int32_t* order_ = nullptr;  // tokens whose target is here, by target, then by token
  int64_t ordered_ = 0;
  bool live_tokens_ready_ = false;
};

}  // namespace logitless::cpu
