// SPDX-License-Identifier: Apache-2.0
// The memory of the GPUs. A weak store is held back by its thread, then by its CTA, then by its GPU,
// until a synchronisation of that scope lets it through; strong accesses of flags act at once. Every
// halfword remembers who wrote and who read it last, and an access that nothing orders after those is a
// fault.
#pragma once

#include <memory>

#include "cuda/hw/model/engine/machine.h"

namespace hw::model {

/// A write or a read of two bytes: by which CTA, when, where in the kernel.
struct Mark {
  Site site;
  uint32_t time = 0;  // kNever: asynchronous, and nobody has waited for it
  int16_t cta = -1;
  bool add = false;    // a reduction: those may overlap
  bool alias = false;  // through a multicast address
};

struct Region {
  std::string name;
  int rank;
  size_t bytes;
  unsigned char* data;
  int symmetric = -1;  // number of the symmetric allocation
  std::vector<uint8_t> written;
  std::vector<Mark> writes, reads;  // of the run, by halfword
};
struct MulticastRange {
  size_t bytes;
  std::vector<char*> members;
};

/// What a strong store passes on to those who acquire it.
struct Flag {
  const Gpu* gpu = nullptr;
  Knowledge for_gpu, for_system;
};

class GlobalMemory {
 public:
  GlobalMemory(int ranks, std::vector<int> hosts);
  ~GlobalMemory();
  GlobalMemory(const GlobalMemory&) = delete;
  GlobalMemory& operator=(const GlobalMemory&) = delete;

  int ranks() const { return static_cast<int>(hosts_.size()); }
  void* allocate(const std::string& name, size_t bytes, int rank, int symmetric = -1);
  std::vector<void*> allocate_symmetric(const std::string& name, size_t bytes);
  void* make_multicast(const std::vector<void*>& members);
  void host_write(void* p, const void* from, size_t bytes);
  void host_read(const void* p, void* to, size_t bytes) const;

  void begin_run();
  void end_run();

  /// The allocation that holds these bytes, which `by` may reach.
  Region& region_of(const void* p, size_t bytes, const Gpu& by, const char* what);
  /// The same place in the memory of rank `peer`.
  char* symmetric_peer(void* p, size_t bytes, int peer, const char* what);
  /// The members of the multicast address.
  std::vector<char*> multicast_members(const void* p, size_t bytes, const char* what);
  std::string name_of(const void* p) const;
  uint64_t peek(const void* p, int bytes) const;
  void poke(void* p, uint64_t value, int bytes);

  /// What a thread sees, and what its GPU's copy engine sees.
  void read_generic(const Thread& thread, const char* p, void* to, size_t bytes);
  void read_gpu(const Gpu& gpu, const char* p, void* to, size_t bytes, const char* what);
  /// Straight to memory, for everyone.
  void write_memory(char* p, const void* from, size_t bytes);
  void add_f32(const Gpu& gpu, char* p, float value);

  /// Faults if an access by a CTA that knows `known` is not ordered after what others did there.
  void check_read(const Cta& cta, const Clock& known, const char* p, size_t bytes,
                  const char* what);
  void check_write(const Cta& cta, const Clock& known, const char* p, size_t bytes,
                   const char* what, bool add = false);
  /// As check_write, for a message that goes where no load or store can.
  void check_message(const Cta& cta, const Clock& known, const char* p, size_t bytes,
                     const char* what);
  void mark_read(const Cta& cta, const char* p, size_t bytes, uint32_t time, Site site);
  void mark_write(const Cta& cta, const char* p, size_t bytes, uint32_t time, Site site,
                  bool add = false, bool alias = false);
  /// Faults if the bytes were written through a multicast address after `alias`, the last fence.
  void check_alias(const Clock& alias, const char* p, size_t bytes, const char* what);

  Flag& flag(const void* p) { return flags_[p]; }
  const Flag* find_flag(const void* p) const;

  void poll_flags();
  bool drain_everything();
  void drain_some();
  bool expire_peer_wait();
  void drain(Words& words);  // to memory

 private:
  Region* find(const void* p) const;
  void check_marks(const Cta& cta, const Clock& known, const Region& region,
                   const std::vector<Mark>& marks, const char* p, size_t bytes, const char* what,
                   const char* relation, bool add) const;

  std::vector<int> hosts_;
  std::map<uintptr_t, std::unique_ptr<Region>> regions_;
  std::map<uintptr_t, MulticastRange> multicast_;
  std::vector<std::vector<Region*>> symmetric_;
  mutable Region* last_ = nullptr;
  std::unordered_map<const void*, Flag> flags_;
};

/// Puts bytes into a level of the hierarchy, over what is there.
void hold_back(Words& words, uintptr_t p, const void* from, size_t bytes, int cta);
/// Moves the words of one level into the next, and forgets them.
void merge_words(Words& into, Words& from);

/// Lets through what this thread's work has to show at a scope.
void release_to_gpu(Thread& thread);
void release_to(Thread& thread, Scope scope);
/// `known` now includes the work of `cta` so far.
void stamp_release(Knowledge& known, const Cta& cta);
/// A strong store or addition with what it passes on; the value is in memory already.
void publish_flag(Thread& thread, const void* p, Order order, Scope scope, bool replaces);
void acquire_flag(Thread& thread, const void* p, Order order, Scope scope);

}  // namespace hw::model
