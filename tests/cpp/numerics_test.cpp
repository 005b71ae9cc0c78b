// SPDX-License-Identifier: Apache-2.0
// The CPU backend against the reference: shapes, hard logits, and bits that must not depend on company.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

#include "checks.h"

using namespace logitless;
using namespace logitless::testing;

namespace {

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat32};

// The three ways to remember: everything, nothing, and some.
std::vector<MemoryPolicy> policies(const Spec& spec, int64_t rows) {
  std::vector<MemoryPolicy> result = {MemoryPolicy::stash(), MemoryPolicy::recompute()};
  const int64_t column = (spec.tokens + 15) / 16 * 16 * size_of(spec.dtype);
  // 512 columns beyond the minimum; less than all of them where the shard is larger than slice + 512.
  if (rows > 2048 + 512) {
    result.push_back(MemoryPolicy::at_most(24 * spec.tokens + (2048 + 512) * column));
  }
  return result;
}

void check_all_policies(const Case& problem, Ask ask = {}) {
  for (const MemoryPolicy& memory : policies(problem.spec, problem.weight[0].rows())) {
    CAPTURE(static_cast<int>(memory.kind));
    ask.memory = memory;
    run_and_check(problem, ask);
  }
}

// x[:, 0] = 1 and every other logit comes from the rest, so that w[v, 0] is added to logit v.
Case case_with_offsets(const Spec& spec) {
  Case result = make_case(spec);
  for (int64_t i = 0; i < spec.tokens; ++i) result.x.set(i, 0, 1.0);
  for (int64_t v = 0; v < result.vocab_rows(); ++v) result.set_weight(v, 0, 0.0);
  return result;
}

}  // namespace

TEST_CASE("the plan knows whether this machine multiplies bfloat16") {
  const Plan plan = run(make_case({}), {})[0].plan;
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  const bool limited = limit != nullptr && std::string(limit) == "AVX2";
  if (limited) CHECK_FALSE(plan.machine.native_bf16);
  const bool widens = plan.to_string().find("widened") != std::string::npos;
  CHECK(widens != plan.machine.native_bf16);
}

TEST_CASE("ragged shapes agree with the reference") {
  struct Shape {
    int64_t tokens, rows, hidden;
  };
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{1, 2500, 100}, Shape{7, 1, 8}, Shape{7, 63, 72}, Shape{7, 1000, 1},
        Shape{65, 64, 100}, Shape{65, 65, 8}, Shape{65, 511, 72}, Shape{65, 513, 1},
        Shape{300, 63, 8}, Shape{300, 1000, 72}, Shape{1, 65, 2051}}) {
    for (const DType dtype : kDTypes) {
      CAPTURE(shape.tokens);
      CAPTURE(shape.rows);
      CAPTURE(shape.hidden);
      CAPTURE(std::string(to_string(dtype)));
      check_all_policies(make_case({.tokens = shape.tokens,
                                    .hidden = shape.hidden,
                                    .shards = {shape.rows},
                                    .dtype = dtype,
                                    .logit_std = 2.0,
                                    .per_token_temperature = shape.hidden == 72,
                                    .ignore_every = shape.tokens > 7 ? 11 : 0,
                                    .seed = static_cast<uint64_t>(shape.rows + shape.tokens)}));
    }
  }
}

TEST_CASE("more than one slice of the vocabulary agrees with the reference") {
  for (const DType dtype : kDTypes) {
    for (const bool entropy_gradient : {false, true}) {
      CAPTURE(std::string(to_string(dtype)));
      CAPTURE(entropy_gradient);
      Ask ask;
      ask.use_h = entropy_gradient;
      ask.threads = 2;
      check_all_policies(
          make_case({.tokens = 65, .hidden = 40, .shards = {2700}, .dtype = dtype, .seed = 17}),
          ask);
    }
  }
}

TEST_CASE("many tokens and a wide vocabulary agree with the reference") {
  for (const DType dtype : kDTypes) {
    Ask ask;
    ask.threads = 2;
    ask.use_h = false;
    check_all_policies(make_case({.tokens = 300,
                                  .hidden = 100,
                                  .shards = {2500},
                                  .dtype = dtype,
                                  .logit_std = 3.0,
                                  .ignore_every = 13,
                                  .seed = 23}),
                       ask);
  }
}

TEST_CASE("peaked logits agree with the reference") {
  for (const DType dtype : kDTypes) {
    for (const double deviation : {6.0, 12.0}) {
      CAPTURE(deviation);
      check_all_policies(make_case(
          {.tokens = 70, .hidden = 64, .shards = {600}, .dtype = dtype, .logit_std = deviation}));
    }
  }
}

