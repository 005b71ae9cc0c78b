// SPDX-License-Identifier: Apache-2.0
// One call on one rank in pieces, for tests that look at or spoil one of them.
#pragma once

#include "checks.h"

namespace logitless::testing {

struct Call {
  explicit Call(Case&& problem) = delete;  // its views would outlive it
  explicit Call(const Case& problem)
      : inputs(inputs_of(problem, 0)), options(options_of(problem, {})) {
    const int64_t tokens = problem.spec.tokens;
    const DType dtype = problem.spec.dtype;
    nll = Tensor::vector(DType::kFloat32, tokens);
    lse = Tensor::vector(DType::kFloat32, tokens);
    rows = Tensor::matrix(DType::kFloat32, 6, tokens);
    stash = Tensor::matrix(dtype, problem.vocab_rows(), (tokens + 15) / 16 * 16);
    dx = Tensor::matrix(dtype, tokens, problem.spec.hidden);
    dw = Tensor::matrix(dtype, problem.vocab_rows(), problem.spec.hidden);
    outputs = {nll.view(), lse.view(), {}};
    saved = {rows.view(), stash.view()};
    upstream.nll = problem.grad_nll.view();
    gradients = {dx.view(), dw.view(), false};
  }
  void run_forward() { forward(context, inputs, options, outputs, saved); }
  void run_backward() { backward(context, inputs, options, saved, upstream, gradients); }
  Error forward_error() {
    return thrown_by([&] { run_forward(); });
  }
  Error backward_error() {
    return thrown_by([&] { run_backward(); });
  }

  Context context{single_rank(), 1};
  Inputs inputs;
  Options options;
  Tensor nll, lse, rows, stash, dx, dw;
  Outputs outputs;
  Saved saved;
  Upstream upstream;
  Gradients gradients;
};

}  // namespace logitless::testing
