// SPDX-License-Identifier: Apache-2.0
// A Plan knows every byte of a call before anything is allocated, and prints itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "logitless/problem.h"

namespace logitless {

// What the plan needs to know of the machine.
struct Machine {
  Device device;
  int32_t threads = 1;      // CPU workers
  bool native_bf16 = true;  // false: bf16 operands are widened to fp32 before a product
};

// A named piece of memory. Offsets are aligned to 64 bytes.
struct Region {
  std::string name;
  int64_t offset = 0;
  int64_t bytes = 0;
};

// A set of regions that live at the same time, one after the other.
class Layout {
 public:
  // Appends a region and returns its index.
  int add(std::string name, int64_t bytes);
  int64_t bytes() const { return bytes_; }
  const std::vector<Region>& regions() const { return regions_; }

 private:
  std::vector<Region> regions_;
  int64_t bytes_ = 0;
};

struct Plan {
  Problem problem;
  Wanted wanted;
  MemoryPolicy policy;
  Machine machine;

  // Kept from forward to backward, allocated by the caller.
  int64_t token_pitch = 0;  // tokens padded to 16: the row length of the stash
  int64_t stash_columns =
      0;                   // vocabulary rows whose exponentials are stashed; the rest is recomputed
  int64_t rows_bytes = 0;  // [6, tokens] float32: k, K, S_rest, S, T, e
  int64_t stash_bytes = 0;  // [stash_columns, token_pitch] of the problem's dtype

  // Needed only while a call runs.
  Layout forward;
  Layout backward;

  int64_t saved_bytes() const { return rows_bytes + stash_bytes; }
  int64_t workspace_bytes() const {
    return forward.bytes() > backward.bytes() ? forward.bytes() : backward.bytes();
  }
  const char* mode() const;  // "forward only", "stash", "recompute" or "hybrid"
  std::string to_string() const;
};

// Columns of the vocabulary that are stashed under `policy`. A closed form of the shape:
// the Python front evaluates the same one on symbolic sizes.
// Throws Error(kValue) naming the minimum where a byte budget cannot hold even recomputation.
int64_t stash_columns(const Problem& problem, const MemoryPolicy& policy);

// The budget of MemoryPolicy::kAuto, in bytes.
inline constexpr int64_t kAutomaticStashBytes = int64_t{1} << 30;

Plan make_plan(const Problem& problem, const Wanted& wanted, const MemoryPolicy& policy,
               const Machine& machine);

// The plan of a backward whose stash is there already; columns beyond it are recomputed.
Plan make_backward_plan(const Problem& problem, const Wanted& wanted, int64_t stash_columns,
                        const Machine& machine);

}  // namespace logitless
