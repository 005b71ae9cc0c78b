// SPDX-License-Identifier: Apache-2.0
// Blackwell's tensor memory: allocation, loads and stores by warps.
#include <cstring>

#include "cuda/hw/model/engine/meeting.h"
#include "cuda/hw/model/engine/shared_memory.h"
#include "cuda/hw/model/engine/tcgen05.h"

namespace hw::model {

float* tmem_at(Cta& cta, int lane, int column) {
  return &cta.tmem[static_cast<size_t>(lane) * kTmemColumns + static_cast<size_t>(column)];
}

// --- allocation ----------------------------------------------------------------------------------------

namespace {

bool is_free(const Cta& cta, uint32_t base, uint32_t columns) {
  for (const Range& taken : cta.tmem_allocations) {
    if (base < taken.offset + taken.bytes && taken.offset < base + columns) return false;
  }
  return true;
}

/// Where the next allocation lies: anywhere that is free, since a kernel that believes in column 0 is
/// wrong; with two CTAs, where the other one's lies.
uint32_t choose_columns(const Cta& cta, CtaGroup group, uint32_t columns) {
  if (group == CtaGroup::kTwo) {
    const Cta& peer = *cta.cluster->ctas[static_cast<size_t>(cta.rank) ^ 1];
    if (peer.tmem_bases.size() > cta.tmem_bases.size()) {
      return peer.tmem_bases[cta.tmem_bases.size()];
    }
  }
  std::vector<uint32_t> places;
  for (uint32_t base = 0; base + columns <= kTmemColumns; base += columns) {
    if (is_free(cta, base, columns)) places.push_back(base);
  }
  if (places.empty()) {
    fault(format("tcgen05.alloc of %u columns: CTA %d has no room for them", columns, cta.rank));
  }
  return places[random_below(static_cast<uint32_t>(places.size()))];
}

uint32_t take_columns(Cta& cta, CtaGroup group, uint32_t columns) {
  const uint32_t base = choose_columns(cta, group, columns);
  if (!is_free(cta, base, columns)) {
    fault(format("tcgen05.alloc of %u columns: the CTAs of the pair have different columns free",
                 columns));
  }
  cta.tmem_bases.push_back(base);
  cta.tmem_allocations.push_back({base, columns});
  for (auto& quarter : cta.columns) {
    for (uint32_t i = 0; i < columns; ++i) {
      quarter[base + i] = TmemColumn{};
      quarter[base + i].allocated = true;
    }
  }
  for (int lane = 0; lane < kTmemLanes; ++lane) {
    std::memset(tmem_at(cta, lane, static_cast<int>(base)), 0xFF, columns * 4);
  }
  return base;
}

}  // namespace

void tmem_alloc(CtaGroup group, uint32_t destination, uint32_t columns, Site site) {
  constexpr auto kWhat = "tcgen05.alloc";
  enter_here(site);
  meet_warp(
      {.op = WarpOp::kTmemAlloc, .what = kWhat, .argument = static_cast<int>(columns)},
      [&](Rendezvous&) {
        Cta& cta = *machine->current->cta;
        check_group(cta, group, kWhat);
        if (columns < 32 || columns > kTmemColumns || (columns & (columns - 1)) != 0) {
          fault(format("tcgen05.alloc of %u columns: expected a power of two in 32..512", columns));
        }
        if (cta.tmem_relinquished) fault("tcgen05.alloc after relinquish_alloc_permit");
        const uint32_t base = take_columns(cta, group, columns);
        const uint32_t offset = destination & 0xFFFFFF;
        note_generic_write(cta, offset, 4, kWhat);
        std::memcpy(cta.generic + offset, &base, 4);
      });
}

void tmem_relinquish(CtaGroup group, Site site) {
  enter_here(site);
  meet_warp({.op = WarpOp::kTmemRelinquish, .what = "tcgen05.relinquish_alloc_permit"},
            [&](Rendezvous&) {
              Cta& cta = *machine->current->cta;
              check_group(cta, group, "tcgen05.relinquish_alloc_permit");
              cta.tmem_relinquished = true;
            });
}

namespace {

void check_unused(const Thread& thread, const TmemColumn& column, uint32_t number) {
  if (column.in_flight != 0 || column.uncommitted) {
    fault(format("tcgen05.dealloc of column %u while tcgen05.mma or tcgen05.st writes it", number));
  }
  if (column.unfenced != 0) {
    fault(
        format("tcgen05.dealloc of column %u while it is read (wait::ld and "
               "fence::before_thread_sync are missing)",
               number));
  }
  if (column.release_time > thread.tensor_seen.at[thread.cta->index]) {
    fault(format("tcgen05.dealloc of column %u: not ordered after its reads", number));
  }
}

}  // namespace

void tmem_dealloc(CtaGroup group, uint32_t base, uint32_t columns, Site site) {
  constexpr auto kWhat = "tcgen05.dealloc";
  enter_here(site);
  meet_warp({.op = WarpOp::kTmemDealloc, .what = kWhat, .argument = static_cast<int>(columns)},
            [&](Rendezvous&) {
              const Thread& thread = *machine->current;
              Cta& cta = *thread.cta;
              check_group(cta, group, kWhat);
              auto& all = cta.tmem_allocations;
              const auto found = std::find_if(all.begin(), all.end(), [&](const Range& r) {
                return r.offset == base && r.bytes == columns;
              });
              if (found == all.end()) {
                fault(format("tcgen05.dealloc of %u columns at 0x%x, which were not allocated so",
                             columns, base));
              }
              all.erase(found);
              for (auto& quarter : cta.columns) {
                for (uint32_t i = base; i < base + columns; ++i) {
                  check_unused(thread, quarter[i], i);
                  quarter[i].allocated = false;
                }
              }
            });
}

// --- loads and stores ----------------------------------------------------------------------------------

namespace {

const char* name_of(const TmemAccess& access) { return access.store ? "tcgen05.st" : "tcgen05.ld"; }

void check_load(const TmemAccess& access, const TmemColumn& column, int number) {
  const auto where = [&] {
    return format("tcgen05.ld of column %d (CTA %d warp %d): ", number, access.warp->cta->rank,
                  access.warp->index);
  };
  if (column.in_flight != 0) fault(where() + "tcgen05.mma or tcgen05.st is still writing it");
  if (!column.written) fault(where() + "nothing was ever written there");
  if (column.uncommitted) fault(where() + "the product is not committed");
  if (column.stored_by == access.warp) return;
  if (column.write_time > access.seen.at[static_cast<size_t>(column.write_cta)]) {
    fault(where() +
          "nothing orders it after the write (commit or fence::before, wait, then "
          "fence::after_thread_sync)");
  }
}

void check_store(const TmemAccess& access, const TmemColumn& column, int number) {
  const auto where = [&] {
    return format("tcgen05.st to column %d (CTA %d warp %d): ", number, access.warp->cta->rank,
                  access.warp->index);
  };
  if (column.uncommitted) fault(where() + "a product there is not committed");
  if (column.written && column.stored_by != access.warp &&
      column.write_time > access.seen.at[static_cast<size_t>(column.write_cta)]) {
    fault(where() + "nothing orders it after the product that wrote there");
  }
}

void finish(TmemAccess& access) {
  if (access.done) return;
  access.done = true;
  Cta& cta = *access.warp->cta;
  const int quarter = access.warp->index % 4;
  for (int i = 0; i < access.columns; ++i) {
    const int number = access.column + i;
    TmemColumn& column = cta.columns[static_cast<size_t>(quarter)][static_cast<size_t>(number)];
    if (!access.store) check_load(access, column, number);
    for (int lane = 0; lane < 32; ++lane) {
      float* place = tmem_at(cta, quarter * 32 + lane, number);
      if (access.store) {
        std::memcpy(place, access.values.data() + lane * access.columns + i, 4);
      } else {
        std::memcpy(&access.registers[static_cast<size_t>(lane)][i], place, 4);
      }
    }
    if (access.store) {
      --column.in_flight;
      column.written = true;
    }
  }
}

/// Checks and starts a load or a store of the whole warp; the lanes have met.
void start(const std::shared_ptr<TmemAccess>& access, uint32_t address) {
  Warp& warp = *access->warp;
  const uint32_t lane = address >> 16;
  if (lane != static_cast<uint32_t>(warp.index % 4) * 32) {
    fault(format("%s: warp %d reaches lanes %d to %d of TMEM, the address says lane %u",
                 name_of(*access), warp.index, warp.index % 4 * 32, warp.index % 4 * 32 + 31,
                 lane));
  }
  if (access->column + access->columns > kTmemColumns) {
    fault(format("%s: %d columns at column %d", name_of(*access), access->columns, access->column));
  }
  access->seen.at.fill(kNever);
  for (const Thread* thread : warp.lanes) {
    check_fenced(*thread, name_of(*access));
    for (int i = 0; i < machine->cta_count(); ++i) {
      access->seen.at[i] = std::min(access->seen.at[i], thread->tensor_seen.at[i]);
    }
  }
  auto& quarter = warp.cta->columns[static_cast<size_t>(warp.index % 4)];
  for (int i = access->column; i < access->column + access->columns; ++i) {
    TmemColumn& column = quarter[static_cast<size_t>(i)];
    if (!column.allocated) {
      fault(
          format("%s: column %d of CTA %d is not allocated", name_of(*access), i, warp.cta->rank));
    }
    ++column.unfenced;
    if (!access->store) continue;
    check_store(*access, column, i);
    ++column.in_flight;
    column.stored_by = &warp;
    column.write_cta = warp.cta->index;
    column.write_time = kNever;
  }
  warp.accesses.push_back(access);
  warp.uses.push_back({access->column, access->columns, ~0U, false, access->store});
  enqueue(transient_channel(), [access] { finish(*access); });
}

}  // namespace

void tmem_ld(uint32_t address, uint32_t* values, int columns, Site site) {
  enter_here(site);
  std::memset(values, 0xFF, static_cast<size_t>(columns) * 4);  // in flight
  meet_warp({.op = WarpOp::kTmemLoad,
             .what = "tcgen05.ld",
             .argument = static_cast<int>(address),
             .registers = values},
            [&](Rendezvous& r) {
              auto access = std::make_shared<TmemAccess>();
              access->warp = machine->current->warp;
              access->store = false;
              access->column = static_cast<int>(address & 0xFFFF);
              access->columns = columns;
              access->registers = r.registers;
              start(access, address);
            });
}

void tmem_st(uint32_t address, const uint32_t* values, int columns, Site site) {
  enter_here(site);
  meet_warp({.op = WarpOp::kTmemStore,
             .what = "tcgen05.st",
             .argument = static_cast<int>(address),
             .registers = const_cast<uint32_t*>(values)},
            [&](Rendezvous& r) {
              auto access = std::make_shared<TmemAccess>();
              access->warp = machine->current->warp;
              access->store = true;
              access->column = static_cast<int>(address & 0xFFFF);
              access->columns = columns;
              for (const uint32_t* lane : r.registers) {
                access->values.insert(access->values.end(), lane, lane + columns);
              }
              start(access, address);
            });
}

void tmem_wait(bool loads, Site site) {
  enter_here(site);
  meet_warp({.op = WarpOp::kTmemWait,
             .what = loads ? "tcgen05.wait::ld" : "tcgen05.wait::st",
             .argument = loads ? 1 : 0},
            [&](Rendezvous&) {
              Warp& warp = *machine->current->warp;
              auto& accesses = warp.accesses;
              for (auto& access : accesses) {
                if (access->store != loads) finish(*access);
              }
              accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                            [&](auto& access) { return access->store != loads; }),
                             accesses.end());
              for (TmemUse& use : warp.uses) use.waited |= use.store != loads;
            });
}

}  // namespace hw::model
