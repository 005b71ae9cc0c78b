// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/global_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "cuda/hw/model/engine/meeting.h"

namespace hw::model {

// --- allocations -----------------------------------------------------------------------------------

World::World(int ranks, std::vector<int> hosts)
    : memory_(std::make_unique<GlobalMemory>(ranks, std::move(hosts))) {}
World::~World() = default;
int World::ranks() const { return memory_->ranks(); }
void* World::raw(const std::string& name, int64_t bytes, int rank) {
  return memory_->allocate(name, static_cast<size_t>(bytes), rank);
}
std::vector<void*> World::raw_symmetric(const std::string& name, int64_t bytes) {
  return memory_->allocate_symmetric(name, static_cast<size_t>(bytes));
}
void* World::raw_multicast(const std::vector<void*>& members) {
  return memory_->make_multicast(members);
}
void World::write(void* p, const void* from, size_t bytes) { memory_->host_write(p, from, bytes); }
void World::read(const void* p, void* to, size_t bytes) const { memory_->host_read(p, to, bytes); }

GlobalMemory::GlobalMemory(int ranks, std::vector<int> hosts) : hosts_(std::move(hosts)) {
  if (ranks < 1) throw std::invalid_argument(format("World: expected ranks >= 1, got %d", ranks));
  if (hosts_.empty()) hosts_.assign(static_cast<size_t>(ranks), 0);
  if (static_cast<int>(hosts_.size()) != ranks) {
    throw std::invalid_argument(
        format("World: expected a host for each of %d ranks, got %zu", ranks, hosts_.size()));
  }
}
GlobalMemory::~GlobalMemory() {
  for (auto& [start, region] : regions_) std::free(region->data);
  for (auto& [start, range] : multicast_) {
    munmap(reinterpret_cast<void*>(start), range.bytes);  // NOLINT(performance-no-int-to-ptr)
  }
}

void* GlobalMemory::allocate(const std::string& name, size_t bytes, int rank, int symmetric) {
  if (rank < 0 || rank >= ranks()) {
    throw std::invalid_argument(
        format("%s: expected a rank in [0, %d), got %d", name.c_str(), ranks(), rank));
  }
  constexpr size_t kAlign = 256;  // what a device allocator gives at least
  const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign + kAlign;
  auto region = std::make_unique<Region>();
  region->name = ranks() > 1 ? format("%s[rank %d]", name.c_str(), rank) : name;
  region->rank = rank;
  region->bytes = bytes;
  region->data = static_cast<unsigned char*>(std::aligned_alloc(kAlign, rounded));
  region->symmetric = symmetric;
  region->written.assign((bytes + 1) / 2, 0);
  std::memset(region->data, 0xFF, rounded);
  void* start = region->data;
  regions_[reinterpret_cast<uintptr_t>(start)] = std::move(region);
  return start;
}

std::vector<void*> GlobalMemory::allocate_symmetric(const std::string& name, size_t bytes) {
  const int number = static_cast<int>(symmetric_.size());
  std::vector<void*> all;
  symmetric_.emplace_back();
  for (int rank = 0; rank < ranks(); ++rank) {
    all.push_back(allocate(name, bytes, rank, number));
    symmetric_.back().push_back(find(all.back()));
  }
  return all;
}

void* GlobalMemory::make_multicast(const std::vector<void*>& members) {
  const Region* first = members.empty() ? nullptr : find(members[0]);
  if (first == nullptr) throw std::invalid_argument("multicast: expected allocations of a World");
  MulticastRange range{first->bytes, {}};
  for (void* member : members) range.members.push_back(static_cast<char*>(member));
  // Addresses of its own that only multimem instructions may use.
  void* p =
      mmap(nullptr, range.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  multicast_[reinterpret_cast<uintptr_t>(p)] = std::move(range);
  return p;
}

Region* GlobalMemory::find(const void* p) const {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (last_ != nullptr) {
    const auto start = reinterpret_cast<uintptr_t>(last_->data);
    if (address >= start && address < start + last_->bytes) return last_;
  }
  auto next = regions_.upper_bound(address);
  if (next == regions_.begin()) return nullptr;
  Region* region = std::prev(next)->second.get();
  if (address >= reinterpret_cast<uintptr_t>(region->data) + region->bytes) return nullptr;
  last_ = region;
  return region;
}

std::string GlobalMemory::name_of(const void* p) const {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (p == nullptr) return "a null address";
  for (const auto& [start, range] : multicast_) {
    if (address >= start && address < start + range.bytes) {
      return "the multicast address of " + name_of(range.members[0] + (address - start));
    }
  }
  auto next = regions_.upper_bound(address);
  if (next == regions_.begin()) return "an address before every allocation";
  const Region& region = *std::prev(next)->second;
  const size_t offset = address - reinterpret_cast<uintptr_t>(region.data);
  if (offset < region.bytes) return region.name + format("+%zu", offset);
  return format("byte %zu of %s, which has %zu", offset, region.name.c_str(), region.bytes);
}

Region& GlobalMemory::region_of(const void* p, size_t bytes, const Gpu& by, const char* what) {
  Region* region = find(p);
  if (region == nullptr ||
      static_cast<const unsigned char*>(p) + bytes > region->data + region->bytes) {
    fault(
        format("%s of %zu bytes at %s: outside every allocation", what, bytes,
               name_of(static_cast<const char*>(p) + (region == nullptr ? 0 : bytes - 1)).c_str()));
  }
  if (hosts_[region->rank] != hosts_[by.rank]) {
    fault(format("%s at %s: rank %d cannot reach the memory of rank %d, which is on another host",
                 what, name_of(p).c_str(), by.rank, region->rank));
  }
  return *region;
}

char* GlobalMemory::symmetric_peer(void* p, size_t bytes, int peer, const char* what) {
  const Region* region = find(p);
  if (region == nullptr || region->symmetric < 0) {
    fault(format("%s: %s is not symmetric memory", what, name_of(p).c_str()));
  }
  if (peer < 0 || peer >= ranks())
    fault(format("%s: expected a rank in [0, %d), got %d", what, ranks(), peer));
  const size_t offset = static_cast<unsigned char*>(p) - region->data;
  if (offset + bytes > region->bytes) {
    fault(format("%s: %zu bytes at %s are more than the allocation holds", what, bytes,
                 name_of(p).c_str()));
  }
  return reinterpret_cast<char*>(symmetric_[region->symmetric][peer]->data) + offset;
}

std::vector<char*> GlobalMemory::multicast_members(const void* p, size_t bytes, const char* what) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  for (const auto& [start, range] : multicast_) {
    if (address < start || address + bytes > start + range.bytes) continue;
    if (address % bytes != 0) fault(format("%s: not aligned to %zu bytes", what, bytes));
    std::vector<char*> places;
    for (char* member : range.members) places.push_back(member + (address - start));
    return places;
  }
  fault(format("%s at %s: not a multicast address", what, name_of(p).c_str()));
}

void GlobalMemory::host_write(void* p, const void* from, size_t bytes) {
  Region* region = find(p);
  if (bytes == 0) return;
  const size_t offset = region == nullptr ? 0 : static_cast<unsigned char*>(p) - region->data;
  if (region == nullptr || offset + bytes > region->bytes) {
    throw std::invalid_argument("World: write outside an allocation: " + name_of(p));
  }
  std::memcpy(p, from, bytes);
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) region->written[i] = 1;
}
void GlobalMemory::host_read(const void* p, void* to, size_t bytes) const {
  const Region* region = find(p);
  if (bytes == 0) return;
  if (region == nullptr ||
      static_cast<const unsigned char*>(p) + bytes > region->data + region->bytes) {
    throw std::invalid_argument("World: read outside an allocation: " + name_of(p));
  }
  std::memcpy(to, p, bytes);
}