TEST_CASE("temperatures agree with the reference") {
  for (const float tau : {0.1F, 0.5F, 0.7F, 1.5F, 10.0F}) {
    CAPTURE(tau);
    check_all_policies(
        make_case({.tokens = 40, .hidden = 32, .shards = {300}, .temperature = tau}));
  }
  // Scaled logits of 5e4.
  Case hot = make_case(
      {.tokens = 10, .hidden = 32, .shards = {300}, .logit_std = 15.0, .temperature = 1e-3F});
  const Result result = run(hot, {})[0];
  check_statistics(hot, {result});
  for (const double value : result.dx.values()) REQUIRE(std::isfinite(value));
}

TEST_CASE("constant upstream gradients agree with the reference") {
  for (const double g : {1.0, 1.0 / 300.0}) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      Case problem = make_case({.tokens = 300, .hidden = 72, .shards = {513}});
      for (int64_t i = 0; i < 300; ++i) problem.grad_nll.set(i, g);
      Ask ask;
      ask.memory = memory;
      ask.use_h = ask.use_q = false;
      run_and_check(problem, ask);
    }
  }
}

TEST_CASE("equal logits give the logarithm of the vocabulary") {
  // Padded columns that counted as exp(0) would show where every logit is far below zero.
  for (const int64_t rows : {1, 8, 63, 64, 65, 128, 255, 513, 1025, 12992}) {
    for (const double logit : {-20.0, 0.0, 100.0}) {
      CAPTURE(rows);
      CAPTURE(logit);
      Case problem = make_case({.tokens = 3, .hidden = 16, .shards = {rows}});
      for (int64_t h = 0; h < 16; ++h) {
        for (int64_t i = 0; i < 3; ++i) problem.x.set(i, h, 1.0);
      }
      for (int64_t v = 0; v < rows; ++v) problem.set_weight_row(v, logit / 16);
      const Result result = run(problem, {})[0];
      const double expected = std::log(static_cast<double>(rows));
      for (int64_t i = 0; i < 3; ++i) {
        CHECK(result.nll.get(i) == doctest::Approx(expected).epsilon(1e-5));
        CHECK(result.nll.get(i) >= 0.0);
        CHECK(result.entropy.get(i) == doctest::Approx(expected).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("a common offset is no more than an offset") {
  for (const DType dtype : kDTypes) {
    for (const double offset : {-4096.0, -200.0, 300.0, 30000.0, 1048576.0}) {
      CAPTURE(offset);
      Case problem = case_with_offsets(
          {.tokens = 40, .hidden = 24, .shards = {300}, .dtype = dtype, .logit_std = 2.0});
      for (int64_t v = 0; v < 300; ++v) problem.set_weight(v, 0, offset);
      check_all_policies(problem);
    }
  }
}

TEST_CASE("entropy of equal large logits is the logarithm of the vocabulary") {
  Case problem = make_case({.tokens = 2, .hidden = 8, .shards = {131072}, .seed = 4});
  for (int64_t h = 0; h < 8; ++h) {
    for (int64_t i = 0; i < 2; ++i) problem.x.set(i, h, h == 0 ? 240.0 : 0.0);
  }
  for (int64_t v = 0; v < 131072; ++v) problem.set_weight(v, 0, 125.0);
  const Result result = run(problem, {})[0];
  for (int64_t i = 0; i < 2; ++i) {
    CHECK(result.entropy.get(i) == doctest::Approx(11.783502).epsilon(1e-5));
    CHECK(result.nll.get(i) == doctest::Approx(11.783502).epsilon(1e-5));
    CHECK(result.lse.get(i) == doctest::Approx(30011.783502).epsilon(1e-6));
  }
}

TEST_CASE("logits that 16-bit formats cannot tell apart are told apart") {
  Case problem = make_case({.tokens = 4, .hidden = 8, .shards = {600}, .dtype = DType::kFloat32});
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t h = 0; h < 8; ++h) problem.x.set(i, h, h == 0 ? 1.0 : 0.0);
    problem.target.set_id(i, 512 + i);
  }
  for (int64_t v = 0; v < 600; ++v) problem.set_weight(v, 0, 3000.0 + (v % 2 == 0 ? 0.5 : 0.0));
  check_all_policies(problem);
  for (int64_t v = 0; v < 600; ++v) problem.set_weight(v, 0, v == 513 ? 1e6 : 7e4);
  check_all_policies(problem);
  CHECK(run(problem, {})[0].nll.get(1) == 0.0);
}

TEST_CASE("confident rows keep their last digits") {
  // One logit stands out so that the target has p = 1 − δ.
  for (const int64_t rows : {2000, 131072}) {
    for (const double delta : {3e-3, 1e-3, 1e-4, 1e-6}) {
      for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
        CAPTURE(rows);
        CAPTURE(delta);
        Case problem =
            make_case({.tokens = 2, .hidden = 16, .shards = {rows}, .dtype = DType::kFloat32});
        for (int64_t i = 0; i < 2; ++i) {
          for (int64_t h = 0; h < 16; ++h) problem.x.set(i, h, h == i ? 1.0 : 0.0);
          problem.target.set_id(i, rows - 1);
        }
        const double gap = std::log(static_cast<double>(rows - 1) * (1.0 - delta) / delta);
        problem.set_weight_row(rows - 1, 0.0);
        for (int64_t v = 0; v < rows; ++v) {
          for (int64_t h = 0; h < 2; ++h) problem.set_weight(v, h, v == rows - 1 ? gap : 0.0);
        }
        Ask ask;
        ask.memory = memory;
        ask.use_h = ask.use_q = false;
        const Result result = run(problem, ask)[0];
        const reference::Inputs inputs = reference_inputs(problem);
        const reference::Statistics want = reference::forward(inputs);
        const reference::Gradients grads =
            reference::backward(inputs, reference_upstream(problem, ask));
        for (int64_t i = 0; i < 2; ++i) {
          const auto at = static_cast<size_t>(i);
          // fp32's own step at these logits is what is allowed, relative to a nll of δ.
          CHECK(std::abs(result.nll.get(i) - want.nll[at]) <= 1e-5 * want.nll[at]);
          for (int64_t h = 0; h < 16; ++h) {
            const double expected = grads.x[static_cast<size_t>(i * 16 + h)];
            CHECK(std::abs(result.dx.get(i, h) - expected) <=
                  1e-4 * std::abs(expected) + 1e-5 * delta * std::abs(problem.grad_nll.get(i)));
          }
        }
      }
    }
  }
}

TEST_CASE("confident rows in bfloat16 keep the target's gradient") {
  for (const double gap : {14.0, 16.0, 18.0}) {  // p from 0.9983 to 0.99997
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      CAPTURE(gap);
      Case problem = case_with_offsets({.tokens = 66, .hidden = 40, .shards = {2000}});
      for (int64_t i = 0; i < 66; ++i) problem.target.set_id(i, 1234);
      problem.set_weight(1234, 0, gap);
      Ask ask;
      ask.memory = memory;
      ask.use_h = false;
      run_and_check(problem, ask);
      ask.use_q = false;
      run_and_check(problem, ask);
    }
  }
}

TEST_CASE("one-hot rows have no entropy") {
  Case problem = case_with_offsets({.tokens = 20, .hidden = 16, .shards = {700}});
  problem.set_weight(650, 0, 200.0);
  const Result result = run(problem, {})[0];
  for (int64_t i = 0; i < 20; ++i) {
    CHECK(result.entropy.get(i) >= 0.0);
    CHECK(result.entropy.get(i) <= 1e-6);
  }
  check_all_policies(problem);
}

TEST_CASE("masked classes have no probability and no gradient") {
  // 2 · (−3e38) overflows float32, while dz · w = 0 · (−3e38) stays zero.
  for (const DType dtype : kDTypes) {
    for (const int64_t masked : {100, 128, 550}) {  // some, all, and more than the anchor's columns
      CAPTURE(masked);
      Case problem = make_case(
          {.tokens = 40, .hidden = 24, .shards = {600}, .dtype = dtype, .ignore_every = 6});
      for (int64_t i = 0; i < 40; ++i) {
        problem.x.set(i, 0, 2.0);
        if (problem.target.id(i) >= 0) problem.target.set_id(i, 550 + i);
      }
      for (int64_t v = 0; v < 600; ++v) {
        if (v < masked) {
          problem.set_weight_row(v, 0.0);
          problem.set_weight(v, 0, -3e38);
        } else {
          problem.set_weight(v, 0, 0.0);
        }
      }
      check_all_policies(problem);
    }
  }
}

TEST_CASE("a masked target costs infinitely much") {
  Case problem = make_case({.tokens = 3, .hidden = 8, .shards = {200}, .dtype = DType::kFloat32});
  for (int64_t i = 0; i < 3; ++i) {
    problem.x.set(i, 0, 2.0);
    problem.target.set_id(i, i == 1 ? 150 : 10);
  }
  for (int64_t v = 0; v < 200; ++v) problem.set_weight(v, 0, 0.0);
  problem.set_weight_row(150, 0.0);
  problem.set_weight(150, 0, -3e38);
  const Result result = run(problem, {})[0];
  check_statistics(problem, {result});
  CHECK(result.nll.get(1) == std::numeric_limits<double>::infinity());
  CHECK(std::isfinite(result.lse.get(1)));
}

TEST_CASE("NaN and infinite logits spoil their own row only") {
  for (const DType dtype : kDTypes) {
    for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
      const Case clean =
          make_case({.tokens = 257, .hidden = 16, .shards = {300}, .dtype = dtype, .seed = 12});
      Case problem = clean;
      problem.x.set(100, 3, std::numeric_limits<double>::quiet_NaN());
      for (int64_t h = 0; h < 16; ++h) problem.x.set(200, h, 3e38);  // +inf, or inf − inf
      Ask ask;
      ask.memory = memory;
      const Result want = run(clean, ask)[0];
      const Result result = run(problem, ask)[0];
      for (int64_t i = 0; i < 257; ++i) {
        const bool spoilt = i == 100 || i == 200;
        CAPTURE(i);
        REQUIRE(std::isnan(result.nll.get(i)) == spoilt);
        REQUIRE(std::isnan(result.lse.get(i)) == spoilt);
        REQUIRE(std::isnan(result.entropy.get(i)) == spoilt);
        if (spoilt) continue;
        REQUIRE(result.nll.get(i) == want.nll.get(i));
        REQUIRE(result.entropy.get(i) == want.entropy.get(i));
        for (int64_t h = 0; h < 16; ++h) REQUIRE(result.dx.get(i, h) == want.dx.get(i, h));
      }
      for (int64_t h = 0; h < 16; ++h) REQUIRE(std::isnan(result.dx.get(100, h)));
      for (int64_t v = 0; v < 300; ++v) REQUIRE(std::isnan(result.dw.get(v, 0)));
    }
  }
}

