// SPDX-License-Identifier: Apache-2.0
#include "cpu/backend.h"

#include "cpu/gradients.h"
#include "cpu/products.h"
#include "cpu/statistics.h"
#include "cpu/workers.h"

namespace logitless::cpu {

namespace {

// The threads and products of one call.
struct Engine {
  explicit Engine(const LocalCall& call)
      : workers(call.plan.machine.threads),
        products(workers.count(), widened(call),
                 call.arena.bytes(region::kWidened) / static_cast<int64_t>(sizeof(float)) /
                     workers.count()) {}

  static float* widened(const LocalCall& call) {
    return call.arena.bytes(region::kWidened) == 0 ? nullptr
                                                   : call.arena.get<float>(region::kWidened);
  }

  Workers workers;
  Products products;
};

}  // namespace

Machine CpuBackend::machine(int threads) const {
  return {.device = {},
          .threads = threads > 0 ? threads : available_cores(),
          .native_bf16 = native_bf16()};
}

void CpuBackend::statistics(const LocalCall& call, const LocalStatistics& out,
                            const TensorView& stash) const {
  Engine engine(call);
  compute_statistics(call, engine.workers, engine.products, out, stash);
}

void CpuBackend::gradients(const LocalCall& call, const Saved& saved, const Upstream& upstream,
                           const LocalGradients& out) const {
  Engine engine(call);
  compute_gradients(call, engine.workers, engine.products, saved, upstream, out);
}

}  // namespace logitless::cpu
