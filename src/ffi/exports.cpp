// SPDX-License-Identifier: Apache-2.0
// TVM FFI exports: check, guard, call. No arithmetic, no framework.
//
// Arguments of the operation, in this order everywhere:
//   x [M, H], weight [V_r, H], target [M], temperature_per_token [M] or None, temperature, ignore_index,
//   vocab_start (-1: not given), vocab_size (-1: not given), sequence_parallel, assume_uniform
// `memory`: -1 auto, -2 stash, -3 recompute, >= 0 bytes. `context`: a number from context_create, or 0.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "ffi/callback_group.h"
#include "ffi/registry.h"
#include "ffi/tensors.h"
#include "head/backend.h"
#include "head/context_state.h"
#include "logitless/logitless.h"

#if LOGITLESS_HAS_CPU
#include "cpu/products.h"
#endif
#if LOGITLESS_HAS_CUDA
#include "cuda/devices.h"
#endif

namespace logitless::ffi_glue {

namespace {

using ffi::Any;
using ffi::Array;
using ffi::Function;
using ffi::Optional;
using ffi::String;

MemoryPolicy policy_of(int64_t memory) {
  if (memory >= 0) return MemoryPolicy::at_most(memory);
  if (memory == -1) return MemoryPolicy::automatic();
  if (memory == -2) return MemoryPolicy::stash();
  if (memory == -3) return MemoryPolicy::recompute();
  throw Error(ErrorKind::kValue,
              "memory: expected -1 (auto), -2 (stash), -3 (recompute) or bytes, got " +
                  std::to_string(memory));
}

Options options_of(double temperature, int64_t ignore_index, int64_t vocab_start,
                   int64_t vocab_size, bool sequence_parallel, bool assume_uniform) {
  return {.temperature = static_cast<float>(temperature),
          .ignore_index = ignore_index,
          .vocab_start = vocab_start,
          .vocab_size = vocab_size,
          .sequence_parallel = sequence_parallel,
          .assume_uniform = assume_uniform,
          .memory = {}};
}

Inputs inputs_of(const ffi::TensorView& x, const ffi::TensorView& weight,
                 const ffi::TensorView& target, const OptionalTensor& temperature) {
  return {view_of("x", x), view_of("weight", weight), view_of("target", target),
          view_of("temperature", temperature)};
}

ffi::Tensor allocate(const std::vector<int64_t>& shape, DType dtype, const Device& device) {
  const DLDevice dl_device =
      device.type == DeviceType::kCpu ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, device.index};
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::Shape(shape), dl_dtype(dtype),
                                   dl_device);
}

// Runs `prepare` (which may fail on this rank alone) and tells the group where it does.
template <typename Prepare>
auto announced(Context& context, const char* phase, bool assume_uniform, const Prepare& prepare) {
  try {
    return prepare();
  } catch (const Error& failure) {
    if (assume_uniform) throw;  // no peer waits for a header
    throw announce_failure(context, phase, failure);
  }
}

struct ForwardResults {
  ffi::Tensor nll, lse;
  Optional<ffi::Tensor> entropy, rows, stash;
};

ForwardResults allocate_forward(Context& context, const Inputs& inputs, const Options& options,
                                bool return_entropy, bool keep_for_backward) {
  const Wanted wanted{
      .entropy = return_entropy, .input_grad = keep_for_backward, .weight_grad = keep_for_backward};
  const Plan plan = plan_call(context, inputs, options, wanted);
  const int64_t tokens = plan.problem.tokens;
  const Device device = inputs.x.device;
  ForwardResults results{allocate({tokens}, DType::kFloat32, device),
                         allocate({tokens}, DType::kFloat32, device),
                         {},
                         {},
                         {}};
  if (return_entropy) results.entropy = allocate({tokens}, DType::kFloat32, device);
  if (keep_for_backward) {
    results.rows = allocate({6, tokens}, DType::kFloat32, device);
    results.stash = allocate({plan.stash_columns, plan.token_pitch}, plan.problem.dtype, device);
  }
  return results;
}

TensorView view_of_result(const Optional<ffi::Tensor>& tensor) {
  if (!tensor.has_value()) return {};
  const ffi::Tensor owned = tensor.value();
  return view_of("result", ffi::TensorView(owned));
}

