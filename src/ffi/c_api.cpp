// SPDX-License-Identifier: Apache-2.0
// The flat C API: translate, call, catch. No arithmetic and no checks of tensors live here.
#include "logitless/c_api.h"

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "logitless/logitless.h"

struct logitless_context {
  logitless::Context context;
};

namespace logitless {
namespace {

thread_local std::string last_error;

logitless_status status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kValue:
      return LOGITLESS_VALUE_ERROR;
    case ErrorKind::kType:
      return LOGITLESS_TYPE_ERROR;
    case ErrorKind::kState:
      return LOGITLESS_STATE_ERROR;
    case ErrorKind::kMemory:
      return LOGITLESS_MEMORY_ERROR;
    case ErrorKind::kTimeout:
      return LOGITLESS_TIMEOUT;
    case ErrorKind::kUnavailable:
      return LOGITLESS_UNAVAILABLE;
  }
  return LOGITLESS_INTERNAL_ERROR;
}

ErrorKind kind_of(logitless_status status) {
  switch (status) {
    case LOGITLESS_VALUE_ERROR:
      return ErrorKind::kValue;
    case LOGITLESS_TYPE_ERROR:
      return ErrorKind::kType;
    case LOGITLESS_MEMORY_ERROR:
      return ErrorKind::kMemory;
    case LOGITLESS_TIMEOUT:
      return ErrorKind::kTimeout;
    case LOGITLESS_UNAVAILABLE:
      return ErrorKind::kUnavailable;
    default:
      return ErrorKind::kState;
  }
}

logitless_status failed(logitless_status status, const char* sentence) noexcept {
  try {
    last_error = sentence;
  } catch (...) {  // no memory even for the message: the status alone has to do
    last_error.clear();
  }
  return status;
}

