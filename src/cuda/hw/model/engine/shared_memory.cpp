// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/shared_memory.h"

#include <cstdlib>
#include <cstring>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/meeting.h"

namespace hw::model {
namespace {

uint32_t first_word(uint32_t offset) { return offset / 4; }
uint32_t last_word(uint32_t offset, uint32_t bytes) { return (offset + bytes + 3) / 4; }

/// The range that the running thread may touch with ordinary instructions.
uint32_t own_offset(uint32_t address, int bytes, const char* what) {
  Cta& own = *machine->current->cta;
  Cta& cta = cta_of(*own.cluster, address, what);
  if (&cta != &own) fault(format("%s in the shared memory of CTA %d", what, cta.rank));
  const uint32_t offset = address & 0xFFFFFF;
  if (offset % static_cast<uint32_t>(bytes) != 0) {
    fault(format("%s at %s: not aligned to %d bytes", what, shared_name(offset).c_str(), bytes));
  }
  check_range(own, offset, static_cast<uint32_t>(bytes), what);
  return offset;
}

void check_no_barrier(const Cta& cta, uint32_t offset, uint32_t bytes, const char* what) {
  const auto next = cta.barriers.lower_bound(offset > 7 ? offset - 7 : 0);
  if (next != cta.barriers.end() && next->first < offset + bytes) {
    fault(format("%s overwrites mbarrier %s", what, shared_name(next->first).c_str()));
  }
}

}  // namespace

Cta& cta_of(Cluster& cluster, uint32_t address, const char* what) {
  const uint32_t rank = address >> 24;
  if (rank >= cluster.ctas.size()) {
    fault(format("%s: address 0x%08x names CTA %u of a cluster of %zu", what, address, rank,
                 cluster.ctas.size()));
  }
  Cta& cta = *cluster.ctas[rank];
  if (cta.exited) fault(format("%s: CTA %u of the cluster has exited", what, rank));
  return cta;
}

void check_range(const Cta& cta, uint32_t offset, uint32_t bytes, const char* what) {
  if (offset >= kSharedBase && offset + bytes <= cta.bytes) return;
  fault(format("%s: bytes 0x%x to 0x%x are outside the kernel's shared memory (0x%x to 0x%x)", what,
               offset, offset + bytes, kSharedBase, cta.bytes));
}

void check_async_read(const Cta& cta, uint32_t offset, uint32_t bytes, const char* what) {
  for (uint32_t i = first_word(offset); i < last_word(offset, bytes); ++i) {
    const WordState& word = cta.words[i];
    if (word.written != 0 && word.dirty == 0 && word.in_flight == 0) continue;
    const char* why = word.in_flight != 0 ? "while an asynchronous copy writes it"
                      : word.dirty != 0 ? "but generic writes of it came without fence.proxy.async"
                                        : "but nobody has written it";
    fault(format("%s reads %s of CTA %d, %s", what, shared_name(i * 4).c_str(), cta.rank, why));
  }
}

void begin_async_write(Cta& cta, uint32_t offset, uint32_t bytes, const char* what) {
  check_range(cta, offset, bytes, what);
  check_no_barrier(cta, offset, bytes, what);
  for (uint32_t i = first_word(offset); i < last_word(offset, bytes); ++i) {
    WordState& word = cta.words[i];
    if (word.in_flight != 0) {
      fault(format("%s to %s of CTA %d while another copy writes it", what,
                   shared_name(i * 4).c_str(), cta.rank));
    }
    if (word.dirty != 0) {
      fault(format("%s to %s of CTA %d after generic writes without fence.proxy.async", what,
                   shared_name(i * 4).c_str(), cta.rank));
    }
    word = {.written = 0, .dirty = 0, .in_flight = 1};
  }
  std::memset(cta.generic + offset, 0xFF, bytes);
  std::memset(cta.async.data() + offset, 0xFF, bytes);
}

void async_write(Cta& cta, uint32_t offset, const void* from, uint32_t bytes) {
  std::memcpy(cta.generic + offset, from, bytes);
  std::memcpy(cta.async.data() + offset, from, bytes);
}

void end_async_write(Cta& cta, uint32_t offset, uint32_t bytes) {
  for (uint32_t i = first_word(offset); i < last_word(offset, bytes); ++i) {
    cta.words[i] = {.written = 1, .dirty = 0, .in_flight = 0};
  }
}

void note_generic_write(Cta& cta, uint32_t offset, uint32_t bytes, const char* what) {
  check_range(cta, offset, bytes, what);
  check_no_barrier(cta, offset, bytes, what);
  for (uint32_t i = first_word(offset); i < last_word(offset, bytes); ++i) {
    WordState& word = cta.words[i];
    if (word.in_flight != 0) {
      fault(format("%s to %s while an asynchronous copy writes it", what,
                   shared_name(i * 4).c_str()));
    }
    word.written = 1;
    word.dirty = 1;
  }
  machine->current->dirty.push_back({offset, bytes});
}

void make_cta_memory(Cta& cta, uint32_t bytes) {
  cta.bytes = bytes;
  cta.generic = static_cast<unsigned char*>(std::aligned_alloc(1024, bytes));
  std::memset(cta.generic, 0xFF, bytes);
  cta.async.assign(bytes, 0xFF);
  cta.words.assign(bytes / 4, WordState{});
}

// --- instructions ------------------------------------------------------------------------------------

uint32_t shared_address(const void* object, Site site) {
  const Thread& thread = enter_here(site);
  const Cta& cta = *thread.cta;
  const auto offset = static_cast<const unsigned char*>(object) - cta.generic;
  if (offset < kSharedBase || offset >= cta.bytes) {
    fault("the address of something that is not in this CTA's shared memory");
  }
  return static_cast<uint32_t>(offset) | static_cast<uint32_t>(cta.rank) << 24;
}

void shared_store(uint32_t address, const void* value, int bytes, Site site) {
  Cta& cta = *enter_here(site).cta;
  const uint32_t offset = own_offset(address, bytes, "st.shared");
  note_generic_write(cta, offset, static_cast<uint32_t>(bytes), "st.shared");
  std::memcpy(cta.generic + offset, value, static_cast<size_t>(bytes));
}

void shared_load(uint32_t address, void* value, int bytes, Site site) {
  Cta& cta = *enter(site).cta;
  const uint32_t offset = own_offset(address, bytes, "ld.shared");
  for (uint32_t i = first_word(offset); i < last_word(offset, static_cast<uint32_t>(bytes)); ++i) {
    if (cta.words[i].in_flight != 0) {
      fault(format("ld.shared of %s while an asynchronous copy writes it",
                   shared_name(i * 4).c_str()));
    }
    if (cta.words[i].written == 0) {
      fault(format("ld.shared of %s, which nobody has written", shared_name(i * 4).c_str()));
    }
  }
  std::memcpy(value, cta.generic + offset, static_cast<size_t>(bytes));
}

void store_matrix(uint32_t address, const uint32_t (&values)[4], Site site) {
  enter_here(site);
  uint32_t copy[4] = {values[0], values[1], values[2], values[3]};
  struct Lane {
    uint32_t address;
    uint32_t values[4];
  };
  static std::array<Lane, 32> lanes;  // of the warp that meets; only one can be completing a call
  // The lanes hand in their rows and their values; the last one writes all four blocks.
  meet_warp({.op = WarpOp::kStoreMatrix, .what = "stmatrix", .in = address, .registers = copy},
            [](Rendezvous& r) {
              for (int lane = 0; lane < 32; ++lane) {
                lanes[lane].address = r.in[lane];
                std::memcpy(lanes[lane].values, r.registers[lane], 16);
              }
              Cta& cta = *machine->current->cta;
              for (int row = 0; row < 32; ++row) {  // row % 8 of block row / 8
                const uint32_t offset = own_offset(lanes[row].address, 16, "stmatrix");
                note_generic_write(cta, offset, 16, "stmatrix");
                for (int pair = 0; pair < 4; ++pair) {
                  std::memcpy(cta.generic + offset + pair * 4,
                              &lanes[row % 8 * 4 + pair].values[row / 8], 4);
                }
              }
            });
}

namespace {

void make_clean(Cta& cta, std::vector<Range>& dirty) {
  for (const Range range : dirty) {
    std::memcpy(&cta.async[range.offset], cta.generic + range.offset, range.bytes);
    for (uint32_t i = first_word(range.offset); i < last_word(range.offset, range.bytes); ++i) {
      cta.words[i].dirty = 0;
    }
  }
  dirty.clear();
}

}  // namespace

void fence_proxy_async(bool global, Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 1);
  if (global) {
    release_to_gpu(thread);  // the copy engine reads what the GPU sees
    thread.known.async = thread.known.generic;
    return;
  }
  make_clean(*thread.cta, thread.dirty);
  make_clean(*thread.cta, thread.cta->dirty);
  maybe_yield();
}

}  // namespace hw::model