// A stash without columns is no stash.
TensorView stash_view(TensorView stash) {
  return stash.present() && stash.shape[0] == 0 ? TensorView{} : stash;
}

Array<Any> forward_export(ffi::TensorView x, ffi::TensorView weight, ffi::TensorView target,
                          OptionalTensor temperature_per_token, double temperature,
                          int64_t ignore_index, int64_t vocab_start, int64_t vocab_size,
                          bool sequence_parallel, bool assume_uniform, bool return_entropy,
                          bool keep_for_backward, int64_t memory, int64_t context_number) {
  return guarded([&] {
    const auto context = find_context(context_number);
    Inputs inputs;
    Options options = options_of(temperature, ignore_index, vocab_start, vocab_size,
                                 sequence_parallel, assume_uniform);
    const ForwardResults results = announced(*context, "forward", assume_uniform, [&] {
      inputs = inputs_of(x, weight, target, temperature_per_token);
      options.memory = policy_of(memory);
      return allocate_forward(*context, inputs, options, return_entropy, keep_for_backward);
    });
    forward(
        *context, inputs, options,
        {view_of_result(results.nll), view_of_result(results.lse), view_of_result(results.entropy)},
        {view_of_result(results.rows), stash_view(view_of_result(results.stash))});
    return Array<Any>{results.nll, results.lse, results.entropy, results.rows, results.stash};
  });
}

void forward_into_export(ffi::TensorView x, ffi::TensorView weight, ffi::TensorView target,
                         OptionalTensor temperature_per_token, double temperature,
                         int64_t ignore_index, int64_t vocab_start, int64_t vocab_size,
                         bool sequence_parallel, bool assume_uniform, ffi::TensorView nll,
                         ffi::TensorView lse, OptionalTensor entropy, OptionalTensor rows,
                         OptionalTensor stash, int64_t context_number) {
  guarded([&] {
    const auto context = find_context(context_number);
    Inputs inputs;
    Outputs outputs;
    Saved saved;
    announced(*context, "forward", assume_uniform, [&] {
      inputs = inputs_of(x, weight, target, temperature_per_token);
      outputs = {view_of("nll", nll), view_of("lse", lse), view_of("entropy", entropy)};
      saved = {view_of("rows", rows), stash_view(view_of("stash", stash))};
    });
    forward(*context, inputs,
            options_of(temperature, ignore_index, vocab_start, vocab_size, sequence_parallel,
                       assume_uniform),
            outputs, saved);
  });
}

struct BackwardCall {
  Inputs inputs;
  Saved saved;
  Upstream upstream;
};

BackwardCall backward_call(const OptionalTensor& grad_nll, const OptionalTensor& grad_entropy,
                           const OptionalTensor& grad_lse, const ffi::TensorView& x,
                           const ffi::TensorView& weight, const ffi::TensorView& target,
                           const OptionalTensor& temperature, const ffi::TensorView& rows,
                           const OptionalTensor& stash) {
  return {inputs_of(x, weight, target, temperature),
          {view_of("rows", rows), stash_view(view_of("stash", stash))},
          {view_of("gradient of nll", grad_nll), view_of("gradient of entropy", grad_entropy),
           view_of("gradient of lse", grad_lse)}};
}

Array<Any> backward_export(OptionalTensor grad_nll, OptionalTensor grad_entropy,
                           OptionalTensor grad_lse, ffi::TensorView x, ffi::TensorView weight,
                           ffi::TensorView target, OptionalTensor temperature_per_token,
                           double temperature, int64_t ignore_index, int64_t vocab_start,
                           int64_t vocab_size, bool sequence_parallel, bool assume_uniform,
                           ffi::TensorView rows, OptionalTensor stash, bool want_input_grad,
                           bool want_weight_grad, int64_t context_number) {
  return guarded([&] {
    const auto context = find_context(context_number);
    BackwardCall call;
    Optional<ffi::Tensor> dx;
    Optional<ffi::Tensor> dw;
    announced(*context, "backward", assume_uniform, [&] {
      call = backward_call(grad_nll, grad_entropy, grad_lse, x, weight, target,
                           temperature_per_token, rows, stash);
      const TensorView& like_x = call.inputs.x;
      const TensorView& like_w = call.inputs.weight;
      if (want_input_grad)
        dx = allocate({like_x.shape[0], like_x.shape[1]}, like_x.dtype, like_x.device);
      if (want_weight_grad)
        dw = allocate({like_w.shape[0], like_w.shape[1]}, like_w.dtype, like_w.device);
    });
    backward(*context, call.inputs,
             options_of(temperature, ignore_index, vocab_start, vocab_size, sequence_parallel,
                        assume_uniform),
             call.saved, call.upstream, {view_of_result(dx), view_of_result(dw), false});
    return Array<Any>{dx, dw};
  });
}