// The only place where exceptions end.
template <typename Body>
logitless_status guarded(Body&& body) noexcept {
  try {
    body();
    return LOGITLESS_OK;
  } catch (const Error& error) {
    return failed(status_of(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(LOGITLESS_MEMORY_ERROR,
                  "memory: the system could not provide what the call needs");
  } catch (const std::exception& error) {
    return failed(LOGITLESS_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(LOGITLESS_INTERNAL_ERROR, "internal: something that is no exception was thrown");
  }
}

template <typename T>
T& given(T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw Error(ErrorKind::kValue, std::string(name) + ": expected a pointer, got null");
  }
  return *pointer;
}

DType dtype_from(int32_t code, const char* name) {
  switch (code) {
    case LOGITLESS_FLOAT32:
      return DType::kFloat32;
    case LOGITLESS_BFLOAT16:
      return DType::kBFloat16;
    case LOGITLESS_INT32:
      return DType::kInt32;
    case LOGITLESS_INT64:
      return DType::kInt64;
    default:
      throw Error(ErrorKind::kType, std::string(name) + ": expected a dtype code in [0, 3], got " +
                                        std::to_string(code));
  }
}

TensorView view(const logitless_tensor& tensor, const char* name) {
  if (tensor.ndim < 0 || tensor.ndim > 2) {
    throw Error(ErrorKind::kValue, std::string(name) + ": expected ndim 0, 1 or 2, got " +
                                       std::to_string(tensor.ndim));
  }
  if (tensor.ndim == 0) return {};
  if (tensor.device_type != LOGITLESS_CPU && tensor.device_type != LOGITLESS_CUDA) {
    throw Error(ErrorKind::kType, std::string(name) + ": expected device type 0 or 1, got " +
                                      std::to_string(tensor.device_type));
  }
  TensorView result;
  result.data = tensor.data;
  result.dtype = dtype_from(tensor.dtype, name);
  result.device = {tensor.device_type == LOGITLESS_CPU ? DeviceType::kCpu : DeviceType::kCuda,
                   tensor.device_index};
  result.ndim = tensor.ndim;
  for (size_t i = 0; i < static_cast<size_t>(tensor.ndim); ++i) {
    result.shape[i] = tensor.shape[i];
    result.strides[i] = tensor.strides[i];
  }
  return result;
}

Inputs view(const logitless_inputs* inputs) {
  const logitless_inputs& in = given(inputs, "inputs");
  return {view(in.x, "x"), view(in.weight, "weight"), view(in.target, "target"),
          view(in.temperature, "temperature")};
}

MemoryPolicy memory_policy(int64_t code) {
  switch (code) {
    case LOGITLESS_MEMORY_AUTO:
      return MemoryPolicy::automatic();
    case LOGITLESS_MEMORY_STASH:
      return MemoryPolicy::stash();
    case LOGITLESS_MEMORY_RECOMPUTE:
      return MemoryPolicy::recompute();
    default:
      if (code < 0) {
        throw Error(ErrorKind::kValue,
                    "memory: expected -1 (auto), -2 (stash), -3 (recompute) or bytes >= 0, got " +
                        std::to_string(code));
      }
      return MemoryPolicy::at_most(code);
  }
}

Options view(const logitless_options* given_options) {
  logitless_options options = LOGITLESS_OPTIONS_INIT;
  if (given_options != nullptr) {
    constexpr int64_t kKnown = sizeof(logitless_options);
    // A caller built against an older header has fewer fields; none has ever had fewer than these.
    constexpr int64_t kFirstVersion =
        offsetof(logitless_options, reserved) + sizeof(logitless_options::reserved);
    const int64_t size = given_options->struct_size;
    if (size < kFirstVersion || size > kKnown) {
      throw Error(ErrorKind::kValue, "options: expected struct_size in [" +
                                         std::to_string(kFirstVersion) + ", " +
                                         std::to_string(kKnown) + "], got " + std::to_string(size));
    }
    std::memcpy(&options, given_options, static_cast<size_t>(size));
  }
  if (options.reserved != 0) {
    throw Error(ErrorKind::kValue,
                "options: expected reserved == 0, got " + std::to_string(options.reserved));
  }
  Options result;
  result.temperature = options.temperature;
  result.ignore_index = options.ignore_index;
  result.vocab_start = options.vocab_start;
  result.vocab_size = options.vocab_size;
  result.sequence_parallel = options.sequence_parallel != 0;
  result.assume_uniform = options.assume_uniform != 0;
  result.memory = memory_policy(options.memory);
  return result;
}

bool vouched_for(const logitless_options* options) {
  return options != nullptr && options->assume_uniform != 0;
}

// Arguments that cannot even be translated are a failed call too: the peers must not wait for it.
template <typename Translate>
auto translated(Context& context, const char* phase, bool assume_uniform, Translate&& translate) {
  try {
    return translate();
  } catch (const Error& failure) {
    if (assume_uniform) throw;  // no peer waits for a header
    throw announce_failure(context, phase, failure);
  }
}

Saved view(const logitless_saved& saved) {
  return {view(saved.rows, "rows"), view(saved.stash, "stash")};
}

Capacity view(const logitless_capacity* capacity) {
  const logitless_capacity& c = given(capacity, "capacity");
  return {c.tokens, c.hidden, c.vocab_rows, dtype_from(c.dtype, "capacity.dtype")};
}

// A group whose exchanges are the caller's functions.
class CallbackGroup final : public Group {
 public:
  explicit CallbackGroup(const logitless_group& group) : group_(group) {
    if (group.size < 1 || group.rank < 0 || group.rank >= group.size) {
      throw Error(ErrorKind::kValue, "group: expected 0 <= rank < size, got rank " +
                                         std::to_string(group.rank) + " and size " +
                                         std::to_string(group.size));
    }
    if (group.size > 1 && (group.all_gather == nullptr || group.all_to_all == nullptr)) {
      throw Error(ErrorKind::kValue, "group: expected all_gather and all_to_all for size " +
                                         std::to_string(group.size) + ", got null");
    }
  }

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }

  void all_gather(const void* mine, void* all, int64_t bytes, const Device& device,
                  const char* what) override {
    check(group_.all_gather(group_.user, mine, all, bytes, static_cast<int32_t>(device.type),
                            device.index, what),
          "all_gather", what);
  }

  void all_to_all(const void* send, void* receive, int64_t bytes, const Device& device,
                  const char* what) override {
    check(group_.all_to_all(group_.user, send, receive, bytes, static_cast<int32_t>(device.type),
                            device.index, what),
          "all_to_all", what);
  }

  void abort(const Error& reason) noexcept override {
    if (group_.abort != nullptr) group_.abort(group_.user, reason.what());
  }

 private:
  void check(int code, const char* exchange, const char* what) const {
    if (code == 0) return;
    throw Error(ErrorKind::kState,
                std::string(exchange) + " of " + what + ": rank " + std::to_string(group_.rank) +
                    "'s callback expected to return 0, got " + std::to_string(code));
  }

  logitless_group group_;
};

}  // namespace
}  // namespace logitless

using logitless::given;
using logitless::guarded;
using logitless::view;

const char* logitless_last_error(void) { return logitless::last_error.c_str(); }

const char* logitless_last_backend(void) { return logitless::last_backend(); }

logitless_tensor logitless_vector(void* data, int32_t dtype, int64_t size) {
  return {data, dtype, LOGITLESS_CPU, 0, 1, {size, 0}, {1, 0}};
}

