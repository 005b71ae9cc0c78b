// SPDX-License-Identifier: Apache-2.0
// How weak stores travel, and who did what where.
#include "cuda/hw/model/engine/global_memory.h"

#include <cstring>

#include "cuda/hw/model/engine/report.h"
#include "cuda/hw/model/engine/scheduler.h"

namespace hw::model {

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
void GlobalMemory::check_alias(const Clock& alias, const char* p, size_t bytes, const char* what) {
  const Region& region = *find(p);
  const size_t offset = reinterpret_cast<const unsigned char*>(p) - region.data;
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) {
    const Mark& mark = region.writes[i];
    if (mark.cta < 0 || !mark.alias || mark.time <= alias.at[mark.cta]) continue;
    fault(
        format("%s at %s, which was written through a multicast address (%s): no "
               "fence.proxy.alias comes between",
               what, name_of(region.data + i * 2).c_str(), hw::model::name_of(mark.site).c_str()));
  }
}
void GlobalMemory::check_write(const Cta& cta, const Clock& known, const char* p, size_t bytes,
                               const char* what, bool add) {
  const Region& region = region_of(p, bytes, *cta.cluster->gpu, what);
  check_marks(cta, known, region, region.writes, p, bytes, what, "wrote", add);
  check_marks(cta, known, region, region.reads, p, bytes, what, "read", false);
}
void GlobalMemory::check_message(const Cta& cta, const Clock& known, const char* p, size_t bytes,
                                 const char* what) {
  const Region& region = *find(p);
  check_marks(cta, known, region, region.writes, p, bytes, what, "wrote", false);
  check_marks(cta, known, region, region.reads, p, bytes, what, "read", false);
}
void GlobalMemory::mark_read(const Cta& cta, const char* p, size_t bytes, uint32_t time,
                             Site site) {
  Region& region = *find(p);
  const size_t offset = reinterpret_cast<const unsigned char*>(p) - region.data;
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) {
    region.reads[i] = {site, time, static_cast<int16_t>(cta.index), false, false};
  }
}
void GlobalMemory::mark_write(const Cta& cta, const char* p, size_t bytes, uint32_t time, Site site,
                              bool add, bool alias) {
  Region& region = *find(p);
  const size_t offset = reinterpret_cast<const unsigned char*>(p) - region.data;
  for (size_t i = offset / 2; i < (offset + bytes + 1) / 2; ++i) {
    region.writes[i] = {site, time, static_cast<int16_t>(cta.index), add, alias};
  }
}

}  // namespace hw::model
