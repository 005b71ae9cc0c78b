// SPDX-License-Identifier: Apache-2.0
// Gradient descent on a language-model head whose vocabulary is split over two ranks, here two threads.
// Each rank holds half of the weight; both see all tokens and get the same loss and the same dX.
#include <cstdio>
#include <exception>
#include <random>
#include <thread>
#include <vector>

#include "logitless/logitless.h"

namespace {

constexpr int kRanks = 2;
constexpr int64_t kTokens = 256;
constexpr int64_t kHidden = 64;
constexpr int64_t kShard = 1000;  // vocabulary rows per rank
constexpr int kSteps = 5;
constexpr float kLearningRate = 1.0F;

std::vector<float> normal(size_t count, float deviation, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0.0F, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

void train(int rank, const std::shared_ptr<logitless::Group>& group) {
  using namespace logitless;
  std::vector<float> x = normal(kTokens * kHidden, 1.0F, 1);  // the same on both ranks
  std::vector<float> weight = normal(kShard * kHidden, 0.1F, 2U + static_cast<unsigned>(rank));
  std::vector<int64_t> target(kTokens);  // global ids: any rank's
  for (int64_t i = 0; i < kTokens; ++i) target[static_cast<size_t>(i)] = i * 37 % (kRanks * kShard);
  std::vector<float> nll(kTokens), lse(kTokens), dx(x.size()), dweight(weight.size());
  const std::vector<float> upstream(kTokens, 1.0F / kTokens);  // of the mean loss

  Context context(group, /*threads=*/1);
  const Inputs inputs{.x = matrix_view(x.data(), kTokens, kHidden),
                      .weight = matrix_view(weight.data(), kShard, kHidden),
                      .target = vector_view(target.data(), kTokens),
                      .temperature = {}};
  const Options options;
  const Plan plan = plan_call(context, inputs, options, {.input_grad = true, .weight_grad = true});
  if (rank == 0) std::printf("%s\n", plan.to_string().c_str());
  const SavedBuffers saved(plan);

  for (int step = 0; step < kSteps; ++step) {
    forward(context, inputs, options,
            {.nll = vector_view(nll.data(), kTokens),
             .lse = vector_view(lse.data(), kTokens),
             .entropy = {}},
            saved.view());
    backward(context, inputs, options, saved.view(),
             {.nll = vector_view(const_cast<float*>(upstream.data()), kTokens),
              .entropy = {},
              .lse = {}},
             {.x = matrix_view(dx.data(), kTokens, kHidden),
              .weight = matrix_view(dweight.data(), kShard, kHidden)});
    double loss = 0.0;
    for (const float value : nll) loss += value / kTokens;
    if (rank == 0) std::printf("step %d: loss %.4f nats (%s)\n", step, loss, last_backend());
    for (size_t i = 0; i < weight.size(); ++i) weight[i] -= kLearningRate * dweight[i];
    for (size_t i = 0; i < x.size(); ++i) x[i] -= kLearningRate * dx[i];
  }
}

}  // namespace

int main() {
  const auto group = logitless::make_thread_group(kRanks, std::chrono::seconds(30));
  std::vector<std::thread> threads;
  std::vector<int> status(kRanks, 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        train(rank, group[static_cast<size_t>(rank)]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        status[static_cast<size_t>(rank)] = 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return status[0] | status[1];
}