void GlobalMemory::begin_run() {
  flags_.clear();
  for (auto& [start, region] : regions_) {
    region->writes.assign(region->written.size(), Mark{});
    region->reads.assign(region->written.size(), Mark{});
  }
}
void GlobalMemory::end_run() {
  for (auto& [start, region] : regions_) {
    region->writes = {};
    region->reads = {};
  }
}

// --- levels of the hierarchy ---------------------------------------------------------------------------

namespace {

void put_word(Words& words, uintptr_t address, uint32_t value, uint32_t mask, int cta) {
  StoredWord& word = words[address];
  word.value = (word.value & ~mask) | (value & mask);
  word.mask |= mask;
  word.cta = cta;
}
uint32_t byte_mask(size_t first, size_t count) {
  const uint64_t ones = (uint64_t{1} << (8 * count)) - 1;
  return static_cast<uint32_t>(ones << (8 * first));
}
/// Calls f(word address, byte of the word, bytes, place in the data) for every word that is touched.
template <class F>
void each_word(uintptr_t p, size_t bytes, F f) {
  for (size_t done = 0; done < bytes;) {
    const size_t first = (p + done) % 4;
    const size_t count = std::min<size_t>(4 - first, bytes - done);
    f((p + done) - first, first, count, done);
    done += count;
  }
}
void apply(const Words& words, uintptr_t word, uint32_t& value, uint32_t& covered) {
  if (words.empty()) return;
  const auto found = words.find(word);
  if (found == words.end()) return;
  value = (value & ~found->second.mask) | (found->second.value & found->second.mask);
  covered |= found->second.mask;
}
uint32_t word_in_memory(uintptr_t word) {
  uint32_t value;
  // Words are keyed by their address.
  const auto* p = reinterpret_cast<const void*>(word);  // NOLINT(performance-no-int-to-ptr)
  std::memcpy(&value, p, 4);
  return value;
}

}  // namespace

