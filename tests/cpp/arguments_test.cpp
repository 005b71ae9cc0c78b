// SPDX-License-Identifier: Apache-2.0
// What a call refuses: one sentence with the values, before anything is computed.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

#include "calls.h"

using namespace logitless;
using namespace logitless::testing;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Case small_case() { return make_case({.tokens = 9, .hidden = 16, .shards = {70}, .seed = 3}); }

}  // namespace

TEST_CASE("a target outside the vocabulary is an error that names it and its token") {
  for (const int64_t id : {int64_t{70}, int64_t{75}, int64_t{1} << 31, int64_t{-1}, int64_t{-101},
                           std::numeric_limits<int64_t>::min()}) {
    CAPTURE(id);
    Case problem = small_case();
    problem.target.set_id(5, id);
    problem.target.set_id(7, id);
    Call call(problem);
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kValue);
    CHECK(says(error, {"target", std::to_string(id), "5", "70"}));

    // The next call on the same context is fine.
    problem.target.set_id(5, 69);
    problem.target.set_id(7, 0);
    call.run_forward();
    CHECK(std::isfinite(call.nll.get(5)));
  }
}

TEST_CASE("with padding a target must be below the true vocabulary") {
  Case problem = small_case();
  problem.target.set_id(2, 60);
  Call call(problem);
  call.options.vocab_size = 60;
  CHECK(says(call.forward_error(), {"60"}));
}

TEST_CASE("a temperature that is no positive number is an error with its value") {
  for (const float tau : {0.0F, -1.0F, kNaN, kInfinity, -kInfinity, 1e-45F}) {
    CAPTURE(tau);
    Case problem = small_case();
    {
      Call call(problem);
      call.options.temperature = tau;
      const Error error = call.forward_error();
      CHECK(error.kind() == ErrorKind::kValue);
      CHECK(says(error, {"temperature"}));
    }
    problem.temperature = Tensor::vector(DType::kFloat32, 9);
    for (int64_t i = 0; i < 9; ++i) problem.temperature->set(i, i == 4 ? tau : 1.0);
    Call call(problem);
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kValue);
    CHECK(says(error, {"temperature", "4"}));
  }
}

TEST_CASE("shapes that do not fit are one sentence with both values") {
  const Case problem = small_case();
  SUBCASE("tokens of x and target") {
    Call call(problem);
    call.inputs.x.shape[0] = 8;
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kValue);
    CHECK(says(error, {"8", "9"}));
  }
  SUBCASE("hidden of x and weight") {
    Call call(problem);
    call.inputs.weight.shape[1] = 15;
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kValue);
    CHECK(says(error, {"16", "15"}));
  }
  SUBCASE("nll") {
    Call call(problem);
    call.outputs.nll.shape[0] = 7;
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kValue);
    CHECK(says(error, {"nll", "9", "7"}));
  }
  SUBCASE("rows") {
    Call call(problem);
    call.saved.rows.shape[1] = 8;
    CHECK(says(call.forward_error(), {"rows", "8"}));
  }
  SUBCASE("stash") {
    Call call(problem);
    call.saved.stash.shape[1] = 9;
    CHECK(says(call.forward_error(), {"stash", "16", "9"}));
  }
  SUBCASE("x of one dimension") {
    Call call(problem);
    call.inputs.x.ndim = 1;
    CHECK(says(call.forward_error(), {"x", "2", "[9]"}));
  }
  SUBCASE("temperature per token") {
    Call call(problem);
    Tensor tau = Tensor::vector(DType::kFloat32, 8);
    call.inputs.temperature = tau.view();
    CHECK(says(call.forward_error(), {"temperature", "9", "8"}));
  }
  SUBCASE("dx") {
    Call call(problem);
    call.run_forward();
    call.gradients.x.shape[0] = 8;
    CHECK(says(call.backward_error(), {"9", "8"}));
  }
  SUBCASE("dw") {
    Call call(problem);
    call.run_forward();
    call.gradients.weight.shape[0] = 69;
    CHECK(says(call.backward_error(), {"70", "69"}));
  }
  SUBCASE("upstream gradient") {
    Call call(problem);
    call.run_forward();
    call.upstream.nll.shape[0] = 8;
    CHECK(says(call.backward_error(), {"9", "8"}));
  }
  SUBCASE("vocab_size beyond the weight") {
    Call call(problem);
    call.options.vocab_size = 71;
    CHECK(says(call.forward_error(), {"vocab_size", "71", "70"}));
  }
  SUBCASE("vocab_start of a single rank") {
    Call call(problem);
    call.options.vocab_start = 3;
    CHECK(says(call.forward_error(), {"vocab_start", "3"}));
  }
  SUBCASE("a memory budget below the minimum") {
    Call call(problem);
    call.options.memory = MemoryPolicy::at_most(100);
    const int64_t minimum = 24 * 9 + 70 * 16 * 2;
    const Error error =
        thrown_by([&] { plan_call(call.context, call.inputs, call.options, {false, true, true}); });
    CHECK(says(error, {std::to_string(minimum), "100"}));
  }
}

TEST_CASE("dtypes and devices that do not fit are a type error that names them") {
  const Case problem = small_case();
  SUBCASE("weight unlike x") {
    Call call(problem);
    call.inputs.weight.dtype = DType::kFloat32;
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kType);
    CHECK(says(error, {"bfloat16", "float32"}));
  }
  SUBCASE("float target") {
    Call call(problem);
    call.inputs.target.dtype = DType::kFloat32;
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kType);
    CHECK(says(error, {"target", "float32"}));
  }
  SUBCASE("integer x") {
    Call call(problem);
    call.inputs.x.dtype = DType::kInt32;
    CHECK(call.forward_error().kind() == ErrorKind::kType);
  }
  SUBCASE("bfloat16 nll") {
    Call call(problem);
    call.outputs.nll.dtype = DType::kBFloat16;
    const Error error = call.forward_error();
    CHECK(error.kind() == ErrorKind::kType);
    CHECK(says(error, {"nll", "bfloat16"}));
  }
  SUBCASE("a tensor on another device") {
    Call call(problem);
    call.inputs.weight.device = {DeviceType::kCuda, 0};
    CHECK(call.forward_error().kind() == ErrorKind::kType);
  }
  SUBCASE("dx of another dtype") {
    Call call(problem);
    call.run_forward();
    call.gradients.x.dtype = DType::kInt32;
    CHECK(call.backward_error().kind() == ErrorKind::kType);
  }
}

TEST_CASE("backward without what forward saved is an error") {
  const Case problem = small_case();
  Call call(problem);
  call.run_forward();
  call.saved = {};
  CHECK(says(call.backward_error(), {"rows"}));
}
