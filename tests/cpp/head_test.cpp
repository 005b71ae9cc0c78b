// SPDX-License-Identifier: Apache-2.0
// What a call computes, writes and leaves alone, on one rank.
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

void check_same(const Result& a, const Result& b) {
  CHECK(same_bits(a.nll, b.nll));
  CHECK(same_bits(a.lse, b.lse));
  CHECK(same_bits(a.entropy, b.entropy));
  CHECK(same_bits(a.dx, b.dx));
  CHECK(same_bits(a.dw, b.dw));
}

}  // namespace

TEST_CASE("the backend that ran says its name") {
  const Case problem = make_case({.tokens = 9, .hidden = 16, .shards = {70}});
  Call call(problem);
  call.run_forward();
  CHECK(std::string(last_backend()) == "cpu");
}

TEST_CASE("the scalar temperature does not matter beside one per token") {
  Case problem =
      make_case({.tokens = 9, .hidden = 16, .shards = {70}, .per_token_temperature = true});
  const Result with_one = run(problem, {})[0];
  problem.spec.temperature = 3.0F;
  check_same(with_one, run(problem, {})[0]);
}

TEST_CASE("no tokens are legal") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Case problem = make_case({.tokens = 0, .hidden = 16, .shards = {70}, .dtype = dtype});
    const Result result = run(problem, {})[0];
    CHECK(result.nll.size() == 0);
    CHECK(result.dx.size() == 0);
    for (const double value : result.dw.values()) CHECK(value == 0.0);
  }
}

TEST_CASE("ignored rows are written, as zeros, whatever x holds there") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      Case problem = make_case(
          {.tokens = 150, .hidden = 24, .shards = {700}, .dtype = dtype, .ignore_every = 4});
      Ask ask;
      ask.memory = memory;
      const Result clean = run_and_check(problem, ask)[0];
      for (int64_t i = 0; i < 150; i += 4) {
        for (int64_t h = 0; h < 24; ++h) problem.x.set(i, h, h % 2 == 0 ? kNaN : kInfinity);
        problem.grad_nll.set(i, kNaN);
        problem.grad_entropy.set(i, kInfinity);
        problem.grad_lse.set(i, kNaN);
      }
      const Result result = run(problem, ask)[0];
      check_same(clean, result);
      for (int64_t i = 0; i < 150; i += 4) {
        CHECK(result.nll.get(i) == 0.0);
        CHECK(result.lse.get(i) == 0.0);
        CHECK(result.entropy.get(i) == 0.0);
        for (int64_t h = 0; h < 24; ++h) CHECK(result.dx.get(i, h) == 0.0);
      }
    }
  }
}

TEST_CASE("when every token is ignored everything is exactly zero and the next call is clean") {
  for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    Ask ask;
    ask.memory = memory;
    Case ignored = make_case({.tokens = 70, .hidden = 24, .shards = {600}, .ignore_every = 1});
    Case normal = make_case({.tokens = 70, .hidden = 24, .shards = {600}});
    Context context(single_rank(), 1);
    const auto call = [&](const Case& problem) {
      return run_rank(context, inputs_of(problem, 0), options_of(problem, ask), problem, ask);
    };
    const Result fresh = call(normal);
    const Result zero = call(ignored);
    for (const Tensor* tensor : {&zero.nll, &zero.lse, &zero.entropy, &zero.dx, &zero.dw}) {
      for (const double value : tensor->values()) REQUIRE(value == 0.0);
    }
    check_same(fresh, call(normal));

    // All but the last row.
    ignored.target.set_id(69, 1);
    check_statistics(ignored, {call(ignored)});
    check_gradients(ignored, ask, {call(ignored)});
  }
}

TEST_CASE("any id may mean ignore and still belongs to the vocabulary of the other rows") {
  for (const int64_t ignore_index : {-100, -1, 0, 299, 150}) {
    CAPTURE(ignore_index);
    Case problem = make_case({.tokens = 40, .hidden = 16, .shards = {300}});
    problem.ignore_index = ignore_index;
    for (int64_t i = 0; i < 40; i += 3) problem.target.set_id(i, ignore_index);
    run_and_check(problem, {});
  }
}

TEST_CASE("strides, transposition and narrow targets do not change a bit") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      const Case problem = make_case(
          {.tokens = 67, .hidden = 20, .shards = {530}, .dtype = dtype, .ignore_every = 9});
      Ask ask;
      ask.memory = memory;
      const Result plain = run(problem, ask)[0];

      Case changed = problem;
      SUBCASE("x with gaps between its rows") { changed.x = Tensor::strided(dtype, 67, 20, 31, 1); }
      SUBCASE("x transposed") { changed.x = Tensor::strided(dtype, 67, 20, 1, 67); }
      SUBCASE("weight with gaps between its rows") {
        changed.weight[0] = Tensor::strided(dtype, 530, 20, 23, 1);
      }
      SUBCASE("weight transposed") { changed.weight[0] = Tensor::strided(dtype, 530, 20, 1, 533); }
      SUBCASE("32-bit targets") { changed.target = Tensor::vector(DType::kInt32, 67); }
      for (int64_t i = 0; i < 67; ++i) {
        changed.target.set_id(i, problem.target.id(i));
        for (int64_t h = 0; h < 20; ++h) changed.x.set(i, h, problem.x.get(i, h));
      }
      for (int64_t v = 0; v < 530; ++v) {
        for (int64_t h = 0; h < 20; ++h) changed.weight[0].set(v, h, problem.weight[0].get(v, h));
      }
      check_same(plain, run(changed, ask)[0]);
    }
  }
}