void hold_back(Words& words, uintptr_t p, const void* from, size_t bytes, int cta) {
  each_word(p, bytes, [&](uintptr_t word, size_t first, size_t count, size_t done) {
    uint32_t value = 0;
    std::memcpy(reinterpret_cast<char*>(&value) + first, static_cast<const char*>(from) + done,
                count);
    put_word(words, word, value, byte_mask(first, count), cta);
  });
}
void merge_words(Words& into, Words& from) {
  for (const auto& [address, word] : from) put_word(into, address, word.value, word.mask, word.cta);
  from.clear();
}

void GlobalMemory::write_memory(char* p, const void* from, size_t bytes) {
  std::memcpy(p, from, bytes);
  Region* region = find(p);
  const size_t offset = reinterpret_cast<unsigned char*>(p) - region->data;
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) region->written[i] = 1;
}

void GlobalMemory::drain(Words& words) {
  const bool any = !words.empty();
  for (const auto& [address, word] : words) {
    for (size_t half = 0; half < 2; ++half) {
      if ((word.mask >> (16 * half) & 0xFFFF) == 0) continue;
      const auto value = static_cast<uint16_t>(word.value >> (16 * half));
      auto* p = reinterpret_cast<char*>(address + 2 * half);  // NOLINT(performance-no-int-to-ptr)
      write_memory(p, &value, 2);
    }
  }
  words.clear();
  if (any) poll_flags();
}

