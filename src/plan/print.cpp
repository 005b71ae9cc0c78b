// SPDX-License-Identifier: Apache-2.0
#include <cinttypes>
#include <cstdarg>
#include <cstdio>

#include "logitless/plan.h"

namespace logitless {

namespace {

std::string format(const char* pattern, ...) {
  std::va_list arguments;
  va_start(arguments, pattern);
  char line[256];
  std::vsnprintf(line, sizeof(line), pattern, arguments);
  va_end(arguments);
  return line;
}

std::string print_policy(const MemoryPolicy& policy) {
  switch (policy.kind) {
    case MemoryPolicy::Kind::kAuto:
      return "auto";
    case MemoryPolicy::Kind::kStash:
      return "stash";
    case MemoryPolicy::Kind::kRecompute:
      return "recompute";
    case MemoryPolicy::Kind::kBytes:
      return format("%" PRId64 " bytes", policy.bytes);
  }
  return "unknown";
}

std::string print_layout(const char* title, const Layout& layout) {
  std::string text = format("  %-44s %15" PRId64 " bytes\n", title, layout.bytes());
  for (const Region& region : layout.regions()) {
    text += format("    %-42s %15" PRId64 "\n", region.name.c_str(), region.bytes);
  }
  return text;
}

}  // namespace

const char* Plan::mode() const {
  if (!wanted.backward()) return "forward only";
  if (stash_columns == problem.live_rows()) return "stash";
  return stash_columns == 0 ? "recompute" : "hybrid";
}

std::string Plan::to_string() const {
  const Problem& p = problem;
  std::string text =
      format("plan: %" PRId64 " tokens x %" PRId64 " hidden x %" PRId64 " vocabulary rows [%" PRId64
             ", %" PRId64 ") of %" PRId64 ", %s, %d rank(s)\n",
             p.tokens, p.hidden, p.vocab_rows, p.vocab_start, p.vocab_start + p.vocab_rows,
             p.vocab_size, logitless::to_string(p.dtype), p.ranks);
  text += format("  mode %s (memory: %s), %d threads%s\n", mode(), print_policy(policy).c_str(),
                 machine.threads, machine.native_bf16 ? "" : ", no native bf16 products");
  text += format("  %-44s %15" PRId64 " bytes\n", "saved for backward", saved_bytes());
  text += format("    %-42s %15" PRId64 "\n", "statistics of the rows", rows_bytes);
  text += format("    %-42s %15" PRId64 "\n",
                 format("stash of %" PRId64 " columns", stash_columns).c_str(), stash_bytes);
  text += print_layout("workspace of forward", forward);
  if (wanted.backward()) text += print_layout("workspace of backward", backward);
  text += format("  %-44s %15" PRId64 " bytes\n", "workspace", workspace_bytes());
  return text;
}

}  // namespace logitless
