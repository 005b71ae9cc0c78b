// SPDX-License-Identifier: Apache-2.0
#include "ffi/registry.h"

#include <map>
#include <mutex>
#include <string>

namespace logitless::ffi_glue {

namespace {

struct Registry {
  std::mutex mutex;  // never held across a callback
  std::map<int64_t, std::shared_ptr<Context>> contexts{{0, std::make_shared<Context>()}};
  int64_t next = 1;
};

// Never destroyed: a context may hold the caller's callbacks, whose interpreter is gone by then.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

}  // namespace

int64_t register_context(std::shared_ptr<Group> group, int threads) {
  auto context = std::make_shared<Context>(std::move(group), threads);
  const std::lock_guard lock(registry().mutex);
  registry().contexts.emplace(registry().next, std::move(context));
  return registry().next++;
}

std::shared_ptr<Context> find_context(int64_t number) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().contexts.find(number);
  if (found == registry().contexts.end()) {
    throw Error(
        ErrorKind::kState,
        "context: expected one that was created and not destroyed, got " + std::to_string(number));
  }
  return found->second;
}

void forget_context(int64_t number) {
  std::shared_ptr<Context> last;  // destroyed after the lock is released
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().contexts.find(number);
  if (number == 0 || found == registry().contexts.end()) return;
  last = std::move(found->second);
  registry().contexts.erase(found);
}

}  // namespace logitless::ffi_glue
