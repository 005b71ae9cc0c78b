// SPDX-License-Identifier: Apache-2.0
// The flat C API gives what the C++ API gives, and turns every failure into a status and a sentence.
#include "logitless/c_api.h"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "checks.h"

using namespace logitless;
using namespace logitless::testing;

extern "C" int c11_step(float* x, float* weight, int64_t* target, int64_t tokens, int64_t hidden,
                        int64_t vocab, float* nll, float* dx, float* dweight, char* error,
                        size_t error_size);

namespace {

logitless_tensor flat(const TensorView& view) {
  if (!view.present()) return {};
  return {view.data,
          static_cast<int32_t>(view.dtype),
          static_cast<int32_t>(view.device.type),
          view.device.index,
          view.ndim,
          {view.shape[0], view.shape[1]},
          {view.strides[0], view.strides[1]}};
}

logitless_inputs flat(const Inputs& inputs) {
  return {flat(inputs.x), flat(inputs.weight), flat(inputs.target), flat(inputs.temperature)};
}

bool error_says(const std::string& part) {
  const std::string sentence = logitless_last_error();
  if (sentence.find(part) != std::string::npos) return true;
  MESSAGE("expected \"" << part << "\" in: " << sentence);
  return false;
}

struct Handle {
  explicit Handle(const logitless_group* group = nullptr) {
    REQUIRE(logitless_context_create(group, 1, &context) == LOGITLESS_OK);
  }
  ~Handle() { logitless_context_destroy(context); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  logitless_context* context = nullptr;
};

// A C group whose transport is a member of a thread group.
logitless_group callbacks_of(Group& member) {
  logitless_group group{};
  group.rank = member.rank();
  group.size = member.size();
  group.user = &member;
  group.all_gather = [](void* user, const void* mine, void* all, int64_t bytes, int32_t type,
                        int32_t index, const char* what) -> int {
    try {
      static_cast<Group*>(user)->all_gather(mine, all, bytes,
                                            {static_cast<DeviceType>(type), index}, what);
      return 0;
    } catch (const Error&) {
      return 1;
    }
  };
  group.all_to_all = [](void* user, const void* send, void* receive, int64_t bytes, int32_t type,
                        int32_t index, const char* what) -> int {
    try {
      static_cast<Group*>(user)->all_to_all(send, receive, bytes,
                                            {static_cast<DeviceType>(type), index}, what);
      return 0;
    } catch (const Error&) {
      return 1;
    }
  };
  group.abort = [](void* user, const char* reason) {
    static_cast<Group*>(user)->abort(Error(ErrorKind::kState, reason));
  };
  return group;
}

logitless_status step(logitless_context* context, const Case& problem, int rank, Result& result) {
  const logitless_inputs inputs = flat(inputs_of(problem, rank));
  const int64_t tokens = problem.spec.tokens;
  const logitless_wanted wanted{1, 1, 1};
  logitless_plan plan;
  logitless_status status = logitless_plan_call(context, &inputs, nullptr, &wanted, &plan);
  if (status != LOGITLESS_OK) return status;
  result.nll = Tensor::vector(DType::kFloat32, tokens);
  result.lse = Tensor::vector(DType::kFloat32, tokens);
  result.entropy = Tensor::vector(DType::kFloat32, tokens);
  result.dx = Tensor::matrix(problem.spec.dtype, tokens, problem.spec.hidden);
  result.dw = Tensor::matrix(problem.spec.dtype, problem.weight[static_cast<size_t>(rank)].rows(),
                             problem.spec.hidden);
  const Tensor rows = Tensor::matrix(DType::kFloat32, 6, tokens);
  const Tensor stash = Tensor::matrix(problem.spec.dtype, plan.stash_columns, plan.token_pitch);
  const logitless_outputs outputs{flat(result.nll.view()), flat(result.lse.view()),
                                  flat(result.entropy.view())};
  const logitless_saved saved{flat(rows.view()), flat(stash.view())};
  status = logitless_forward(context, &inputs, nullptr, &outputs, &saved);
  if (status != LOGITLESS_OK) return status;
  const logitless_upstream upstream{flat(problem.grad_nll.view()),
                                    flat(problem.grad_entropy.view()),
                                    flat(problem.grad_lse.view())};
  const logitless_gradients gradients{flat(result.dx.view()), flat(result.dw.view()), 0};
  return logitless_backward(context, &inputs, nullptr, &saved, &upstream, &gradients);
}

Case small_case() { return make_case({.tokens = 9, .hidden = 16, .shards = {70}}); }

}  // namespace

TEST_CASE("a C11 program takes a step") {
  Case problem = make_case({.tokens = 20, .hidden = 12, .shards = {90}, .dtype = DType::kFloat32});
  for (int64_t i = 0; i < 20; ++i) problem.grad_nll.set(i, 1.0);
  Result result;
  result.nll = Tensor::vector(DType::kFloat32, 20);
  result.lse = Tensor::vector(DType::kFloat32, 20);
  result.dx = Tensor::matrix(DType::kFloat32, 20, 12);
  result.dw = Tensor::matrix(DType::kFloat32, 90, 12);
  char error[512] = {};
  const int code = c11_step(static_cast<float*>(problem.x.view().data),
                            static_cast<float*>(problem.weight[0].view().data),
                            static_cast<int64_t*>(problem.target.view().data), 20, 12, 90,
                            static_cast<float*>(result.nll.view().data),
                            static_cast<float*>(result.dx.view().data),
                            static_cast<float*>(result.dw.view().data), error, sizeof error);
  INFO(error);
  REQUIRE(code == 0);
  Ask ask;
  ask.entropy = ask.use_h = ask.use_q = false;
  ask.memory = MemoryPolicy::stash();
  const Result want = run(problem, ask)[0];
  CHECK(same_bits(result.nll, want.nll));
  CHECK(same_bits(result.dx, want.dx));
  CHECK(same_bits(result.dw, want.dw));
  check_gradients(problem, ask, {result});
}

TEST_CASE("the C API gives the bits of the C++ API") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Case problem =
        make_case({.tokens = 40, .hidden = 24, .shards = {600}, .dtype = dtype, .ignore_every = 7});
    Handle handle;
    Result result;
    REQUIRE(step(handle.context, problem, 0, result) == LOGITLESS_OK);
    const Result want = run(problem, {})[0];
    CHECK(same_bits(result.nll, want.nll));
    CHECK(same_bits(result.lse, want.lse));
    CHECK(same_bits(result.entropy, want.entropy));
    CHECK(same_bits(result.dx, want.dx));
    CHECK(same_bits(result.dw, want.dw));
    CHECK(std::string(logitless_last_backend()) == "cpu");
  }
}

