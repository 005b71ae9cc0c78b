// SPDX-License-Identifier: Apache-2.0
// What there is in the memory of the GPUs: allocations, their names, who may reach them.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/report.h"

namespace hw::model {

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

}  // namespace hw::model
