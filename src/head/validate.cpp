// SPDX-License-Identifier: Apache-2.0
#include "head/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "head/merge.h"
#include "plan/cpu_tiles.h"
#include "tensor/rows.h"

namespace logitless {

namespace {

[[noreturn]] void fail(ErrorKind kind, const std::string& sentence) { throw Error(kind, sentence); }

std::string shape_of(const TensorView& tensor) {
  if (tensor.ndim == 0) return "nothing";
  std::string text = "[" + std::to_string(tensor.shape[0]);
  if (tensor.ndim == 2) text += ", " + std::to_string(tensor.shape[1]);
  return text + "]";
}

std::string strides_of(const TensorView& tensor) {
  return "(" + std::to_string(tensor.strides[0]) + ", " + std::to_string(tensor.strides[1]) + ")";
}

void require_ndim(const char* name, const TensorView& tensor, int ndim) {
  if (tensor.ndim == ndim) return;
  fail(ErrorKind::kValue, std::string(name) + ": expected " + std::to_string(ndim) + " dimension" +
                              (ndim == 1 ? "" : "s") + ", got " + shape_of(tensor));
}

void require_shape(const char* name, const TensorView& tensor, int64_t rows, int64_t columns) {
  require_ndim(name, tensor, columns < 0 ? 1 : 2);
  if (tensor.shape[0] == rows && (columns < 0 || tensor.shape[1] == columns)) return;
  const std::string wanted =
      columns < 0 ? "[" + std::to_string(rows) + "]"
                  : "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
  fail(ErrorKind::kValue,
       std::string(name) + ": expected shape " + wanted + ", got " + shape_of(tensor));
}

void require_dtype(const char* name, const TensorView& tensor, DType dtype) {
  if (tensor.dtype == dtype) return;
  fail(ErrorKind::kType,
       std::string(name) + ": expected " + to_string(dtype) + ", got " + to_string(tensor.dtype));
}

void require_device(const char* name, const TensorView& tensor, const Device& device) {
  if (!tensor.present() || tensor.device == device) return;
  fail(ErrorKind::kType, std::string(name) + ": expected the device of x, got another one");
}

// The stride of an axis of length 1 says nothing: give it the value that a contiguous tensor has.
TensorView natural(TensorView tensor) {
  if (tensor.ndim == 2) {
    if (tensor.shape[1] == 1) tensor.strides[1] = 1;
    if (tensor.shape[0] == 1) {
      tensor.strides[0] = tensor.strides[1] == 1 ? tensor.shape[1] : tensor.strides[0];
    }
  }
  return tensor;
}

bool good_temperature(double tau) {
  return std::isfinite(tau) && tau > 0.0 &&
         std::isfinite(static_cast<float>(std::numbers::log2e / tau));
}

void check_temperature(const Inputs& inputs, const Options& options, int64_t tokens) {
  const char* wanted =
      "temperature: expected a positive number with finite log2(e)/temperature, got ";
  if (!inputs.temperature.present()) {
    if (!good_temperature(options.temperature)) {
      fail(ErrorKind::kValue, wanted + std::to_string(options.temperature));
    }
    return;
  }
  require_dtype("temperature", inputs.temperature, DType::kFloat32);
  require_shape("temperature", inputs.temperature, tokens, -1);
  const auto* tau = static_cast<const float*>(inputs.temperature.data);
  for (int64_t token = 0; token < tokens; ++token) {
    const float value = tau[token * inputs.temperature.strides[0]];
    if (good_temperature(value)) continue;
    // An ignored token may hold anything, as its x may.
    if (integer_at(inputs.target, token) == options.ignore_index) continue;
    fail(ErrorKind::kValue,
         wanted + std::to_string(value) + " at position " + std::to_string(token));
  }
}

void check_x(const TensorView& x) {
  require_ndim("x", x, 2);
  if (x.dtype != DType::kBFloat16 && x.dtype != DType::kFloat32) {
    fail(ErrorKind::kType,
         std::string("x: expected bfloat16 or float32, got ") + to_string(x.dtype));
  }
  if (x.shape[1] < 1) fail(ErrorKind::kValue, "hidden: expected x.shape[1] >= 1, got 0");
}

void check_weight(const TensorView& x, const TensorView& weight) {
  require_ndim("weight", weight, 2);
  require_dtype("weight", weight, x.dtype);
  if (weight.shape[1] != x.shape[1]) {
    fail(ErrorKind::kValue, "hidden: expected weight.shape[1] == x.shape[1], got " +
                                std::to_string(weight.shape[1]) + " and " +
                                std::to_string(x.shape[1]));
  }
  if (weight.shape[0] < 1 ||
      weight.shape[0] > std::numeric_limits<int32_t>::max() - cpu::kTileVocab) {
    fail(ErrorKind::kValue,
         "weight: expected 1 to 2^31 - 513 vocabulary rows, got " +
             std::to_string(weight.shape[0]) +
             (weight.shape[0] == 0 ? " (a sharded parameter that was not gathered?)" : ""));
  }
  const bool rows = weight.strides[1] == 1 && weight.strides[0] >= weight.shape[1];
  const bool columns = weight.strides[0] == 1 && weight.strides[1] >= weight.shape[0];
  if (!rows && !columns) {
    fail(ErrorKind::kValue,
         "weight: expected a stride of 1 in one dimension and rows that do not overlap, got "
         "strides " +
             strides_of(weight) + " for shape " + shape_of(weight));
  }
}

void check_target(const Inputs& inputs, const Options& options) {
  const TensorView& target = inputs.target;
  if (target.dtype != DType::kInt64 && target.dtype != DType::kInt32) {
    fail(ErrorKind::kType,
         std::string("target: expected int64 or int32, got ") + to_string(target.dtype));
  }
  require_ndim("target", target, 1);
  if (target.shape[0] > std::numeric_limits<int32_t>::max() - cpu::kTileTokens) {
    fail(ErrorKind::kValue,
         "tokens: expected at most 2^31 - 65, got " + std::to_string(target.shape[0]));
  }
  if (!options.sequence_parallel && inputs.x.shape[0] != target.shape[0]) {
    fail(ErrorKind::kValue, "tokens: expected x.shape[0] == target.shape[0], got " +
                                std::to_string(inputs.x.shape[0]) + " and " +
                                std::to_string(target.shape[0]));
  }
}

}  // namespace

Inputs checked(const Inputs& inputs, const Options& options) {
  check_x(inputs.x);
  Inputs natural_inputs = inputs;
  natural_inputs.weight = natural(inputs.weight);
  require_device("weight", inputs.weight, inputs.x.device);
  require_device("target", inputs.target, inputs.x.device);
  require_device("temperature", inputs.temperature, inputs.x.device);
  check_weight(inputs.x, natural_inputs.weight);
  check_target(inputs, options);
  check_temperature(inputs, options, inputs.target.shape[0]);
  if (options.vocab_size == 0 || options.vocab_size < -1) {
    fail(ErrorKind::kValue,
         "vocab_size: expected at least 1, got " + std::to_string(options.vocab_size));
  }
  if (options.vocab_start < -1) {
    fail(ErrorKind::kValue,
         "vocab_start: expected at least 0, got " + std::to_string(options.vocab_start));
  }
  return natural_inputs;
}

void check_outputs(const Inputs& inputs, const Outputs& outputs) {
  const int64_t tokens = inputs.target.shape[0];
  const auto check = [&](const char* name, const TensorView& output) {
    require_dtype(name, output, DType::kFloat32);
    require_shape(name, output, tokens, -1);
    require_device(name, output, inputs.x.device);
  };
  check("nll", outputs.nll);
  check("lse", outputs.lse);
  if (outputs.entropy.present()) check("entropy", outputs.entropy);
}

void check_saved(const Inputs& inputs, const Saved& saved) {
  const int64_t tokens = inputs.target.shape[0];
  if (!saved.rows.present()) {
    if (saved.stash.present())
      fail(ErrorKind::kValue, "rows: expected them beside a stash, got nothing");
    return;
  }
  require_dtype("rows", saved.rows, DType::kFloat32);
  require_shape("rows", saved.rows, 6, tokens);
  require_device("rows", saved.rows, inputs.x.device);
  if (tokens > 0 && saved.rows.strides[1] != 1 && tokens > 1) {
    fail(ErrorKind::kValue,
         "rows: expected a stride of 1 between tokens, got strides " + strides_of(saved.rows));
  }
  if (!saved.stash.present()) return;
  require_dtype("stash", saved.stash, inputs.x.dtype);
  require_device("stash", saved.stash, inputs.x.device);
  const int64_t pitch = round_up(tokens, cpu::kTokenPitch);
  require_shape("stash", saved.stash, saved.stash.shape[0], pitch);
  if (pitch > 0 && (saved.stash.strides[1] != 1 ||
                    (saved.stash.strides[0] != pitch && saved.stash.shape[0] > 1))) {
    fail(ErrorKind::kValue, "stash: expected contiguous rows of " + std::to_string(pitch) +
                                ", got strides " + strides_of(saved.stash));
  }
}

TensorView live_stash(const Problem& problem, const TensorView& stash) {
  if (!stash.present()) return stash;
  const int64_t live = problem.live_rows();
  if (stash.shape[0] < live && stash.shape[0] % cpu::kTileVocab != 0) {
    fail(ErrorKind::kValue, "stash: expected at least " + std::to_string(live) +
                                " columns or a multiple of " + std::to_string(cpu::kTileVocab) +
                                ", got " + std::to_string(stash.shape[0]));
  }
  TensorView part = stash;
  part.shape[0] = std::min(stash.shape[0], live);
  return part.shape[0] == 0 ? TensorView{} : part;
}

void check_backward(const Inputs& inputs, const Saved& saved, const Upstream& upstream,
                    const Gradients& gradients) {
  const int64_t tokens = inputs.target.shape[0];
  if (!saved.rows.present()) {
    fail(ErrorKind::kState, "saved: expected the rows of a forward that kept them, got nothing");
  }
  check_saved(inputs, saved);
  const auto check = [&](const char* name, const TensorView& gradient) {
    if (!gradient.present()) return;
    require_dtype(name, gradient, DType::kFloat32);
    require_shape(name, gradient, tokens, -1);
    require_device(name, gradient, inputs.x.device);
  };
  check("gradient of nll", upstream.nll);
  check("gradient of entropy", upstream.entropy);
  check("gradient of lse", upstream.lse);
  if (gradients.x.present()) {
    require_dtype("gradient of x", gradients.x, inputs.x.dtype);
    require_shape("gradient of x", gradients.x, inputs.x.shape[0], inputs.x.shape[1]);
    require_device("gradient of x", gradients.x, inputs.x.device);
  }
  if (gradients.weight.present()) {
    if (gradients.weight.dtype != DType::kFloat32) {
      require_dtype("gradient of weight", gradients.weight, inputs.weight.dtype);
    }
    require_shape("gradient of weight", gradients.weight, inputs.weight.shape[0],
                  inputs.weight.shape[1]);
    require_device("gradient of weight", gradients.weight, inputs.x.device);
  }
  if (!upstream.entropy.present()) return;
  const auto* moments = static_cast<const float*>(saved.rows.data) + 4 * saved.rows.strides[0];
  if (std::find(moments, moments + tokens, static_cast<float>(kNoMoment)) == moments + tokens) {
    return;
  }
  fail(ErrorKind::kState,
       "gradient of entropy: expected a forward that returned the entropy, got one without");
}

Header header_of(const Inputs& inputs, const Options& options, int ranks) {
  Header header;
  header.tokens = inputs.target.shape[0];
  header.x_tokens = inputs.x.shape[0];
  header.hidden = inputs.x.shape[1];
  header.vocab_rows = inputs.weight.shape[0];
  header.vocab_start = options.vocab_start;
  header.vocab_size = options.vocab_size;
  set_text(header.dtype, to_string(inputs.x.dtype));
  header.ignore_index = options.ignore_index;
  header.per_token_temperature = inputs.temperature.present() ? 1 : 0;
  header.temperature =
      inputs.temperature.present() ? 1.0 : static_cast<double>(options.temperature);
  header.sequence_parallel = options.sequence_parallel ? 1 : 0;
  const bool placed = options.vocab_start >= 0 || options.vocab_size >= 0;
  if (ranks > 1 && !placed) header.fingerprint = fingerprint_of(inputs.weight);
  bool any = false;
  for (int64_t token = 0; token < header.tokens; ++token) {
    const int64_t id = integer_at(inputs.target, token);
    if (id == options.ignore_index) continue;
    header.least_target = any ? std::min(header.least_target, id) : id;
    header.most_target = any ? std::max(header.most_target, id) : id;
    any = true;
  }
  return header;
}

void check_targets(const Agreement& agreement, const Inputs& inputs, const Options& options) {
  if (agreement.least_target > agreement.most_target) return;
  if (agreement.least_target >= 0 && agreement.most_target < agreement.vocab_size) return;
  const std::string wanted = "target: expected ignore_index (" +
                             std::to_string(options.ignore_index) + ") or an id in [0, " +
                             std::to_string(agreement.vocab_size) + "), got ";
  for (int64_t token = 0; token < inputs.target.shape[0]; ++token) {
    const int64_t id = integer_at(inputs.target, token);
    if (id == options.ignore_index || (id >= 0 && id < agreement.vocab_size)) continue;
    fail(ErrorKind::kValue, wanted + std::to_string(id) + " at position " + std::to_string(token));
  }
  fail(ErrorKind::kValue, wanted + "ids from " + std::to_string(agreement.least_target) + " to " +
                              std::to_string(agreement.most_target) + " on another rank");
}

}  // namespace logitless