bool GlobalMemory::drain_everything() {
  Machine& m = *machine;
  bool any = false;
  ++m.now;
  for (auto& thread : m.threads) {
    any |= !thread->stores.empty();
    merge_words(thread->cta->stores, thread->stores);
  }
  for (Cta* cta : m.ctas) {
    any |= !cta->stores.empty();
    merge_words(cta->cluster->gpu->stores, cta->stores);
  }
  for (auto& gpu : m.gpus) {
    any |= !gpu->stores.empty();
    drain(gpu->stores);
  }
  return any;
}
void GlobalMemory::drain_some() {
  Machine& m = *machine;
  ++m.now;
  Thread& thread = *m.threads[random_below(static_cast<uint32_t>(m.threads.size()))];
  switch (random_below(3)) {
    case 0:
      merge_words(thread.cta->stores, thread.stores);
      break;
    case 1:
      merge_words(thread.gpu->stores, thread.cta->stores);
      break;
    default:
      drain(thread.gpu->stores);
  }
}

namespace {

/// The bytes must have been written by somebody.
void check_written(const GlobalMemory& memory, const Region& region, const char* p, size_t bytes,
                   uintptr_t word, uint32_t covered, size_t first, size_t count, const char* what) {
  for (size_t byte = first; byte < first + count; byte += 2) {
    if ((covered >> (8 * byte) & 0xFF) != 0) continue;
    const size_t half = (word + byte - reinterpret_cast<uintptr_t>(region.data)) / 2;
    if (region.written[half] != 0) continue;
    fault(format("%s of %zu bytes at %s: nobody has written byte %zu", what, bytes,
                 memory.name_of(p).c_str(), word + byte - reinterpret_cast<uintptr_t>(p)));
  }
}

}  // namespace

void GlobalMemory::read_generic(const Thread& thread, const char* p, void* to, size_t bytes) {
  constexpr auto kWhat = "ld.global";
  const Region& region = region_of(p, bytes, *thread.gpu, kWhat);
  each_word(reinterpret_cast<uintptr_t>(p), bytes,
            [&](uintptr_t word, size_t first, size_t count, size_t done) {
              uint32_t value = word_in_memory(word), covered = 0;
              apply(thread.gpu->stores, word, value, covered);
              apply(thread.cta->stores, word, value, covered);
              apply(thread.stores, word, value, covered);
              check_written(*this, region, p, bytes, word, covered, first, count, kWhat);
              std::memcpy(static_cast<char*>(to) + done, reinterpret_cast<char*>(&value) + first,
                          count);
            });
}
void GlobalMemory::read_gpu(const Gpu& gpu, const char* p, void* to, size_t bytes,
                            const char* what) {
  const Region& region = region_of(p, bytes, gpu, what);
  each_word(reinterpret_cast<uintptr_t>(p), bytes,
            [&](uintptr_t word, size_t first, size_t count, size_t done) {
              uint32_t value = word_in_memory(word), covered = 0;
              apply(gpu.stores, word, value, covered);
              check_written(*this, region, p, bytes, word, covered, first, count, what);
              std::memcpy(static_cast<char*>(to) + done, reinterpret_cast<char*>(&value) + first,
                          count);
            });
}

void GlobalMemory::add_f32(const Gpu& gpu, char* p, float value) {
  float old;
  read_gpu(gpu, p, &old, 4, "a reduction");
  const float sum = old + value;
  for (auto& other : machine->gpus) other->stores.erase(reinterpret_cast<uintptr_t>(p));
  write_memory(p, &sum, 4);
}

// --- who did what where --------------------------------------------------------------------------------

void GlobalMemory::check_marks(const Cta& cta, const Clock& known, const Region& region,
                               const std::vector<Mark>& marks, const char* p, size_t bytes,
                               const char* what, const char* relation, bool add) const {
  const size_t offset = reinterpret_cast<const unsigned char*>(p) - region.data;
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) {
    const Mark& mark = marks[i];
    if (mark.cta < 0 || mark.cta == cta.index || (add && mark.add)) continue;
    if (mark.time <= known.at[mark.cta]) continue;
    const Cta& other = *machine->ctas[mark.cta];
    fault(format("%s at %s, which cluster %d cta %d %s (%s)%s: nothing orders this after that",
                 what, name_of(region.data + i * 2).c_str(), other.cluster->id, other.rank,
                 relation, hw::model::name_of(mark.site).c_str(),
                 mark.time == kNever ? " by an asynchronous copy that nobody has waited for" : ""));
  }
}