TEST_CASE("strided and expanded vectors do not change a bit") {
  const Case problem = make_case({.tokens = 33, .hidden = 16, .shards = {300}});
  Call plain(problem);
  plain.options.memory = MemoryPolicy::stash();
  plain.run_forward();
  plain.run_backward();

  Call strided(problem);
  strided.options.memory = MemoryPolicy::stash();
  Tensor columns = Tensor::matrix(DType::kFloat32, 33, 7);
  for (int64_t i = 0; i < 33; ++i) columns.set(i, 3, problem.grad_nll.get(i));
  strided.upstream.nll = columns.view();
  strided.upstream.nll.data = static_cast<float*>(strided.upstream.nll.data) + 3;
  strided.upstream.nll.ndim = 1;
  strided.upstream.nll.strides = {7, 0};
  std::vector<int64_t> targets(66, -7);
  for (int64_t i = 0; i < 33; ++i) targets[static_cast<size_t>(2 * i)] = problem.target.id(i);
  strided.inputs.target = vector_view(targets.data(), 33);
  strided.inputs.target.strides[0] = 2;
  Tensor outputs = Tensor::matrix(DType::kFloat32, 33, 2);
  strided.run_forward();
  strided.run_backward();
  CHECK(same_bits(strided.nll, plain.nll));
  CHECK(same_bits(strided.dx, plain.dx));
  CHECK(same_bits(strided.dw, plain.dw));

  // One element of storage for all tokens.
  float one = 1.25F;
  Call expanded(problem);
  expanded.options.memory = MemoryPolicy::stash();
  expanded.upstream.nll = {&one, DType::kFloat32, {}, 1, {33, 0}, {0, 0}};
  expanded.run_forward();
  expanded.run_backward();
  Tensor ones = Tensor::vector(DType::kFloat32, 33);
  for (int64_t i = 0; i < 33; ++i) ones.set(i, 1.25);
  plain.upstream.nll = ones.view();
  plain.run_backward();
  CHECK(same_bits(expanded.dx, plain.dx));
  CHECK(same_bits(expanded.dw, plain.dw));
}

TEST_CASE("what is not asked for changes nothing in what is") {
  for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    const Case problem =
        make_case({.tokens = 70, .hidden = 24, .shards = {600}, .ignore_every = 7});
    Ask ask;
    ask.memory = memory;
    ask.use_h = false;
    ask.entropy = false;
    const Result both = run(problem, ask)[0];
    Ask only = ask;
    only.weight_grad = false;
    const Result x_only = run(problem, only)[0];
    CHECK(same_bits(x_only.nll, both.nll));
    CHECK(same_bits(x_only.dx, both.dx));
    only.weight_grad = true;
    only.input_grad = false;
    CHECK(same_bits(run(problem, only)[0].dw, both.dw));
    only.weight_grad = false;
    const Result neither = run(problem, only)[0];
    CHECK(same_bits(neither.nll, both.nll));
    CHECK(same_bits(neither.lse, both.lse));
    Ask with_entropy = ask;
    with_entropy.entropy = true;
    const Result more = run(problem, with_entropy)[0];
    CHECK(same_bits(more.nll, both.nll));
    CHECK(same_bits(more.lse, both.lse));
  }
}

TEST_CASE("every combination of upstream gradients is right") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Case problem = make_case({.tokens = 60, .hidden = 40, .shards = {200}, .dtype = dtype});
    for (int mask = 0; mask < 8; ++mask) {
      for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
        CAPTURE(mask);
        Ask ask;
        ask.memory = memory;
        ask.use_g = (mask & 1) != 0;
        ask.use_h = (mask & 2) != 0;
        ask.use_q = (mask & 4) != 0;
        const Result result = run_and_check(problem, ask)[0];
        if (mask != 0) continue;
        for (const double value : result.dx.values()) REQUIRE(value == 0.0);
        for (const double value : result.dw.values()) REQUIRE(value == 0.0);
      }
    }
  }
}

TEST_CASE("gradients that cancel in sum are right") {
  // g + q is zero, or nearly: what is left is the target's own term.
  for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    Case problem = make_case({.tokens = 60, .hidden = 40, .shards = {200}});
    for (int64_t i = 0; i < 60; ++i) {
      const double nearly = i % 2 == 0 ? 0.0 : std::ldexp(problem.grad_nll.get(i), -20);
      problem.grad_lse.set(i, nearly - problem.grad_nll.get(i));
    }
    Ask ask;
    ask.memory = memory;
    ask.use_h = false;
    run_and_check(problem, ask);
  }
}