TEST_CASE("a group of callbacks gives the bits of the group behind it") {
  const Case problem = make_case({.tokens = 13, .hidden = 24, .shards = {100, 60, 200}});
  const std::vector<Result> want = run(problem, {});
  std::vector<Result> results(3);
  const auto thrown = on_ranks(
      make_thread_group(3, kPatience), [&](int rank, const std::shared_ptr<Group>& member) {
        const logitless_group group = callbacks_of(*member);
        logitless_context* context = nullptr;
        logitless_status status = logitless_context_create(&group, 1, &context);
        if (status == LOGITLESS_OK) {
          status = step(context, problem, rank, results[static_cast<size_t>(rank)]);
        }
        logitless_context_destroy(context);
        if (status != LOGITLESS_OK) throw Error(ErrorKind::kState, logitless_last_error());
      });
  REQUIRE(all_returned(thrown));
  for (size_t rank = 0; rank < 3; ++rank) {
    CHECK(same_bits(results[rank].nll, want[rank].nll));
    CHECK(same_bits(results[rank].dx, want[rank].dx));
    CHECK(same_bits(results[rank].dw, want[rank].dw));
  }
}

TEST_CASE("ranks that disagree get one status and one sentence") {
  const Case problem = make_case({.tokens = 13, .hidden = 24, .shards = {100, 60}});
  for (const bool untranslatable : {false, true}) {
    std::vector<logitless_status> statuses(2, LOGITLESS_OK);
    std::vector<std::string> sentences(2);
    on_ranks(make_thread_group(2, std::chrono::seconds(20)),
             [&](int rank, const std::shared_ptr<Group>& member) {
               const logitless_group group = callbacks_of(*member);
               logitless_context* context = nullptr;
               logitless_context_create(&group, 1, &context);
               logitless_inputs inputs = flat(inputs_of(problem, rank));
               if (rank == 1) {
                 // The second is found before C++ ever sees the call: peers must hear of it all the same.
                 if (untranslatable) {
                   inputs.x.dtype = 77;
                 } else {
                   inputs.x.shape[0] = inputs.target.shape[0] = 12;
                 }
               }
               Tensor nll = Tensor::vector(DType::kFloat32, inputs.target.shape[0]);
               Tensor lse = Tensor::vector(DType::kFloat32, inputs.target.shape[0]);
               const logitless_outputs outputs{flat(nll.view()), flat(lse.view()), {}};
               const auto at = static_cast<size_t>(rank);
               statuses[at] = logitless_forward(context, &inputs, nullptr, &outputs, nullptr);
               sentences[at] = logitless_last_error();
               logitless_context_destroy(context);
             });
    CHECK(statuses[0] == (untranslatable ? LOGITLESS_TYPE_ERROR : LOGITLESS_VALUE_ERROR));
    CHECK(statuses[1] == statuses[0]);
    const std::string part = untranslatable ? "77" : "12";
    for (const std::string& sentence : sentences) {
      INFO(sentence);
      CHECK(sentence.find(part) != std::string::npos);
    }
  }
}