void GlobalMemory::check_read(const Cta& cta, const Clock& known, const char* p, size_t bytes,
                              const char* what) {
  const Region& region = region_of(p, bytes, *cta.cluster->gpu, what);
  check_marks(cta, known, region, region.writes, p, bytes, what, "wrote", false);
}
void GlobalMemory::check_write(const Cta& cta, const Clock& known, const char* p, size_t bytes,
                               const char* what, bool add) {
  const Region& region = region_of(p, bytes, *cta.cluster->gpu, what);
  check_marks(cta, known, region, region.writes, p, bytes, what, "wrote", add);
  check_marks(cta, known, region, region.reads, p, bytes, what, "read", false);
}
void GlobalMemory::mark_read(const Cta& cta, const char* p, size_t bytes, uint32_t time,
                             Site site) {
  Region& region = *find(p);
  const size_t offset = reinterpret_cast<const unsigned char*>(p) - region.data;
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) {
    region.reads[i] = {site, time, static_cast<int16_t>(cta.index), false};
  }
}
void GlobalMemory::mark_write(const Cta& cta, const char* p, size_t bytes, uint32_t time, Site site,
                              bool add) {
  Region& region = *find(p);
  const size_t offset = reinterpret_cast<const unsigned char*>(p) - region.data;
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) {
    region.writes[i] = {site, time, static_cast<int16_t>(cta.index), add};
  }
}

// --- ordering ------------------------------------------------------------------------------------------

void release_to_gpu(Thread& thread) {
  publish_to_cta(thread);
  merge_words(thread.gpu->stores, thread.cta->stores);
}
void release_to(Thread& thread, Scope scope) {
  publish_to_cta(thread);
  if (scope == Scope::kCta) return;
  release_to_gpu(thread);
  if (scope == Scope::kSys) machine->memory->drain(thread.gpu->stores);
}
void stamp_release(Knowledge& known, const Cta& cta) {
  known.generic.at[cta.index] = ++machine->now;
  ++machine->now;  // what the CTA does from here on is not included
}

const Flag* GlobalMemory::find_flag(const void* p) const {
  const auto found = flags_.find(p);
  return found == flags_.end() ? nullptr : &found->second;
}

void publish_flag(Thread& thread, const void* p, Order order, Scope scope, bool replaces) {
  Flag& flag = machine->memory->flag(p);
  if (replaces) flag = Flag{};
  Knowledge known;
  if (order == Order::kRelease || order == Order::kAcqRel) {
    known = thread.known;
    stamp_release(known, *thread.cta);
  } else if (thread.has_fenced) {
    known = thread.fenced;
    scope = std::min(scope, thread.fence_scope);
  } else {
    return;
  }
  if (scope < Scope::kGpu) return;  // nobody outside the CTA or cluster may rely on it
  // Within the GPU of the last writer; a chain of writers on several GPUs needs .sys anyway.
  if (flag.gpu != thread.gpu) flag.for_gpu = {};
  flag.gpu = thread.gpu;
  flag.for_gpu.join(known);
  if (scope == Scope::kSys) flag.for_system.join(known);
}

void acquire_flag(Thread& thread, const void* p, Order order, Scope scope) {
  const Flag* flag = machine->memory->find_flag(p);
  if (flag == nullptr || scope < Scope::kGpu) return;
  Knowledge learned;
  if (flag->gpu == thread.gpu) learned.join(flag->for_gpu);
  if (scope == Scope::kSys) learned.join(flag->for_system);
  thread.observed.join(learned);
  if (order == Order::kAcquire || order == Order::kAcqRel) thread.known.join(learned);
}

