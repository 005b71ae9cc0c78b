// SPDX-License-Identifier: Apache-2.0
// Descriptors of wgmma operands: those that fit a tile give its product, for every swizzle and both
// majors; others give something else, or are refused. That a GPU reads the same wrong bytes is checked
// in gpu/.
#include <cmath>
#include <string>
#include <vector>

#include "cases.h"
#include "gpu/cases.h"
#include "gpu/model_machine.h"

namespace logitless::model_test {
namespace {

/// The first value that is not the product of the two tiles, or nothing.
std::string wrong_value(const Probe& probe, const std::vector<float>& d) {
  const ProbeInputs inputs(probe);
  const auto n = static_cast<size_t>(probe.n);
  for (size_t i = 0; i < d.size(); ++i) {
    double want = 0, magnitudes = 0;
    for (size_t k = 0; k < kProbeK; ++k) {
      const double term =
          value_of(inputs.a[i / n * kProbeK + k]) * value_of(inputs.b[i % n * kProbeK + k]);
      want += term;
      magnitudes += std::abs(term);
    }
    if (magnitudes > 3.4e38) continue;  // may be infinite
    // Cuts of the accumulation: some units of 2^-25 of the terms, or of the smallest f32.
    if (!(std::abs(d[i] - want) <= 2e-6 * magnitudes + 1e-43)) {
      return probe.variant + ": d[" + std::to_string(i / n) + "][" + std::to_string(i % n) +
             "]: expected " + std::to_string(want) + ", got " + std::to_string(d[i]);
    }
  }
  return "";
}

std::string run(const Probe& probe, uint64_t seed, std::string& wrong) {
  ModelMachine machine(seed);
  try {
    wrong = wrong_value(probe, run_probe(machine, probe));
    return "";
  } catch (const std::exception& error) {
    return probe.variant + ": " + error.what();
  }
}

TEST_CASE("operand_probe_sm90: descriptors that fit give the product") {
  for (const Probe& probe : right_probes()) {
    CAPTURE(probe.variant);
    for_seeds(3, [&](uint64_t seed) {
      std::string wrong;
      const std::string fault = run(probe, seed, wrong);
      return fault.empty() ? wrong : fault;
    });
  }
}

TEST_CASE("operand_probe_sm90: each wrong field shows, unused ones do not") {
  for (const Probe& probe : wrong_probes()) {
    CAPTURE(probe.variant);
    std::string wrong;
    CHECK(run(probe, 1, wrong) == "");
    if (probe.expect == Expect::kRight) CHECK(wrong == "");
    if (probe.expect == Expect::kWrong) CHECK(wrong != "");
  }
}

TEST_CASE("operand_probe_sm90: reads outside shared memory are refused") {
  Probe probe =
      right_probe(128, hw::Major::kK, hw::Swizzle::k128, hw::Major::kK, hw::Swizzle::k128);
  probe.b.layout.stride_bytes = 65536;
  std::string wrong;
  const std::string fault = run(probe, 1, wrong);
  CHECK_MESSAGE(fault.find("wgmma B") != std::string::npos, fault);
}

}  // namespace
}  // namespace logitless::model_test