TEST_CASE("a callback that fails fails the call with its number") {
  const Case problem = make_case({.tokens = 13, .hidden = 24, .shards = {100, 60}});
  logitless_group group{};
  group.size = 2;
  group.all_gather = [](void*, const void*, void*, int64_t, int32_t, int32_t, const char*) -> int {
    return 42;
  };
  group.all_to_all = [](void*, const void*, void*, int64_t, int32_t, int32_t, const char*) -> int {
    return 43;
  };
  Handle handle(&group);
  Result result;
  CHECK(step(handle.context, problem, 0, result) == LOGITLESS_STATE_ERROR);
  CHECK(error_says("42"));
  CHECK(error_says("all_gather"));
}

TEST_CASE("errors are statuses with the sentence of the C++ error") {
  Handle handle;
  Result result;
  Case problem = small_case();
  problem.target.set_id(3, 70);
  CHECK(step(handle.context, problem, 0, result) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("70"));
  const std::string sentence = logitless_last_error();
  problem.target.set_id(3, 69);
  CHECK(step(handle.context, problem, 0, result) == LOGITLESS_OK);
  CHECK(sentence == logitless_last_error());  // success changes nothing

  logitless_inputs inputs = flat(inputs_of(problem, 0));
  const logitless_wanted wanted{0, 0, 0};
  logitless_plan plan;
  inputs.weight.dtype = LOGITLESS_FLOAT32;
  CHECK(logitless_plan_call(handle.context, &inputs, nullptr, &wanted, &plan) ==
        LOGITLESS_TYPE_ERROR);
  CHECK(error_says("float32"));
  inputs.weight.dtype = -1;
  CHECK(logitless_plan_call(handle.context, &inputs, nullptr, &wanted, &plan) ==
        LOGITLESS_TYPE_ERROR);
  CHECK(error_says("-1"));
  inputs.weight.ndim = 3;
  CHECK(logitless_plan_call(handle.context, &inputs, nullptr, &wanted, &plan) ==
        LOGITLESS_VALUE_ERROR);
  CHECK(error_says("weight"));
}

TEST_CASE("an error belongs to its thread") {
  CHECK(logitless_workspace_release(nullptr) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("context"));
  std::string other = "unset";
  on_ranks({single_rank()},
           [&](int, const std::shared_ptr<Group>&) { other = logitless_last_error(); });
  CHECK(other.empty());
}

TEST_CASE("null pointers are errors that name the argument") {
  Handle handle;
  const Case problem = small_case();
  const logitless_inputs inputs = flat(inputs_of(problem, 0));
  const logitless_wanted wanted{0, 1, 1};
  logitless_plan plan;
  logitless_saved saved{};
  CHECK(logitless_context_create(nullptr, 1, nullptr) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("context"));
  CHECK(logitless_plan_call(nullptr, &inputs, nullptr, &wanted, &plan) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("context"));
  CHECK(logitless_plan_call(handle.context, nullptr, nullptr, &wanted, &plan) ==
        LOGITLESS_VALUE_ERROR);
  CHECK(error_says("inputs"));
  CHECK(logitless_plan_call(handle.context, &inputs, nullptr, nullptr, &plan) ==
        LOGITLESS_VALUE_ERROR);
  CHECK(error_says("wanted"));
  CHECK(logitless_plan_call(handle.context, &inputs, nullptr, &wanted, nullptr) ==
        LOGITLESS_VALUE_ERROR);
  CHECK(error_says("plan"));
  CHECK(logitless_forward(handle.context, &inputs, nullptr, nullptr, nullptr) ==
        LOGITLESS_VALUE_ERROR);
  CHECK(error_says("outputs"));
  CHECK(logitless_backward(handle.context, &inputs, nullptr, &saved, nullptr, nullptr) ==
        LOGITLESS_VALUE_ERROR);
  CHECK(error_says("upstream"));
  CHECK(logitless_announce_failure(handle.context, nullptr, LOGITLESS_VALUE_ERROR, "m") ==
        LOGITLESS_VALUE_ERROR);
  CHECK(error_says("phase"));
  CHECK(logitless_workspace_query(handle.context, nullptr, nullptr) == LOGITLESS_VALUE_ERROR);
  CHECK(logitless_workspace_configure(handle.context, nullptr) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("capacity"));
  logitless_context_destroy(nullptr);
}