void backward_into_export(OptionalTensor grad_nll, OptionalTensor grad_entropy,
                          OptionalTensor grad_lse, ffi::TensorView x, ffi::TensorView weight,
                          ffi::TensorView target, OptionalTensor temperature_per_token,
                          double temperature, int64_t ignore_index, int64_t vocab_start,
                          int64_t vocab_size, bool sequence_parallel, bool assume_uniform,
                          ffi::TensorView rows, OptionalTensor stash, OptionalTensor dx,
                          OptionalTensor dw, bool accumulate_weight, int64_t context_number) {
  guarded([&] {
    const auto context = find_context(context_number);
    BackwardCall call;
    Gradients gradients;
    announced(*context, "backward", assume_uniform, [&] {
      call = backward_call(grad_nll, grad_entropy, grad_lse, x, weight, target,
                           temperature_per_token, rows, stash);
      gradients = {view_of("gradient of x", dx), view_of("gradient of weight", dw),
                   accumulate_weight};
    });
    backward(*context, call.inputs,
             options_of(temperature, ignore_index, vocab_start, vocab_size, sequence_parallel,
                        assume_uniform),
             call.saved, call.upstream, gradients);
  });
}

Array<Any> plan_export(int64_t tokens, int64_t hidden, int64_t vocab_rows, int64_t vocab_start,
                       int64_t vocab_size, String dtype, int64_t ranks, bool entropy,
                       bool input_grad, bool weight_grad, int64_t memory, int64_t threads) {
  return guarded([&] {
    const Problem problem{.tokens = tokens,
                          .hidden = hidden,
                          .vocab_rows = vocab_rows,
                          .vocab_start = vocab_start < 0 ? 0 : vocab_start,
                          .vocab_size = vocab_size < 0
                                            ? (vocab_start < 0 ? 0 : vocab_start) + vocab_rows
                                            : vocab_size,
                          .dtype = dtype_named(std::string(dtype)),
                          .ranks = static_cast<int32_t>(ranks)};
    const Plan plan = make_plan(problem, {entropy, input_grad, weight_grad}, policy_of(memory),
                                backend_for(Device{}).machine(static_cast<int>(threads)));
    return Array<Any>{plan.stash_columns, plan.token_pitch,       plan.rows_bytes,
                      plan.stash_bytes,   plan.workspace_bytes(), String(plan.to_string())};
  });
}

int64_t context_create_export(int64_t rank, int64_t size, Optional<Function> all_gather,
                              Optional<Function> all_to_all, Optional<Function> abort,
                              int64_t threads) {
  return guarded([&] {
    if (size < 1 || rank < 0 || rank >= size) {
      throw Error(ErrorKind::kValue, "rank: expected 0 <= rank < size, got " +
                                         std::to_string(rank) + " of " + std::to_string(size));
    }
    if (size == 1) return register_context(single_rank(), static_cast<int>(threads));
    if (!all_gather.has_value() || !all_to_all.has_value()) {
      throw Error(ErrorKind::kValue, "group: expected all_gather and all_to_all for " +
                                         std::to_string(size) + " ranks, got none");
    }
    return register_context(
        std::make_shared<CallbackGroup>(static_cast<int>(rank), static_cast<int>(size),
                                        all_gather.value(), all_to_all.value(), abort),
        static_cast<int>(threads));
  });
}

void context_destroy_export(int64_t context) { forget_context(context); }

Capacity capacity_of(int64_t tokens, int64_t hidden, int64_t vocab_rows, const String& dtype) {
  return {tokens, hidden, vocab_rows, dtype_named(std::string(dtype))};
}

int64_t query_export(int64_t context, int64_t tokens, int64_t hidden, int64_t vocab_rows,
                     String dtype) {
  return guarded(
      [&] { return find_context(context)->query(capacity_of(tokens, hidden, vocab_rows, dtype)); });
}