namespace {

bool reached(const Wait& wait) {
  const uint64_t seen = machine->memory->peek(wait.flag, wait.flag_bytes);
  return wait.flag_bytes == 4 ? static_cast<int32_t>(static_cast<uint32_t>(seen) -
                                                     static_cast<uint32_t>(wait.value)) >= 0
                              : static_cast<int64_t>(seen - wait.value) >= 0;
}

}  // namespace

uint64_t GlobalMemory::peek(const void* p, int bytes) const {
  uint64_t value = 0;
  std::memcpy(&value, p, static_cast<size_t>(bytes));
  return value;
}
void GlobalMemory::poke(void* p, uint64_t value, int bytes) {
  write_memory(static_cast<char*>(p), &value, static_cast<size_t>(bytes));
  poll_flags();
}

void GlobalMemory::poll_flags() {
  auto& waiters = machine->flag_waiters;
  for (size_t i = 0; i < waiters.size();) {
    const Wait& wait = waiters[i]->wait;
    if (reached(wait) || (wait.raised != nullptr && peek(wait.raised, 4) != 0)) {
      make_ready(waiters[i]);
      waiters[i] = waiters.back();
      waiters.pop_back();
    } else {
      ++i;
    }
  }
}

bool GlobalMemory::expire_peer_wait() {
  auto& waiters = machine->flag_waiters;
  for (size_t i = 0; i < waiters.size(); ++i) {
    if (waiters[i]->wait.stop != Stop::kPeer) continue;
    waiters[i]->wait.expired = true;
    make_ready(waiters[i]);
    waiters.erase(waiters.begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  }
  return false;
}

// --- instructions ------------------------------------------------------------------------------------

namespace {

void check_alignment(const void* p, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0) return;
  fault(format("%s at %s: not aligned to %d bytes", what, machine->memory->name_of(p).c_str(),
               bytes));
}

/// Strong accesses act on memory itself: what this thread has held back there comes first.
void settle_own(Thread& thread, const void* p, int bytes) {
  GlobalMemory& memory = *machine->memory;
  const auto first = reinterpret_cast<uintptr_t>(p) & ~uintptr_t{3};
  for (uintptr_t word = first;
       word < reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes); word += 4) {
    for (Words* level : {&thread.gpu->stores, &thread.cta->stores, &thread.stores}) {
      const auto held = level->find(word);
      if (held == level->end()) continue;
      Words one{{word, held->second}};
      level->erase(held);
      memory.drain(one);
    }
  }
}

/// The region, for a strong access.
void check_atomic(Thread& thread, const void* p, int bytes, const char* what) {
  check_alignment(p, bytes, what);
  const Region& region =
      machine->memory->region_of(p, static_cast<size_t>(bytes), *thread.gpu, what);
  settle_own(thread, p, bytes);
  const size_t half = static_cast<size_t>(static_cast<const unsigned char*>(p) - region.data) / 2;
  if (what[0] != 's' && region.written[half] == 0) {  // loads and additions, not stores
    fault(format("%s at %s, which nobody has written", what, machine->memory->name_of(p).c_str()));
  }
}

void write_atomic(Thread& thread, void* p, uint64_t value, int bytes) {
  GlobalMemory& memory = *machine->memory;
  memory.mark_write(*thread.cta, static_cast<char*>(p), static_cast<size_t>(bytes), machine->now,
                    thread.site);
  memory.poke(p, value, bytes);
}

}  // namespace

void global_load(const void* address, void* value, int bytes, Site site) {
  Thread& thread = enter_here(site);
  const auto* p = static_cast<const char*>(address);
  check_alignment(p, bytes, "ld.global");
  GlobalMemory& memory = *machine->memory;
  memory.check_read(*thread.cta, thread.known.generic, p, static_cast<size_t>(bytes), "ld.global");
  memory.read_generic(thread, p, value, static_cast<size_t>(bytes));
  memory.mark_read(*thread.cta, p, static_cast<size_t>(bytes), machine->now, site);
}

