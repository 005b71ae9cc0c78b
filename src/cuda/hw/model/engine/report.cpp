// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/report.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/scheduler.h"

namespace hw::model {

std::string format(const char* text, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string name_of(const Thread& thread) {
  return format("cluster %d cta %d warp %d lane %d", thread.id.cluster_id, thread.id.cta_rank,
                thread.id.warp, thread.id.lane);
}

std::string name_of(const Site& site) {
  if (site.line() == 0) return "not yet in the instruction layer";
  // "static void Kernel<kN>::load(const Params&, ...) [with ...]": the role is the word before '('.
  const std::string function = site.function_name();
  const size_t end = function.find('(');
  size_t begin = end == std::string::npos ? end : function.find_last_of(": ", end);
  begin = begin == std::string::npos ? 0 : begin + 1;
  const std::string role =
      end == std::string::npos ? function : function.substr(begin, end - begin);
  const char* slash = std::strrchr(site.file_name(), '/');
  return role + ", " + (slash != nullptr ? slash + 1 : site.file_name()) + ":" +
         std::to_string(site.line());
}

std::string shared_name(uint32_t offset) {
  offset &= 0xFFFFFF;
  if (offset < kSharedBase) return format("shared::cta 0x%x", offset);
  return machine->shape.names.at(offset - kSharedBase);
}

void fault(const std::string& what) {
  Machine& m = *machine;
  const Thread* thread = m.current;
  if (!m.failed) {
    m.failed = true;
    m.failure =
        thread != nullptr ? name_of(*thread) + " (" + name_of(thread->site) + "): " + what : what;
  }
  if (thread == nullptr) throw Abandoned{};
  // The thread is left where it is: no destructor runs on its stack.
  m.current = nullptr;
  Context nowhere = thread->context;
  switch_context(nowhere, m.scheduler);
  std::abort();
}

namespace {

std::string describe_barrier(const Thread& thread) {
  const uint32_t offset = thread.wait.a;
  const MBarrier& b = thread.cta->barriers.at(offset);
  std::string text =
      format("waits for %s, parity %u: phase %u is open, %u of %u arrivals missing",
             shared_name(offset).c_str(), thread.wait.b, b.phase, b.pending, b.count);
  if (b.bytes != 0 || b.announced != 0 || b.delivered != 0) {
    text += format(", %lld bytes expected, %lld delivered", static_cast<long long>(b.announced),
                   static_cast<long long>(b.delivered));
  }
  return text;
}

std::string describe_flag(const Thread& thread) {
  const Wait& w = thread.wait;
  return format("waits for %s to reach %llu, it holds %llu",
                machine->memory->name_of(w.flag).c_str(), static_cast<unsigned long long>(w.value),
                static_cast<unsigned long long>(machine->memory->peek(w.flag, w.flag_bytes)));
}

std::string describe_wait(const Thread& thread) {
  switch (thread.wait.stop) {
    case Stop::kBarrier:
      return describe_barrier(thread);
    case Stop::kFlag:
    case Stop::kPeer:
      return describe_flag(thread);
    case Stop::kMeeting:
      return thread.wait.b != 0 ? format("waits at %s (id %u, %u threads)", thread.wait.what,
                                         thread.wait.a, thread.wait.b)
                                : format("waits at %s", thread.wait.what);
    case Stop::kRegisters:
      return format("waits for registers: %u each are more than what others gave back",
                    thread.wait.a);
    default:
      return thread.wait.what;
  }
}

}  // namespace

std::string deadlock_report() {
  constexpr size_t kMostLines = 24;
  const Machine& m = *machine;
  std::map<std::string, int> lanes;  // by warp, place and wait
  std::vector<std::string> order;
  for (const auto& thread : m.threads) {
    if (thread->done || thread->wait.stop == Stop::kNone) continue;
    const std::string line =
        format("cluster %d cta %d warp %d (%s) %s", thread->id.cluster_id, thread->id.cta_rank,
               thread->id.warp, name_of(thread->site).c_str(), describe_wait(*thread).c_str());
    if (lanes[line]++ == 0) order.push_back(line);
  }
  std::string text = "deadlock:";
  for (size_t i = 0; i < order.size() && i < kMostLines; ++i) {
    text += format("\n  %s [%d lane%s]", order[i].c_str(), lanes[order[i]],
                   lanes[order[i]] == 1 ? "" : "s");
  }
  if (order.size() > kMostLines) text += format("\n  and %zu more", order.size() - kMostLines);
  const int clusters = static_cast<int>(m.clusters.size());
  if (m.next_cluster < clusters) {
    text += format("\n  %d of %d clusters have not started: %d fit at once",
                   clusters - m.next_cluster, clusters, m.options.resident_clusters);
  }
  return text;
}

}  // namespace hw::model