void configure_export(int64_t context, int64_t tokens, int64_t hidden, int64_t vocab_rows,
                      String dtype) {
  guarded(
      [&] { find_context(context)->configure(capacity_of(tokens, hidden, vocab_rows, dtype)); });
}

void release_export(int64_t context) {
  guarded([&] { find_context(context)->release(); });
}

void announce_failure_export(int64_t context, String phase, String kind, String message) {
  guarded([&] {
    announce_failure(*find_context(context), std::string(phase).c_str(),
                     Error(kind_of(std::string(kind)), std::string(message)));
  });
}

// The header exchange alone, for a backend that lives in the framework.
Array<Any> agree_export(int64_t context_number, String phase, int64_t tokens, int64_t x_tokens,
                        int64_t hidden, int64_t vocab_rows, int64_t vocab_start, int64_t vocab_size,
                        String dtype, bool entropy, bool per_token_temperature, double temperature,
                        int64_t ignore_index, bool sequence_parallel, int64_t fingerprint,
                        bool want_input_grad) {
  return guarded([&] {
    const auto context = find_context(context_number);
    const std::lock_guard lock(context->state().mutex);
    const Agreement agreement = context->state().agree(std::string(phase).c_str(), false, [&] {
      Header header;
      header.tokens = tokens;
      header.x_tokens = x_tokens;
      header.hidden = hidden;
      header.vocab_rows = vocab_rows;
      header.vocab_start = vocab_start;
      header.vocab_size = vocab_size;
      set_text(header.dtype, std::string(dtype));  // also one without kernels here
      header.wants_entropy = entropy ? 1 : 0;
      header.per_token_temperature = per_token_temperature ? 1 : 0;
      header.temperature = temperature;
      header.ignore_index = ignore_index;
      header.sequence_parallel = sequence_parallel ? 1 : 0;
      header.fingerprint = static_cast<uint64_t>(fingerprint);
      header.wants_input_grad = want_input_grad ? 1 : 0;
      return header;
    });
    Array<Any> starts;
    Array<Any> rows;
    Array<Any> offsets;
    for (const Shard& shard : agreement.shards) {
      starts.push_back(shard.start);
      rows.push_back(shard.rows);
    }
    for (const int64_t offset : agreement.token_offsets) offsets.push_back(offset);
    const auto rank = static_cast<size_t>(context->state().group->rank());
    return Array<Any>{agreement.shards[rank].start,
                      agreement.vocab_size,
                      agreement.any_wants_input_grad,
                      starts,
                      rows,
                      offsets};
  });
}

ffi::Map<String, Any> build_info_export() {
  ffi::Map<String, Any> info;
  info.Set("version", String(LOGITLESS_VERSION));
#if LOGITLESS_HAS_CPU
  info.Set("products", String(cpu::product_library()));
  info.Set("native_bf16", cpu::native_bf16());
  info.Set("threads", static_cast<int64_t>(backend_for(Device{}).machine(0).threads));
#endif
#if LOGITLESS_HAS_CUDA
  info.Set("cuda_runtime", static_cast<int64_t>(cuda::runtime_version()));
  std::string reason;
  Array<Any> gpus;
  for (const cuda::GpuDevice& gpu : cuda::gpu_devices(reason)) {
    gpus.push_back(String(gpu.name + ", compute capability " + std::to_string(gpu.major) + "." +
                          std::to_string(gpu.minor) + ", " + std::to_string(gpu.multiprocessors) +
                          " multiprocessors"));
  }
  info.Set("gpus", gpus);
  info.Set("no_gpu_reason", String(reason));
#endif
  return info;
}

String last_backend_export() { return String(last_backend()); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_linear_scaled_cross_entropy_forward, forward_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_linear_scaled_cross_entropy_forward_into, forward_into_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_linear_scaled_cross_entropy_backward, backward_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_linear_scaled_cross_entropy_backward_into,
                              backward_into_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_create, context_create_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(context_destroy, context_destroy_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_query, query_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_configure, configure_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_release, release_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(announce_failure, announce_failure_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(agree, agree_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_info, build_info_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(last_backend, last_backend_export);

}  // namespace logitless::ffi_glue
