// SPDX-License-Identifier: Apache-2.0
// What is compared between the model and a Hopper GPU: the same kernels with the same inputs on a
// machine, which is either. Products and gradients must agree in every bit; so must probes, whose
// operand descriptors are right or wrong. Exponentials go through ex2.approx on a GPU: there bf16
// neighbours are allowed.
//
// A machine has upload, filled, download and launch; see model_machine.h.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "inputs.h"
#include "kernels/gradient_sm90.h"
#include "kernels/operand_probe_sm90.h"
#include "kernels/product_sm90.h"

namespace logitless::model_test {

enum class Values { kF32, kBf16, kI32 };
inline size_t bytes_of(Values values) { return values == Values::kBf16 ? 2 : 4; }

/// What a kernel has left, as bits.
struct Result {
  std::string name, variant;
  int m, h, v;  // tokens, hidden, vocab; of a probe: 64, 64, N
  Values values;
  std::vector<unsigned char> bytes;
};
template <class T>
std::vector<unsigned char> bytes_from(const std::vector<T>& values) {
  std::vector<unsigned char> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
using Sink = std::function<void(const Result&)>;

/// Of both signs, with a wide range of exponents: the order and the cuts of an accumulation show.
inline std::vector<hw::Bf16> wide_bf16(Random& random, int64_t count, double scale = 1) {
  std::vector<hw::Bf16> values(static_cast<size_t>(count));
  for (auto& value : values) {
    const double a = random(), b = random();
    value = to_bf16(static_cast<float>((a * a * a * 8 + b * 1e-3) * scale));
  }
  return values;
}

template <class Machine>
hw::TensorMap matrix(Machine& machine, const std::vector<hw::Bf16>& values, int rows, int columns,
                     int box_rows, int box_columns = 64, hw::Swizzle swizzle = hw::Swizzle::k128) {
  return hw::tensor_map(machine.upload(values), {.rows = static_cast<uint64_t>(rows),
                                                 .columns = static_cast<uint64_t>(columns),
                                                 .pitch_bytes = static_cast<uint64_t>(columns) * 2,
                                                 .box_rows = static_cast<uint32_t>(box_rows),
                                                 .box_columns = static_cast<uint32_t>(box_columns),
                                                 .swizzle = swizzle});
}

// --- products ----------------------------------------------------------------------------------------

struct ProductCase {
  int tokens, hidden, vocab;
};

template <class Machine, int kN, bool kRaw>
void run_product(const ProductCase& c, const Sink& sink) {
  using Kernel = ProductSm90<kN, kRaw>;
  Machine machine;
  Random random(kN + c.hidden);
  const int blocks = (c.tokens + Kernel::kBlockRows - 1) / Kernel::kBlockRows;
  const int n_tiles = (c.vocab + kN - 1) / kN, pitch = (c.vocab + 7) / 8 * 8;
  const int64_t e_values = int64_t{c.tokens} * pitch, raw_values = int64_t{c.tokens} * c.vocab;
  const auto e = machine.filled(e_values, hw::Bf16{0});
  typename Kernel::Params p{};
  p.x = matrix(machine, wide_bf16(random, int64_t{c.tokens} * c.hidden), c.tokens, c.hidden, 128);
  p.w = matrix(machine, wide_bf16(random, int64_t{c.vocab} * c.hidden, 0.03), c.vocab, c.hidden,
               kN / 2);
  p.e = hw::tensor_map(e, {.rows = static_cast<uint64_t>(c.tokens),
                           .columns = static_cast<uint64_t>(c.vocab),
                           .pitch_bytes = static_cast<uint64_t>(pitch) * 2,
                           .box_rows = 64,
                           .box_columns = 64});
  p.raw = machine.filled(raw_values, 0.0F);
  p.anchor = machine.filled(c.tokens, int32_t{0});
  p.partial = machine.filled(int64_t{n_tiles} * c.tokens, 0.0F);
  p.sum = machine.filled(c.tokens, 0.0F);
  p.anchor_ready = machine.filled(blocks, uint32_t{0});
  p.tiles_done = machine.filled(blocks, uint32_t{0});
  p.claimed = machine.filled(1, uint32_t{0});
  p.epoch = machine.filled(1, uint32_t{1});
  p.tokens = c.tokens;
  p.hidden = c.hidden;
  p.vocab = c.vocab;
  p.scale = 1.1F;
  machine.template launch<Kernel>(3, p);

  const auto report = [&](const std::string& what, Values values,
                          const std::vector<unsigned char>& bytes) {
    sink({"product_sm90", what + " N " + std::to_string(kN), c.tokens, c.hidden, c.vocab, values,
          bytes});
  };
  if constexpr (kRaw) {
    report("raw", Values::kF32, bytes_from(machine.download(p.raw, raw_values)));
  } else {
    report("exponentials", Values::kBf16, bytes_from(machine.download(e, e_values)));
    report("anchors", Values::kI32, bytes_from(machine.download(p.anchor, c.tokens)));
    // Exponentials differ, and so do their sums; but each is that of its partial sums in order: 0.
    auto sum = machine.download(p.sum, c.tokens);
    const auto partial = machine.download(p.partial, int64_t{n_tiles} * c.tokens);
    for (size_t row = 0; row < sum.size(); ++row) {
      float in_order = 0;
      for (size_t i = row; i < partial.size(); i += sum.size()) in_order += partial[i];
      sum[row] -= in_order;
    }
    report("sums without their parts", Values::kF32, bytes_from(sum));
  }
}

template <class Machine, int kN>
void run_products(const Sink& sink) {
  run_product<Machine, kN, true>({.tokens = 200, .hidden = 520, .vocab = 301}, sink);
  run_product<Machine, kN, true>({.tokens = 131, .hidden = 1048, .vocab = 264}, sink);
  run_product<Machine, kN, false>({.tokens = 300, .hidden = 520, .vocab = 523}, sink);
}

// --- gradients ---------------------------------------------------------------------------------------

struct GradientCase {
  const char* variant;
  int m, n, k;  // of the product: each is tokens, hidden or vocab
  int tokens, hidden, vocab;
};

template <class Machine, int kN, hw::Major kA, hw::Major kB>
void run_gradient(const GradientCase& c, const Sink& sink) {
  using Kernel = GradientSm90<kN, kA, kB>;
  Machine machine;
  Random random(kN + c.k);
  const auto operand = [&](hw::Major major, int mn, int k, int tile_mn) {
    // The columns of a matrix in memory come in multiples of eight; those past the end are zero here.
    const bool rows = major == hw::Major::kK;
    const int columns = ((rows ? k : mn) + 7) / 8 * 8, count = rows ? mn : k;
    auto values = wide_bf16(random, int64_t{count} * columns);
    for (size_t i = 0; i < values.size(); ++i) {
      if (static_cast<int>(i % static_cast<size_t>(columns)) >= (rows ? k : mn)) values[i] = {0};
    }
    return matrix(machine, values, count, columns, rows ? tile_mn : 64);
  };
  typename Kernel::Params p{};
  p.a = operand(kA, c.m, c.k, Kernel::kM);
  p.b = operand(kB, c.n, c.k, kN);
  p.d = machine.filled(int64_t{c.m} * c.n / 2, hw::Vec2{0, 0});
  p.m = c.m;
  p.n = c.n;
  p.k = c.k;
  machine.template launch<Kernel>(3, p);
  sink({"gradient_sm90", c.variant + (" N " + std::to_string(kN)), c.tokens, c.hidden, c.vocab,
        Values::kF32, bytes_from(machine.download(p.d, int64_t{c.m} * c.n / 2))});
}

template <class Machine, int kN>
void run_gradients(const Sink& sink) {
  constexpr auto kK = hw::Major::kK, kMn = hw::Major::kMn;
  const auto input = [](int tokens, int hidden, int vocab) {
    return GradientCase{"input gradient", tokens, hidden, vocab, tokens, hidden, vocab};
  };
  const auto weight = [](int tokens, int hidden, int vocab) {
    return GradientCase{"weight gradient", vocab, hidden, tokens, tokens, hidden, vocab};
  };
  run_gradient<Machine, kN, kK, kMn>(input(200, 264, 523), sink);
  run_gradient<Machine, kN, kK, kMn>(input(77, 136, 1101), sink);
  run_gradient<Machine, kN, kMn, kMn>(weight(523, 264, 203), sink);
  run_gradient<Machine, kN, kMn, kMn>(weight(1101, 136, 69), sink);
}

// --- probes of operand descriptors -------------------------------------------------------------------

inline constexpr int kProbeM = 64, kProbeK = 64, kProbeSteps = kProbeK / 16;

/// How a tile was brought to shared memory, and what its descriptors say of it.
struct ProbeOperand {
  hw::Major tile_major;
  hw::Swizzle tile_swizzle;
  hw::OperandLayout layout;
  std::array<uint32_t, kProbeSteps> starts;  // of each instruction, from the tile on
  uint32_t base = 0;                         // base offset of the swizzle's pattern
};
enum class Expect { kRight, kWrong };
struct Probe {
  std::string variant;
  Expect expect;
  int n;
  hw::Major major_a, major_b;  // of the instruction
  ProbeOperand a, b;
  double scale = 1;  // of the values
};

/// The descriptors that fit a tile of mn x 64: boxes as wide as the swizzle, one after another.
inline ProbeOperand fitting(hw::Major major, hw::Swizzle swizzle, int mn) {
  const uint32_t row = hw::swizzle_bytes(swizzle), width = row / 2, group = 8 * row;
  const bool none = swizzle == hw::Swizzle::kNone;
  ProbeOperand o{major, swizzle, {}, {}};
  if (major == hw::Major::kK) {
    const uint32_t box = static_cast<uint32_t>(mn) * row;
    // Only without swizzle do the 16 of an instruction take two boxes.
    o.layout = {.leading_bytes = none ? box : 16, .stride_bytes = group, .swizzle = swizzle};
    for (uint32_t i = 0; i < kProbeSteps; ++i) {
      o.starts[i] = 16 * i / width * box + 16 * i % width * 2;
    }
  } else {
    const uint32_t box = kProbeK * row;
    o.layout = {.leading_bytes = none ? group : box,
                .stride_bytes = none ? box : group,
                .swizzle = swizzle};
    for (uint32_t i = 0; i < kProbeSteps; ++i) o.starts[i] = 2 * group * i;
  }
  return o;
}

inline Probe right_probe(int n, hw::Major a, hw::Swizzle swizzle_a, hw::Major b,
                         hw::Swizzle swizzle_b) {
  const auto name = [](hw::Major major, hw::Swizzle swizzle) {
    return std::string(major == hw::Major::kK ? "K" : "MN") + "-major " +
           (swizzle == hw::Swizzle::kNone ? "unswizzled"
                                          : std::to_string(hw::swizzle_bytes(swizzle)) + " B");
  };
  return {"N " + std::to_string(n) + ": A " + name(a, swizzle_a) + ", B " + name(b, swizzle_b),
          Expect::kRight,
          n,
          a,
          b,
          fitting(a, swizzle_a, kProbeM),
          fitting(b, swizzle_b, n)};
}

/// `right` with a change that makes it wrong, or (kRight) should not matter.
inline Probe changed(Probe right, const char* variant, const std::function<void(Probe&)>& change,
                     Expect expect = Expect::kWrong) {
  right.variant += ": " + std::string(variant);
  right.expect = expect;
  change(right);
  return right;
}

inline std::vector<Probe> right_probes() {
  using hw::Swizzle;
  constexpr auto kK = hw::Major::kK, kMn = hw::Major::kMn;
  std::vector<Probe> probes;
  for (const Swizzle swizzle : {Swizzle::k128, Swizzle::k64, Swizzle::k32, Swizzle::kNone}) {
    probes.push_back(right_probe(128, kK, swizzle, kK, swizzle));
    probes.push_back(right_probe(128, kMn, swizzle, kMn, swizzle));
  }
  probes.push_back(right_probe(128, kK, Swizzle::k128, kMn, Swizzle::k64));
  probes.push_back(right_probe(128, kMn, Swizzle::k32, kK, Swizzle::kNone));
  probes.push_back(right_probe(64, kK, Swizzle::k128, kK, Swizzle::k128));
  probes.push_back(right_probe(192, kK, Swizzle::k64, kMn, Swizzle::k32));
  probes.push_back(right_probe(256, kK, Swizzle::k128, kMn, Swizzle::k128));
  // Sums below 2^-126 and above 2^128.
  for (const auto& [name, scale] : {std::pair{"tiny", 1e-21}, std::pair{"huge", 4e18}}) {
    Probe probe = right_probe(128, kK, Swizzle::k128, kK, Swizzle::k128);
    probe.variant += std::string(": ") + name + " values";
    probe.scale = scale;
    probes.push_back(probe);
  }
  return probes;
}

inline std::vector<Probe> wrong_probes() {
  using hw::Swizzle;
  constexpr auto kK = hw::Major::kK, kMn = hw::Major::kMn;
  const Probe rows = right_probe(128, kK, Swizzle::k128, kK, Swizzle::k128);
  const Probe rows_64 = right_probe(128, kK, Swizzle::k64, kK, Swizzle::k64);
  const Probe rows_none = right_probe(128, kK, Swizzle::kNone, kK, Swizzle::kNone);
  const Probe columns = right_probe(128, kMn, Swizzle::k128, kMn, Swizzle::k128);
  const Probe columns_32 = right_probe(128, kMn, Swizzle::k32, kMn, Swizzle::k32);
  const Probe columns_none = right_probe(128, kMn, Swizzle::kNone, kMn, Swizzle::kNone);
  const auto swap = [](hw::OperandLayout& layout) {
    std::swap(layout.leading_bytes, layout.stride_bytes);
  };
  const auto move = [](ProbeOperand& o, uint32_t bytes) {
    for (auto& start : o.starts) start += bytes;
  };
  return {
      changed(rows, "stride of B 512", [](Probe& p) { p.b.layout.stride_bytes = 512; }),
      changed(rows, "stride of B 2048", [](Probe& p) { p.b.layout.stride_bytes = 2048; }),
      changed(rows, "stride of A 0", [](Probe& p) { p.a.layout.stride_bytes = 0; }),
      changed(rows, "stride of A 1040", [](Probe& p) { p.a.layout.stride_bytes = 1040; }),
      changed(
          rows, "leading of A 4096", [](Probe& p) { p.a.layout.leading_bytes = 4096; },
          Expect::kRight),
      changed(rows, "steps of A 16 bytes", [](Probe& p) { p.a.starts = {0, 16, 32, 48}; }),
      changed(rows, "steps of B 2048 bytes", [](Probe& p) { p.b.starts = {0, 2048, 4096, 6144}; }),
      changed(rows, "B read with 64 B swizzle",
              [](Probe& p) { p.b.layout.swizzle = Swizzle::k64; }),
      changed(rows, "B read with 32 B swizzle",
              [](Probe& p) { p.b.layout.swizzle = Swizzle::k32; }),
      changed(rows, "B read unswizzled", [](Probe& p) { p.b.layout.swizzle = Swizzle::kNone; }),
      changed(rows, "A read unswizzled, leading 2048",
              [](Probe& p) {
                p.a.layout = {
                    .leading_bytes = 2048, .stride_bytes = 256, .swizzle = Swizzle::kNone};
              }),
      changed(rows, "A starts 16 rows late", [&](Probe& p) { move(p.a, 2048); }),
      changed(rows, "B marked MN-major", [](Probe& p) { p.major_b = kMn; }),
      changed(rows, "A marked MN-major", [](Probe& p) { p.major_a = kMn; }),
      changed(rows_64, "stride of B 1024", [](Probe& p) { p.b.layout.stride_bytes = 1024; }),
      changed(rows_64, "A read with 128 B swizzle",
              [](Probe& p) { p.a.layout.swizzle = Swizzle::k128; }),
      changed(rows_none, "offsets of B exchanged", [&](Probe& p) { swap(p.b.layout); }),
      changed(rows_none, "leading of A 0", [](Probe& p) { p.a.layout.leading_bytes = 0; }),
      changed(columns, "offsets of B exchanged", [&](Probe& p) { swap(p.b.layout); }),
      changed(
          columns, "leading of A 0, which has one box",
          [](Probe& p) { p.a.layout.leading_bytes = 0; }, Expect::kRight),
      changed(columns, "leading of B 0", [](Probe& p) { p.b.layout.leading_bytes = 0; }),
      changed(columns, "stride of A 2048", [](Probe& p) { p.a.layout.stride_bytes = 2048; }),
      changed(columns, "steps of B 32 bytes", [](Probe& p) { p.b.starts = {0, 32, 64, 96}; }),
      changed(columns, "B read with 64 B swizzle",
              [](Probe& p) { p.b.layout.swizzle = Swizzle::k64; }),
      changed(columns, "B read unswizzled", [](Probe& p) { p.b.layout.swizzle = Swizzle::kNone; }),
      changed(columns, "A marked K-major", [](Probe& p) { p.major_a = kK; }),
      changed(columns_32, "leading of B 1024", [](Probe& p) { p.b.layout.leading_bytes = 1024; }),
      changed(columns_none, "offsets of B exchanged", [&](Probe& p) { swap(p.b.layout); }),
      // The row of the swizzle's pattern is that of the address less the base offset.
      changed(rows, "A starts 4 rows late", [&](Probe& p) { move(p.a, 512); }),
      changed(rows, "B starts 1 row late", [&](Probe& p) { move(p.b, 128); }),
      changed(rows, "A starts 4 rows late, base offset 4",
              [&](Probe& p) {
                move(p.a, 512);
                p.a.base = 4;
              }),
      changed(rows, "B starts 1 row late, base offset 3",
              [&](Probe& p) {
                move(p.b, 128);
                p.b.base = 3;
              }),
      changed(rows_64, "base offset of A 1", [](Probe& p) { p.a.base = 1; }),
      changed(columns, "base offset of B 5", [](Probe& p) { p.b.base = 5; }),
  };
}

/// The values of a probe's operands, mn x 64, row-major.
struct ProbeInputs {
  explicit ProbeInputs(const Probe& probe) {
    Random random(17);
    a = wide_bf16(random, int64_t{kProbeM} * kProbeK, probe.scale);
    b = wide_bf16(random, int64_t{probe.n} * kProbeK, probe.scale);
    guard = wide_bf16(random, 32768 / 2, probe.scale);
  }
  std::vector<hw::Bf16> a, b, guard;
};

template <class Machine, int kN, hw::Major kA, hw::Major kB>
std::vector<float> run_probe_as(Machine& machine, const Probe& probe) {
  using Kernel = OperandProbeSm90<kN, kA, kB>;
  const ProbeInputs inputs(probe);
  static_assert(Kernel::kGuardBytes == 32768 && Kernel::kSteps == kProbeSteps);
  const auto source = [&](const ProbeOperand& o, const std::vector<hw::Bf16>& values, int mn) {
    const int width = static_cast<int>(hw::swizzle_bytes(o.tile_swizzle)) / 2;
    if (o.tile_major == hw::Major::kK) {
      return typename Kernel::Source{
          matrix(machine, values, mn, kProbeK, mn, width, o.tile_swizzle), kProbeK / width, width};
    }
    std::vector<hw::Bf16> turned(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      turned[i % kProbeK * static_cast<size_t>(mn) + i / kProbeK] = values[i];
    }
    return typename Kernel::Source{
        matrix(machine, turned, kProbeK, mn, kProbeK, width, o.tile_swizzle), mn / width, width};
  };
  typename Kernel::Params p{};
  p.a = source(probe.a, inputs.a, kProbeM);
  p.b = source(probe.b, inputs.b, kN);
  p.guard = machine.upload(inputs.guard);
  for (size_t i = 0; i < kProbeSteps; ++i) {
    const auto word = [&](const ProbeOperand& o) {
      return hw::wgmma_operand(o.starts[i], o.layout) | hw::WgmmaOperand::Base::put(o.base);
    };
    p.a_words[i] = word(probe.a);
    p.b_words[i] = word(probe.b);
  }
  p.d = machine.filled(int64_t{kProbeM} * kN, 0.0F);
  machine.template launch<Kernel>(1, p);
  return machine.download(p.d, int64_t{kProbeM} * kN);
}

template <class Machine>
std::vector<float> run_probe(Machine& machine, const Probe& probe) {
  constexpr auto kK = hw::Major::kK, kMn = hw::Major::kMn;
  const bool a_k = probe.major_a == kK, b_k = probe.major_b == kK;
  if (probe.n == 128) {
    return a_k   ? b_k ? run_probe_as<Machine, 128, kK, kK>(machine, probe)
                       : run_probe_as<Machine, 128, kK, kMn>(machine, probe)
           : b_k ? run_probe_as<Machine, 128, kMn, kK>(machine, probe)
                 : run_probe_as<Machine, 128, kMn, kMn>(machine, probe);
  }
  if (probe.n == 64 && a_k && b_k) return run_probe_as<Machine, 64, kK, kK>(machine, probe);
  if (probe.n == 192 && a_k && !b_k) return run_probe_as<Machine, 192, kK, kMn>(machine, probe);
  if (probe.n == 256 && a_k && !b_k) return run_probe_as<Machine, 256, kK, kMn>(machine, probe);
  throw std::invalid_argument("probe " + probe.variant + ": no kernel for its N and majors");
}

// --- all ---------------------------------------------------------------------------------------------

template <class Machine>
void run_cases(const Sink& sink) {
  run_products<Machine, 64>(sink);
  run_products<Machine, 128>(sink);
  run_products<Machine, 192>(sink);
  run_products<Machine, 256>(sink);
  run_gradients<Machine, 64>(sink);
  run_gradients<Machine, 128>(sink);
  run_gradients<Machine, 192>(sink);
  run_gradients<Machine, 256>(sink);
  auto probes = right_probes();
  for (auto& probe : wrong_probes()) probes.push_back(probe);
  for (const Probe& probe : probes) {
    Machine machine;
    sink({"operand_probe_sm90", probe.variant, kProbeM, kProbeK, probe.n, Values::kF32,
          bytes_from(run_probe(machine, probe))});
  }
}

}  // namespace logitless::model_test