TEST_CASE("a batch of nothing but NaN has NaN gradients and no error") {
  for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    Case problem = make_case({.tokens = 1, .hidden = 8, .shards = {100}});
    problem.x.set(0, 0, std::numeric_limits<double>::quiet_NaN());
    Ask ask;
    ask.memory = memory;
    run_and_check(problem, ask);
  }
}

TEST_CASE("a positive infinity among finite logits makes the row NaN") {
  Case problem = make_case({.tokens = 5, .hidden = 8, .shards = {300}, .dtype = DType::kFloat32});
  for (int64_t i = 0; i < 5; ++i) problem.x.set(i, 0, i == 2 ? 2.0 : 0.0);
  problem.set_weight_row(250, 0.0);
  problem.set_weight(250, 0, 3e38);
  const Result result = run(problem, {})[0];
  check_statistics(problem, {result});
  CHECK(std::isnan(result.nll.get(2)));
  CHECK(std::isfinite(result.nll.get(1)));
}

TEST_CASE("a row of nothing but negative infinity is NaN") {
  Case problem = make_case({.tokens = 5, .hidden = 8, .shards = {300}, .dtype = DType::kFloat32});
  for (int64_t i = 0; i < 5; ++i) problem.x.set(i, 0, i == 2 ? 2.0 : 0.0);
  for (int64_t v = 0; v < 300; ++v) problem.set_weight(v, 0, -3e38);
  const Result result = run(problem, {})[0];
  check_statistics(problem, {result});
  CHECK(std::isnan(result.nll.get(2)));
}

