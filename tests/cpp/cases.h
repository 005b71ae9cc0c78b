// SPDX-License-Identifier: Apache-2.0
// Random problems: inputs of every rank, upstream gradients, and the call on one rank or on all of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "logitless/logitless.h"
#include "reference/reference.h"
#include "tensors.h"

namespace logitless::testing {

struct Spec {
  int64_t tokens = 65;
  int64_t hidden = 72;
  std::vector<int64_t> shards = {511};  // V_r of every rank
  DType dtype = DType::kBFloat16;
  double logit_std = 1.0;
  float temperature = 1.0F;
  bool per_token_temperature = false;
  int64_t ignore_every = 0;  // every n-th token is ignored; 0: none
  uint64_t seed = 1;
};

// Inputs that all ranks share, and each rank's shard.
struct Case {
  Spec spec;
  Tensor x;
  std::vector<Tensor> weight;
  std::vector<int64_t> vocab_start;
  int64_t vocab_size = 0;  // V; make_case sets it to the sum of the shards
  Tensor target;
  std::optional<Tensor> temperature;
  int64_t ignore_index = -100;
  // Random, signed, of very different sizes: g, h and q.
  Tensor grad_nll, grad_entropy, grad_lse;

  int ranks() const { return static_cast<int>(weight.size()); }
  int64_t vocab_rows() const { return vocab_start.back() + weight.back().rows(); }
  // Global row of the weight, whichever shard holds it.
  void set_weight(int64_t id, int64_t column, double value) {
    size_t rank = weight.size() - 1;
    while (id < vocab_start[rank]) --rank;
    weight[rank].set(id - vocab_start[rank], column, value);
  }
  void set_weight_row(int64_t id, double value) {
    for (int64_t h = 0; h < spec.hidden; ++h) set_weight(id, h, value);
  }
};

Case make_case(const Spec& spec);

// What is asked of a call.
struct Ask {
  bool entropy = true;
  bool input_grad = true;
  bool weight_grad = true;
  bool use_g = true, use_h = true, use_q = true;
  MemoryPolicy memory;
  int threads = 1;
  int64_t vocab_start = -1;
  int64_t vocab_size = -1;
  bool assume_uniform = false;
  std::optional<DType> weight_grad_dtype;  // x's dtype where absent
  std::optional<Tensor> accumulate;        // a dW to add to
};

struct Result {
  Tensor nll, lse, entropy;
  Tensor dx, dw;
  Plan plan;
};

// Inputs of one rank as views, and the options of the call.
Inputs inputs_of(const Case& problem, int rank);
Options options_of(const Case& problem, const Ask& ask);

// Plan, forward and backward on poisoned outputs and poisoned saved tensors.
Result run_rank(Context& context, const Inputs& inputs, const Options& options, const Case& problem,
                const Ask& ask);

// One thread per rank over a thread group. Throws what the lowest failing rank threw.
std::vector<Result> run(const Case& problem, const Ask& ask);

// Runs `body(rank, member)` on one thread per member; what each of them threw, if anything.
using RankBody = std::function<void(int, std::shared_ptr<Group>)>;
std::vector<std::optional<Error>> on_ranks(const std::vector<std::shared_ptr<Group>>& group,
                                           const RankBody& body);

constexpr std::chrono::seconds kPatience{60};

reference::Inputs reference_inputs(const Case& problem);
reference::Upstream reference_upstream(const Case& problem, const Ask& ask);

// Rows [begin, end), copied.
Tensor rows_of(const Tensor& tensor, int64_t begin, int64_t end);

}  // namespace logitless::testing
