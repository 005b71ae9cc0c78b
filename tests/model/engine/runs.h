// SPDX-License-Identifier: Apache-2.0
// What the tests of the engines share: tiny kernels, and what their launches must say.
#pragma once

#include <initializer_list>
#include <vector>

#include "cases.h"

namespace logitless::model_test {

using hw::model::Options;
using hw::model::Report;
using hw::model::World;

/// What tiny kernels have in common. Each adds `run`, and its own Params and Smem where it needs them.
template <int kWarps = 1, int kCtas = 1>
struct Kernel {
  struct Params {};
  struct Smem {
    hw::Cell<uint32_t> unused;
  };
  static constexpr int kThreads = 32 * kWarps, kCluster = kCtas;
};

/// Words that a fault must say, all of them.
using Words = std::vector<std::string>;
inline const Words kAnything = {""};

/// What is wrong with a launch that must pass: its fault, if any.
inline std::string passes(const Report& report) { return report.ok ? "" : report.what; }

/// What is wrong with a launch that must end with a fault that says these words.
inline std::string faults(const Report& report, const Words& words) {
  if (report.ok) return "expected a fault, the launch passed";
  for (const std::string& word : words) {
    if (report.what.find(word) == std::string::npos) {
      return "expected '" + word + "' in: " + report.what;
    }
  }
  return "";
}
/// A launch without words must pass.
inline std::string verdict(const Report& report, const Words& words) {
  return words.empty() ? passes(report) : faults(report, words);
}

/// What the launches of a test have in common, besides the kernel and its parameters.
struct Setting {
  int clusters = 1, ranks = 1;
  std::vector<int> hosts = {};
  int seeds = 6;
};

/// Launches K once for every seed, with what `make(world)` gives; clusters are dealt evenly to the ranks.
template <class K, class Make>
void expect_of(const Setting& setting, const Words& words, Make make) {
  for_seeds(setting.seeds, [&](uint64_t seed) {
    World world(setting.ranks, setting.hosts);
    const typename K::Params params = make(world);
    return verdict(
        hw::launch<K>(
            world, setting.clusters, params,
            {.seed = seed, .clusters_per_rank = std::max(1, setting.clusters / setting.ranks)}),
        words);
  });
}
/// The same for kernels that need no memory.
template <class K>
void expect(const typename K::Params& params, const Words& words, const Setting& setting = {}) {
  expect_of<K>(setting, words, [&](World&) { return params; });
}

/// Some orders only some schedules show: `one` must be true for one of the seeds at least.
inline void on_some_seed(int count, const std::function<bool(uint64_t seed)>& one) {
  bool seen = false;
  for (uint64_t seed = 0; seed < static_cast<uint64_t>(count) && !seen; ++seed) seen = one(seed);
  CHECK_MESSAGE(seen, "none of ", count, " seeds shows it");
}

}  // namespace logitless::model_test