TEST_CASE("rows whose top is far above the first columns are done again") {
  for (const DType dtype : kDTypes) {
    for (const double height : {60.0, 112.0, 150.0, 200.0, 1000.0}) {
      CAPTURE(height);
      Case problem = case_with_offsets(
          {.tokens = 70, .hidden = 24, .shards = {700}, .dtype = dtype, .seed = 31});
      // Half of the rows only: the neighbours must keep their values.
      for (int64_t i = 0; i < 70; i += 2) problem.x.set(i, 0, 0.0);
      problem.set_weight(650, 0, height);
      problem.set_weight(300, 0, height - 1.0);
      for (int64_t i = 0; i < 70; i += 5) problem.target.set_id(i, 650);
      check_all_policies(problem);

      Case neighbours = problem;
      for (int64_t i = 1; i < 70; i += 2) neighbours.x.set(i, 0, 0.0);
      const Result with = run(problem, {})[0];
      const Result without = run(neighbours, {})[0];
      for (int64_t i = 0; i < 70; i += 2) {
        CHECK(with.nll.get(i) == without.nll.get(i));
        CHECK(with.entropy.get(i) == without.entropy.get(i));
      }
    }
  }
}

TEST_CASE("rows whose first columns are far above the rest are right") {
  for (const DType dtype : kDTypes) {
    for (const double depth : {50.0, 200.0, 1000.0}) {
      CAPTURE(depth);
      Case problem = case_with_offsets(
          {.tokens = 70, .hidden = 24, .shards = {700}, .dtype = dtype, .seed = 32});
      for (int64_t v = 1; v < 700; ++v) problem.set_weight(v, 0, -depth);
      for (int64_t i = 0; i < 70; i += 2) problem.target.set_id(i, 0);
      check_all_policies(problem);
    }
  }
}