TEST_CASE("the weight's gradient may be float32 and may be added to what is there") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      const Case problem =
          make_case({.tokens = 70, .hidden = 24, .shards = {600}, .dtype = dtype, .seed = 8});
      Ask ask;
      ask.memory = memory;
      ask.weight_grad_dtype = DType::kFloat32;
      const Tensor written = run_and_check(problem, ask)[0].dw;

      Tensor start = Tensor::matrix(DType::kFloat32, 600, 24);
      for (int64_t v = 0; v < 600; ++v) {
        for (int64_t h = 0; h < 24; ++h) start.set(v, h, 0.25 * static_cast<double>(v - 300 + h));
      }
      ask.accumulate = start;
      const Tensor added = run(problem, ask)[0].dw;
      int64_t wrong = 0;
      for (int64_t v = 0; v < 600; ++v) {
        for (int64_t h = 0; h < 24; ++h) {
          const double expected = start.get(v, h) + written.get(v, h);
          const double limit = 1e-6 * (std::abs(expected) + std::abs(start.get(v, h)));
          if (!(std::abs(added.get(v, h) - expected) <= limit)) ++wrong;
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("padding is left out of everything and its gradient is zero") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      for (const double filling : {0.0, 50.0, static_cast<double>(kNaN)}) {
        Case problem = make_case({.tokens = 40, .hidden = 24, .shards = {640}, .dtype = dtype});
        problem.vocab_size = 517;
        for (int64_t i = 0; i < 40; ++i) problem.target.set_id(i, (i * 37) % 517);
        for (int64_t v = 517; v < 640; ++v) problem.set_weight_row(v, filling);
        Ask ask;
        ask.vocab_size = 517;
        ask.memory = memory;
        const Result result = run_and_check(problem, ask)[0];
        for (int64_t v = 517; v < 640; ++v) {
          for (int64_t h = 0; h < 24; ++h) REQUIRE(result.dw.get(v, h) == 0.0);
        }
      }
    }
  }
}

TEST_CASE("backward can be repeated and modifies nothing that it was given") {
  for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    const Case problem = make_case({.tokens = 33, .hidden = 16, .shards = {300}});
    // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): calls write through views
    const Case untouched = problem;
    Call call(problem);
    call.options.memory = memory;
    if (memory.kind == MemoryPolicy::Kind::kRecompute) call.saved.stash = {};
    call.run_forward();
    const Tensor rows = call.rows;
    const Tensor stash = call.stash;
    call.run_backward();
    const Tensor dx = call.dx;
    const Tensor dw = call.dw;
    call.upstream.lse = problem.grad_lse.view();
    call.run_backward();
    CHECK_FALSE(same_bits(call.dx, dx));
    call.upstream.lse = {};
    call.dx.poison();
    call.dw.poison();
    call.run_backward();
    CHECK(same_bits(call.dx, dx));
    CHECK(same_bits(call.dw, dw));
    CHECK(same_bits(call.rows, rows));
    CHECK(same_bits(call.stash, stash));
    CHECK(same_bits(problem.x, untouched.x));
    CHECK(same_bits(problem.weight[0], untouched.weight[0]));
    CHECK(same_bits(problem.target, untouched.target));
  }
}

TEST_CASE("two losses may be in flight on one context") {
  const Case first = make_case({.tokens = 33, .hidden = 16, .shards = {300}, .seed = 5});
  const Case second = make_case({.tokens = 90, .hidden = 40, .shards = {111}, .seed = 6});
  Context context(single_rank(), 1);
  const auto forward_of = [&](Call& call) {
    forward(context, call.inputs, call.options, call.outputs, call.saved);
  };
  const auto backward_of = [&](Call& call) {
    backward(context, call.inputs, call.options, call.saved, call.upstream, call.gradients);
  };
  Call alone_first(first), alone_second(second), a(first), b(second);
  forward_of(alone_first);
  backward_of(alone_first);
  forward_of(alone_second);
  backward_of(alone_second);
  forward_of(a);
  forward_of(b);
  backward_of(a);
  backward_of(b);
  CHECK(same_bits(a.dx, alone_first.dx));
  CHECK(same_bits(a.dw, alone_first.dw));
  CHECK(same_bits(b.dx, alone_second.dx));
  CHECK(same_bits(b.dw, alone_second.dw));
}

TEST_CASE("memory that the library allocates serves as well") {
  const Case problem = make_case({.tokens = 33, .hidden = 16, .shards = {300}});
  Call call(problem);
  call.run_forward();
  call.run_backward();
  const Tensor dx = call.dx;
  const Plan plan = plan_call(call.context, call.inputs, call.options, {false, true, true});
  const SavedBuffers buffers(plan);
  CHECK(buffers.view().rows.shape[0] == 6);
  CHECK(buffers.view().rows.shape[1] == 33);
  CHECK(buffers.view().stash.shape[0] == 300);
  CHECK(buffers.view().stash.shape[1] == 48);
  call.saved = buffers.view();
  call.dx.poison();
  call.run_forward();
  call.run_backward();
  CHECK(same_bits(call.dx, dx));
}