logitless_tensor logitless_matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  return {data, dtype, LOGITLESS_CPU, 0, 2, {rows, columns}, {columns, 1}};
}

logitless_status logitless_context_create(const logitless_group* group, int32_t threads,
                                          logitless_context** context) {
  return guarded([&] {
    logitless_context*& result = given(context, "context");
    result = nullptr;
    std::shared_ptr<logitless::Group> members = logitless::single_rank();
    if (group != nullptr) {
      auto callbacks = std::make_shared<logitless::CallbackGroup>(*group);
      if (group->size > 1) members = std::move(callbacks);
    }
    result = new logitless_context{logitless::Context(std::move(members), threads)};
  });
}

void logitless_context_destroy(logitless_context* context) { delete context; }

logitless_status logitless_plan_call(logitless_context* context, const logitless_inputs* inputs,
                                     const logitless_options* options,
                                     const logitless_wanted* wanted, logitless_plan* plan) {
  return guarded([&] {
    const logitless_wanted& asked = given(wanted, "wanted");
    logitless_plan& result = given(plan, "plan");
    const logitless::Plan made =
        logitless::plan_call(given(context, "context").context, view(inputs), view(options),
                             {asked.entropy != 0, asked.input_grad != 0, asked.weight_grad != 0});
    result = {made.stash_columns, made.token_pitch, made.rows_bytes, made.stash_bytes,
              made.workspace_bytes()};
  });
}

logitless_status logitless_forward(logitless_context* context, const logitless_inputs* inputs,
                                   const logitless_options* options,
                                   const logitless_outputs* outputs, const logitless_saved* saved) {
  struct Arguments {
    logitless::Inputs inputs;
    logitless::Options options;
    logitless::Outputs outputs;
    logitless::Saved saved;
  };
  return guarded([&] {
    logitless::Context& callee = given(context, "context").context;
    const Arguments arguments = logitless::translated(
        callee, "forward", logitless::vouched_for(options), [&]() -> Arguments {
          const logitless_outputs& out = given(outputs, "outputs");
          return {view(inputs),
                  view(options),
                  {view(out.nll, "nll"), view(out.lse, "lse"), view(out.entropy, "entropy")},
                  saved == nullptr ? logitless::Saved{} : view(*saved)};
        });
    logitless::forward(callee, arguments.inputs, arguments.options, arguments.outputs,
                       arguments.saved);
  });
}

logitless_status logitless_backward(logitless_context* context, const logitless_inputs* inputs,
                                    const logitless_options* options, const logitless_saved* saved,
                                    const logitless_upstream* upstream,
                                    const logitless_gradients* gradients) {
  struct Arguments {
    logitless::Inputs inputs;
    logitless::Options options;
    logitless::Saved saved;
    logitless::Upstream upstream;
    logitless::Gradients gradients;
  };
  return guarded([&] {
    logitless::Context& callee = given(context, "context").context;
    const Arguments arguments = logitless::translated(
        callee, "backward", logitless::vouched_for(options), [&]() -> Arguments {
          const logitless_upstream& up = given(upstream, "upstream");
          const logitless_gradients& out = given(gradients, "gradients");
          return {view(inputs),
                  view(options),
                  view(given(saved, "saved")),
                  {view(up.nll, "gradient of nll"), view(up.entropy, "gradient of entropy"),
                   view(up.lse, "gradient of lse")},
                  {view(out.x, "gradient of x"), view(out.weight, "gradient of weight"),
                   out.accumulate_weight != 0}};
        });
    logitless::backward(callee, arguments.inputs, arguments.options, arguments.saved,
                        arguments.upstream, arguments.gradients);
  });
}

logitless_status logitless_announce_failure(logitless_context* context, const char* phase,
                                            logitless_status status, const char* message) {
  return guarded([&] {
    const logitless::Error failure(logitless::kind_of(status), &given(message, "message"));
    logitless::announce_failure(given(context, "context").context, &given(phase, "phase"), failure);
  });
}

logitless_status logitless_workspace_query(const logitless_context* context,
                                           const logitless_capacity* capacity, int64_t* bytes) {
  return guarded(
      [&] { given(bytes, "bytes") = given(context, "context").context.query(view(capacity)); });
}

logitless_status logitless_workspace_configure(logitless_context* context,
                                               const logitless_capacity* capacity) {
  return guarded([&] {
    logitless::Context& callee = given(context, "context").context;
    callee.configure(
        logitless::translated(callee, "configure", false, [&] { return view(capacity); }));
  });
}

logitless_status logitless_workspace_release(logitless_context* context) {
  return guarded([&] { given(context, "context").context.release(); });
}