TEST_CASE("the weight's gradient is rounded once over all tokens") {
  // A running sum in bfloat16 would stick at 256: 256 + 1 is a tie that rounds back.
  const int64_t waves = 5;
  const int64_t tokens = 2048 * waves;
  for (const MemoryPolicy& memory : {MemoryPolicy::stash(), MemoryPolicy::recompute()}) {
    Case problem = make_case({.tokens = tokens, .hidden = 8, .shards = {2048}});
    for (int64_t i = 0; i < tokens; ++i) {
      problem.target.set_id(i, 7);
      problem.grad_nll.set(i, 1.0);
      for (int64_t h = 0; h < 8; ++h) problem.x.set(i, h, 0.0);
      if (i % 2048 == 0) problem.x.set(i, 5, i == 0 ? 256.0 : 1.0);
    }
    for (int64_t v = 0; v < 2048; ++v) problem.set_weight_row(v, 0.0);
    Ask ask;
    ask.memory = memory;
    ask.use_h = ask.use_q = false;
    const Result result = run(problem, ask)[0];
    CHECK(result.dw.get(7, 5) == -260.0);  // −260 · 2047/2048 = −259.87
    CHECK(result.dw.get(8, 5) == doctest::Approx(260.0 / 2048.0).epsilon(0.004));
    CHECK(result.dw.get(7, 4) == 0.0);
  }
}

TEST_CASE("a row has the same bits alone and in a batch") {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {65, 1300}) {
      const Case batch = make_case({.tokens = 300,
                                    .hidden = 72,
                                    .shards = {rows},
                                    .dtype = dtype,
                                    .logit_std = 2.0,
                                    .per_token_temperature = true});
      const Result all = run(batch, {})[0];
      for (const int64_t token : {0, 15, 63, 64, 150, 299}) {
        for (const int64_t company : {1, 2, 17}) {
          const int64_t begin = std::min(token, 300 - company);
          Case part = batch;
          part.spec.tokens = company;
          part.x = rows_of(batch.x, begin, begin + company);
          part.target = rows_of(batch.target, begin, begin + company);
          part.temperature = rows_of(*batch.temperature, begin, begin + company);
          Ask ask;
          ask.input_grad = ask.weight_grad = false;
          const Result alone = run(part, ask)[0];
          CHECK(alone.nll.get(token - begin) == all.nll.get(token));
          CHECK(alone.lse.get(token - begin) == all.lse.get(token));
          CHECK(alone.entropy.get(token - begin) == all.entropy.get(token));
        }
      }
    }
  }
}

TEST_CASE("bits do not depend on the number of threads nor on the run") {
  for (const DType dtype : kDTypes) {
    const Case problem = make_case(
        {.tokens = 300, .hidden = 100, .shards = {2700}, .dtype = dtype, .ignore_every = 10});
    for (const MemoryPolicy& memory : policies(problem.spec, 2700)) {
      Ask ask;
      ask.memory = memory;
      ask.use_h = false;
      const Result one = run(problem, ask)[0];
      for (const int threads : {1, 2, 3}) {
        ask.threads = threads;
        const Result other = run(problem, ask)[0];
        CHECK(same_bits(other.nll, one.nll));
        CHECK(same_bits(other.lse, one.lse));
        CHECK(same_bits(other.entropy, one.entropy));
        CHECK(same_bits(other.dx, one.dx));
        CHECK(same_bits(other.dw, one.dw));
      }
    }
  }
}