TEST_CASE("options of another size or with nonsense in them are refused") {
  Handle handle;
  const Case problem = small_case();
  const logitless_inputs inputs = flat(inputs_of(problem, 0));
  const logitless_wanted wanted{0, 1, 1};
  logitless_plan plan;
  const auto plan_with = [&](const logitless_options& options) {
    return logitless_plan_call(handle.context, &inputs, &options, &wanted, &plan);
  };
  const logitless_options defaults = LOGITLESS_OPTIONS_INIT;
  CHECK(plan_with(defaults) == LOGITLESS_OK);
  CHECK(plan.stash_columns == 70);
  CHECK(plan.token_pitch == 16);
  CHECK(plan.rows_bytes == 24 * 9);
  CHECK(plan.stash_bytes == 70 * 16 * 2);
  CHECK(plan.workspace_bytes > 0);

  logitless_options options = defaults;
  options.struct_size = 8;
  CHECK(plan_with(options) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("struct_size"));
  options.struct_size = defaults.struct_size + 8;
  CHECK(plan_with(options) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says(std::to_string(defaults.struct_size + 8)));
  options = defaults;
  options.reserved = 1;
  CHECK(plan_with(options) == LOGITLESS_VALUE_ERROR);
  options = defaults;
  options.memory = -4;
  CHECK(plan_with(options) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("-4"));
  options.memory = LOGITLESS_MEMORY_RECOMPUTE;
  CHECK(plan_with(options) == LOGITLESS_OK);
  CHECK(plan.stash_columns == 0);
  options.memory = 10;
  CHECK(plan_with(options) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says(std::to_string(24 * 9 + 70 * 16 * 2)));
}

TEST_CASE("a group that cannot be is refused") {
  logitless_group group{};
  logitless_context* context = nullptr;
  CHECK(logitless_context_create(&group, 1, &context) == LOGITLESS_VALUE_ERROR);
  CHECK(context == nullptr);
  group.rank = 2;
  group.size = 2;
  CHECK(logitless_context_create(&group, 1, &context) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("rank 2"));
  group.rank = 0;
  CHECK(logitless_context_create(&group, 1, &context) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("all_gather"));
  group.size = 1;  // alone nobody needs callbacks
  CHECK(logitless_context_create(&group, 1, &context) == LOGITLESS_OK);
  logitless_context_destroy(context);
  CHECK(logitless_context_create(nullptr, -1, &context) == LOGITLESS_VALUE_ERROR);
  CHECK(error_says("threads"));
}

TEST_CASE("the workspace can be queried, configured and released") {
  Handle handle;
  const logitless_capacity large{8192, 8, 64, LOGITLESS_BFLOAT16};
  const logitless_capacity small{4096, 8, 64, LOGITLESS_BFLOAT16};
  int64_t bytes = 0;
  CHECK(logitless_workspace_query(handle.context, &large, &bytes) == LOGITLESS_OK);
  CHECK(bytes > 0);
  CHECK(logitless_workspace_configure(handle.context, &large) == LOGITLESS_OK);
  CHECK(logitless_workspace_query(handle.context, &small, &bytes) == LOGITLESS_STATE_ERROR);
  CHECK(error_says("8192"));
  CHECK(error_says("4096"));
  CHECK(logitless_workspace_release(handle.context) == LOGITLESS_OK);
  CHECK(logitless_workspace_query(handle.context, &small, &bytes) == LOGITLESS_OK);
}
