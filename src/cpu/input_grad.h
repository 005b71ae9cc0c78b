// SPDX-License-Identifier: Apache-2.0
// dX = Σ_v dz_v·W_v, tile by tile: the stashed columns scaled in the epilogue, the slices added.
#pragma once

#include "cpu/products.h"
#include "cpu/workers.h"
#include "head/backend.h"
#include "plan/cpu_rows.h"

namespace logitless::cpu {

class InputGrad {
 public:
  InputGrad(const LocalCall& call, Workers& workers, Products& products, const GradientRows& rows,
            const LocalGradients& out);

  bool wanted() const { return out_.x.present() || out_.x_part; }
  void add_stash(const TensorView& stash);
  // dz [columns][token_pitch] of the vocabulary rows from `first` on.
  void add_slice(const void* dz, int64_t first, int64_t columns);
  void finish();

 private:
  const LocalCall& call_;
  Workers& workers_;
  Products& products_;
  const GradientRows& rows_;
  const LocalGradients& out_;
  float* sum_;          // [M, H], or null: tiles go straight to the gradient
  bool begun_ = false;  // sum_ holds something
};

}  // namespace logitless::cpu
