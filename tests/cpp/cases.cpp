// SPDX-License-Identifier: Apache-2.0
#include "cases.h"

#include <cmath>
#include <string>
#include <thread>

namespace logitless::testing {
namespace {

void fill_normal(Tensor& tensor, double deviation, std::mt19937_64& random) {
  std::normal_distribution<double> normal(0.0, deviation);
  for (int64_t i = 0; i < tensor.rows(); ++i) {
    for (int64_t j = 0; j < tensor.columns(); ++j) tensor.set(i, j, normal(random));
  }
}

// Never all of one size: a large, a tiny and a zero row show what a shared scale would hide.
Tensor upstream(int64_t tokens, std::mt19937_64& random) {
  Tensor result = Tensor::vector(DType::kFloat32, tokens);
  fill_normal(result, 1.0, random);
  for (int64_t i = 5; i < tokens; i += 16) result.set(i, result.get(i) * 10.0);
  for (int64_t i = 7; i < tokens; i += 16) result.set(i, result.get(i) * 1e-4);
  for (int64_t i = 9; i < tokens; i += 16) result.set(i, 0.0);
  return result;
}

}  // namespace

Case make_case(const Spec& spec) {
  std::mt19937_64 random(spec.seed);
  Case result;
  result.spec = spec;
  result.x = Tensor::matrix(spec.dtype, spec.tokens, spec.hidden);
  fill_normal(result.x, 1.0, random);
  for (const int64_t rows : spec.shards) {
    result.vocab_start.push_back(result.vocab_size);
    result.weight.push_back(Tensor::matrix(spec.dtype, rows, spec.hidden));
    fill_normal(result.weight.back(), spec.logit_std / std::sqrt(spec.hidden), random);
    result.vocab_size += rows;
  }
  result.target = Tensor::vector(DType::kInt64, spec.tokens);
  std::uniform_int_distribution<int64_t> id(0, result.vocab_size - 1);
  for (int64_t i = 0; i < spec.tokens; ++i) {
    const bool ignored = spec.ignore_every > 0 && i % spec.ignore_every == 0;
    result.target.set_id(i, ignored ? result.ignore_index : id(random));
  }
  if (spec.per_token_temperature) {
    result.temperature = Tensor::vector(DType::kFloat32, spec.tokens);
    std::uniform_real_distribution<double> tau(0.5, 2.0);
    for (int64_t i = 0; i < spec.tokens; ++i) result.temperature->set(i, tau(random));
  }
  result.grad_nll = upstream(spec.tokens, random);
  result.grad_entropy = upstream(spec.tokens, random);
  result.grad_lse = upstream(spec.tokens, random);
  return result;
}

Inputs inputs_of(const Case& problem, int rank) {
  return {problem.x.view(), problem.weight[static_cast<size_t>(rank)].view(), problem.target.view(),
          problem.temperature ? problem.temperature->view() : TensorView{}};
}

Options options_of(const Case& problem, const Ask& ask) {
  Options options;
  options.temperature = problem.spec.temperature;
  options.ignore_index = problem.ignore_index;
  options.vocab_start = ask.vocab_start;
  options.vocab_size = ask.vocab_size;
  options.assume_uniform = ask.assume_uniform;
  options.memory = ask.memory;
  return options;
}

Result run_rank(Context& context, const Inputs& inputs, const Options& options, const Case& problem,
                const Ask& ask) {
  const int64_t tokens = inputs.target.shape[0];
  Result result;
  result.plan = plan_call(context, inputs, options,
                          {ask.entropy || ask.use_h, ask.input_grad, ask.weight_grad});
  result.nll = Tensor::vector(DType::kFloat32, tokens);
  result.lse = Tensor::vector(DType::kFloat32, tokens);
  Outputs outputs{result.nll.view(), result.lse.view(), {}};
  if (ask.entropy || ask.use_h) {
    result.entropy = Tensor::vector(DType::kFloat32, tokens);
    outputs.entropy = result.entropy.view();
  }
  if (!ask.input_grad && !ask.weight_grad) {
    forward(context, inputs, options, outputs, {});
    return result;
  }

  // Not SavedBuffers: its memory may start as zeros, and poison must not matter.
  Tensor rows = Tensor::matrix(DType::kFloat32, 6, tokens);
  Tensor stash;
  Saved saved{rows.view(), {}};
  if (result.plan.stash_columns > 0) {
    stash = Tensor::matrix(inputs.x.dtype, result.plan.stash_columns, result.plan.token_pitch);
    saved.stash = stash.view();
  }
  forward(context, inputs, options, outputs, saved);

  Gradients gradients;
  if (ask.input_grad) {
    result.dx = Tensor::matrix(inputs.x.dtype, inputs.x.shape[0], inputs.x.shape[1]);
    gradients.x = result.dx.view();
  }
  if (ask.weight_grad) {
    if (ask.accumulate) {
      result.dw = *ask.accumulate;
    } else {
      result.dw = Tensor::matrix(ask.weight_grad_dtype.value_or(inputs.x.dtype),
                                 inputs.weight.shape[0], inputs.weight.shape[1]);
    }
    gradients.weight = result.dw.view();
    gradients.accumulate_weight = ask.accumulate.has_value();
  }
  Upstream upstream;
  if (ask.use_g) upstream.nll = problem.grad_nll.view();
  if (ask.use_h) upstream.entropy = problem.grad_entropy.view();
  if (ask.use_q) upstream.lse = problem.grad_lse.view();
  backward(context, inputs, options, saved, upstream, gradients);
  return result;
}

std::vector<std::optional<Error>> on_ranks(const std::vector<std::shared_ptr<Group>>& group,
                                           const RankBody& body) {
  std::vector<std::optional<Error>> thrown(group.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(static_cast<int>(rank), group[rank]);
      } catch (const Error& error) {
        thrown[rank] = error;
      } catch (const std::exception& other) {
        thrown[rank] =
            Error(ErrorKind::kUnavailable, std::string("expected an Error, got: ") + other.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

std::vector<Result> run(const Case& problem, const Ask& ask) {
  const int ranks = problem.ranks();
  const auto group = ranks == 1 ? std::vector{single_rank()} : make_thread_group(ranks, kPatience);
  std::vector<Result> results(static_cast<size_t>(ranks));
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    Context context(member, ask.threads);
    results[static_cast<size_t>(rank)] =
        run_rank(context, inputs_of(problem, rank), options_of(problem, ask), problem, ask);
  });
  for (const std::optional<Error>& error : thrown) {
    if (error) throw *error;
  }
  return results;
}

reference::Inputs reference_inputs(const Case& problem) {
  reference::Inputs result;
  result.x = problem.x.view();
  for (size_t rank = 0; rank < problem.weight.size(); ++rank) {
    result.shards.push_back({problem.weight[rank].view(), problem.vocab_start[rank]});
  }
  result.target = problem.target.view();
  if (problem.temperature) result.temperature = problem.temperature->view();
  result.uniform_temperature = problem.spec.temperature;
  result.ignore_index = problem.ignore_index;
  result.vocab_size = problem.vocab_size;
  return result;
}

reference::Upstream reference_upstream(const Case& problem, const Ask& ask) {
  reference::Upstream result;
  if (ask.use_g) result.nll = problem.grad_nll.view();
  if (ask.use_h) result.entropy = problem.grad_entropy.view();
  if (ask.use_q) result.lse = problem.grad_lse.view();
  return result;
}

Tensor rows_of(const Tensor& tensor, int64_t begin, int64_t end) {
  const TensorView view = tensor.view();
  const bool is_integer = view.dtype == DType::kInt64 || view.dtype == DType::kInt32;
  Tensor result = view.ndim == 1 ? Tensor::vector(view.dtype, end - begin)
                                 : Tensor::matrix(view.dtype, end - begin, tensor.columns());
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t j = 0; j < tensor.columns(); ++j) {
      if (is_integer) {
        result.set_id(i - begin, tensor.id(i));
      } else {
        result.set(i - begin, j, tensor.get(i, j));
      }
    }
  }
  return result;
}

}  // namespace logitless::testing