void global_store(void* address, const void* value, int bytes, Site site) {
  Thread& thread = enter_here(site);
  auto* p = static_cast<char*>(address);
  check_alignment(p, bytes, "st.global");
  GlobalMemory& memory = *machine->memory;
  memory.check_write(*thread.cta, thread.known.generic, p, static_cast<size_t>(bytes), "st.global");
  memory.mark_write(*thread.cta, p, static_cast<size_t>(bytes), machine->now, site);
  hold_back(thread.stores, reinterpret_cast<uintptr_t>(p), value, static_cast<size_t>(bytes),
            thread.cta->index);
}

uint64_t atomic_load(const void* address, int bytes, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 6);
  check_atomic(thread, address, bytes, "ld");
  acquire_flag(thread, address, order, scope);
  return machine->memory->peek(address, bytes);
}

void atomic_store(void* address, uint64_t value, int bytes, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 7);
  check_atomic(thread, address, bytes, "st");
  if (order == Order::kRelease) release_to(thread, scope);
  publish_flag(thread, address, order, scope, true);
  write_atomic(thread, address, value, bytes);
}

uint64_t atomic_add(void* address, uint64_t value, int bytes, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 8);
  check_atomic(thread, address, bytes, "atom.add");
  if (order == Order::kRelease || order == Order::kAcqRel) release_to(thread, scope);
  acquire_flag(thread, address, order, scope);
  publish_flag(thread, address, order, scope, false);
  const uint64_t old = machine->memory->peek(address, bytes);
  write_atomic(thread, address, old + value, bytes);
  return old;
}

void fence(Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 9);
  release_to(thread, scope);
  if (scope >= Scope::kGpu) thread.known.join(thread.observed);
  thread.fenced = thread.known;
  stamp_release(thread.fenced, *thread.cta);
  thread.has_fenced = true;
  thread.fence_scope = scope;
}

void flag_wait(const void* flag, uint32_t value, Order order, Scope scope, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 10);
  check_atomic(thread, flag, 4, "ld");
  const Wait wait{
      .stop = Stop::kFlag, .what = "a flag", .flag = flag, .flag_bytes = 4, .value = value};
  while (!reached(wait)) {
    machine->flag_waiters.push_back(&thread);
    block(wait);
  }
  acquire_flag(thread, flag, order, scope);
}

bool peer_wait(const void* flag, int bytes, uint64_t value, Scope scope, const Abort& abort,
               const PeerWait& who, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 11);
  GlobalMemory& memory = *machine->memory;
  check_atomic(thread, flag, bytes, "ld");
  check_atomic(thread, abort.raised.address(), 4, "ld");
  const Wait wait{.stop = Stop::kPeer,
                  .what = "another rank",
                  .flag = flag,
                  .flag_bytes = bytes,
                  .value = value,
                  .raised = abort.raised.address()};
  while (!reached(wait)) {
    if (memory.peek(abort.raised.address(), 4) != 0) return false;
    machine->flag_waiters.push_back(&thread);
    block(wait);
    if (!thread.wait.expired || reached(wait)) continue;
    ++machine->peer_timeouts;
    auto* failure = abort.failure.address();
    memory.region_of(failure, sizeof *failure, *thread.gpu, "the report of a peer's failure");
    if (memory.peek(&failure->state, 4) == 0) {
      const PeerFailure report{1,
                               who.rank,
                               who.peer,
                               who.what,
                               static_cast<uint32_t>(value),
                               static_cast<uint32_t>(memory.peek(flag, bytes))};
      memory.write_memory(reinterpret_cast<char*>(failure), &report, sizeof report);
    }
    memory.poke(abort.raised.address(), 1, 4);
    return false;
  }
  acquire_flag(thread, flag, Order::kAcquire, scope);
  return true;
}

}  // namespace hw::model
