// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies: TMA boxes and plain bytes, loads with mbarriers, stores with bulk groups.
#include <cstring>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/mbarrier.h"
#include "cuda/hw/model/engine/meeting.h"
#include "cuda/hw/model/engine/shared_memory.h"

namespace hw::model {

TensorMap tensor_map(void* base, const TensorShape& shape) {
  check_tensor_shape(base, shape);
  return {base, shape};
}

namespace {

struct Box {
  const TensorMap* map;
  int column, row;

  uint32_t row_bytes() const {
    return map->shape.box_columns * static_cast<uint32_t>(element_bytes(map->shape.element));
  }
  uint32_t bytes() const { return row_bytes() * map->shape.box_rows; }
  /// The 16-byte cell `cell` of row `r`: in shared memory, and how many of its bytes are in the matrix.
  uint32_t shared_offset(uint32_t base, uint32_t r, uint32_t cell) const {
    return swizzled(base + r * row_bytes() + cell * 16, map->shape.swizzle);
  }
  /// The part of row r that lies in the matrix: [first, first + count) bytes of the box's row.
  struct Part {
    uint32_t first = 0, count = 0;
    char* global = nullptr;
  };
  Part part(uint32_t r) const {
    const TensorShape& s = map->shape;
    const int64_t y = int64_t{row} + r;
    if (y < 0 || y >= static_cast<int64_t>(s.rows)) return {};
    const int64_t begin = std::max<int64_t>(0, -int64_t{column});
    const int64_t end = std::min<int64_t>(s.box_columns, static_cast<int64_t>(s.columns) - column);
    if (begin >= end) return {};
    const int64_t width = element_bytes(s.element);
    return {static_cast<uint32_t>(begin * width), static_cast<uint32_t>((end - begin) * width),
            static_cast<char*>(map->base) + y * static_cast<int64_t>(s.pitch_bytes) +
                (column + begin) * width};
  }
};

void check_place(const Thread& thread, uint32_t address, uint32_t align, const char* what) {
  if (address >> 24 != static_cast<uint32_t>(thread.cta->rank)) {
    fault(format("%s: shared memory of CTA %u, the thread is in CTA %d", what, address >> 24,
                 thread.cta->rank));
  }
  if ((address & (align - 1)) != 0) {
    fault(format("%s at %s: not aligned to %u bytes", what, shared_name(address).c_str(), align));
  }
}

/// Where a load goes: a CTA, and the barrier that hears of it.
struct Target {
  Cta* cta;
  Cta* barrier_cta;
};

std::vector<Target> targets_of(const Thread& thread, uint32_t barrier, Landing landing,
                               uint32_t mask) {
  constexpr auto kWhat = "TMA load";
  Cluster& cluster = *thread.cta->cluster;
  const auto rank = static_cast<uint32_t>(thread.cta->rank), owner = barrier >> 24;
  const bool pair = landing == Landing::kPair || landing == Landing::kPairMulticast;
  const bool multicast = landing == Landing::kMulticast || landing == Landing::kPairMulticast;
  const bool leader = pair && owner == (rank & ~1U);
  if (owner != rank && !leader) {
    fault(format(
        "TMA load: mbarrier %s of CTA %u: another CTA's needs cta_group::2 and the pair's leader",
        shared_name(barrier).c_str(), owner));
  }
  if (!multicast) return {{thread.cta, &cta_of(cluster, owner << 24, kWhat)}};
  if (mask == 0 || mask >> cluster.ctas.size() != 0) {
    fault(format("TMA load: multicast mask 0x%x in a cluster of %zu", mask, cluster.ctas.size()));
  }
  std::vector<Target> targets;
  for (uint32_t r = 0; r < cluster.ctas.size(); ++r) {
    if ((mask >> r & 1) == 0) continue;
    // In a pair the parity of the barrier's CTA decides for every destination.
    const uint32_t hears = pair ? (r & ~1U) | (owner & 1) : r;
    targets.push_back({&cta_of(cluster, r << 24, kWhat), &cta_of(cluster, hears << 24, kWhat)});
  }
  return targets;
}

void load_box(const Gpu& gpu, Cta& cta, uint32_t destination, const Box& box) {
  std::vector<char> row(box.row_bytes());
  for (uint32_t r = 0; r < box.map->shape.box_rows; ++r) {
    std::fill(row.begin(), row.end(), 0);  // outside the matrix there are zeros
    const Box::Part part = box.part(r);
    if (part.count != 0) {
      machine->memory->read_gpu(gpu, part.global, &row[part.first], part.count, "TMA load");
    }
    for (uint32_t cell = 0; cell < box.row_bytes() / 16; ++cell) {
      async_write(cta, box.shared_offset(destination, r, cell), &row[cell * 16], 16);
    }
  }
}

/// Every part of the box, marked as read by this CTA at a time.
void mark_box(const Cta& cta, const Box& box, uint32_t time, Site site) {
  for (uint32_t r = 0; r < box.map->shape.box_rows; ++r) {
    const Box::Part part = box.part(r);
    if (part.count != 0) machine->memory->mark_read(cta, part.global, part.count, time, site);
  }
}

}  // namespace

void tma_load(uint32_t destination, const TensorMap& map, int column, int row, uint32_t barrier,
              Landing landing, uint32_t ctas, Site site) {
  constexpr auto kWhat = "TMA load";
  Thread& thread = enter_here(site);
  note_path(thread, 12);
  check_place(thread, destination, 128, kWhat);
  const Box box{&map, column, row};
  const uint32_t offset = destination & 0xFFFFFF;
  for (uint32_t r = 0; r < map.shape.box_rows; ++r) {
    const Box::Part part = box.part(r);
    if (part.count == 0) continue;
    machine->memory->check_read(*thread.cta, thread.known.async, part.global, part.count, kWhat);
  }
  Gpu* gpu = thread.gpu;
  Cta* issuer = thread.cta;
  // One copy reads global memory; every destination sees its own write and its own bytes.
  mark_box(*issuer, box, kNever, site);
  for (const Target target : targets_of(thread, barrier, landing, ctas)) {
    barrier_at(*target.barrier_cta, barrier, true, kWhat);
    begin_async_write(*target.cta, offset, box.bytes(), kWhat);
    enqueue(transient_channel(), [=] {
      if (target.cta->exited) fault("TMA load into a CTA that has exited");
      load_box(*gpu, *target.cta, offset, box);
      end_async_write(*target.cta, offset, box.bytes());
      mark_box(*issuer, box, machine->now, site);
      deliver(*target.barrier_cta, barrier, box.bytes(), kWhat);
    });
  }
  maybe_yield();
}

void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
               Site site) {
  constexpr auto kWhat = "bulk load";
  Thread& thread = enter_here(site);
  note_path(thread, 13);
  check_place(thread, destination, 16, kWhat);
  const auto* from = static_cast<const char*>(source);
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    fault(format("bulk load of %u bytes from %s: address and size come in multiples of 16", bytes,
                 machine->memory->name_of(from).c_str()));
  }
  machine->memory->check_read(*thread.cta, thread.known.async, from, bytes, kWhat);
  machine->memory->mark_read(*thread.cta, from, bytes, kNever, site);
  const uint32_t offset = destination & 0xFFFFFF;
  Cta* cta = thread.cta;
  if (barrier >> 24 != static_cast<uint32_t>(cta->rank))
    fault("bulk load: mbarrier of another CTA");
  barrier_at(*cta, barrier, true, kWhat);
  begin_async_write(*cta, offset, bytes, kWhat);
  enqueue(transient_channel(), [=] {
    if (cta->exited) fault("bulk load into a CTA that has exited");
    std::vector<char> data(bytes);
    machine->memory->read_gpu(*cta->cluster->gpu, from, data.data(), bytes, kWhat);
    async_write(*cta, offset, data.data(), bytes);
    end_async_write(*cta, offset, bytes);
    machine->memory->mark_read(*cta, from, bytes, machine->now, site);
    deliver(*cta, barrier, bytes, kWhat);
  });
  maybe_yield();
}

// --- stores and reductions -------------------------------------------------------------------------------

namespace {

const char* name_of(const BulkStore& store) { return store.add ? "TMA reduction" : "TMA store"; }

void read_shared(BulkStore& store) {
  if (store.read) return;
  store.read = true;
  size_t total = 0;
  for (const auto& piece : store.pieces) total += piece.bytes;
  store.data.resize(total);
  size_t done = 0;
  for (const auto& piece : store.pieces) {
    check_async_read(*store.cta, piece.offset, piece.bytes, name_of(store));
    std::memcpy(&store.data[done], &store.cta->async[piece.offset], piece.bytes);
    done += piece.bytes;
  }
}

void add_piece(const BulkStore& store, const BulkStore::Piece& piece, const unsigned char* data) {
  if (store.element != Element::kF32) fault("a reduction of bf16: the model adds f32 only");
  for (uint32_t i = 0; i < piece.bytes; i += 4) {
    float value;
    std::memcpy(&value, data + i, 4);
    machine->memory->add_f32(*store.by->gpu, piece.global + i, value);
  }
}

/// A full wait makes the writes visible to the waiting thread; its release shows them to others. Left
/// alone, the engine may also finish early, for everyone.
void write_global(BulkStore& store, bool for_waiter) {
  read_shared(store);
  GlobalMemory& memory = *machine->memory;
  if (!store.written) {
    store.written = true;
    ++machine->now;
    size_t done = 0;
    for (const auto& piece : store.pieces) {
      if (piece.global != nullptr && store.add) {
        add_piece(store, piece, &store.data[done]);
      } else if (piece.global != nullptr && for_waiter) {
        hold_back(store.by->stores, reinterpret_cast<uintptr_t>(piece.global), &store.data[done],
                  piece.bytes, store.cta->index);
      } else if (piece.global != nullptr) {
        memory.write_memory(piece.global, &store.data[done], piece.bytes);
      }
      done += piece.bytes;
    }
    memory.poll_flags();
  }
  if (!for_waiter) return;
  for (const auto& piece : store.pieces) {
    if (piece.global == nullptr) continue;
    memory.mark_write(*store.cta, piece.global, piece.bytes, machine->now, store.site, store.add);
  }
}

void issue(Thread& thread, const std::shared_ptr<BulkStore>& store) {
  GlobalMemory& memory = *machine->memory;
  for (const auto& piece : store->pieces) {
    if (piece.global == nullptr) continue;
    const Region& region =
        memory.region_of(piece.global, piece.bytes, *thread.gpu, name_of(*store));
    if (store->add && region.rank != thread.gpu->rank) {
      fault(format(
          "TMA reduction at %s by rank %d: its additions are .relaxed.gpu, never for another GPU",
          memory.name_of(piece.global).c_str(), thread.gpu->rank));
    }
    memory.check_write(*thread.cta, thread.known.generic, piece.global, piece.bytes,
                       name_of(*store), store->add);
    memory.mark_write(*thread.cta, piece.global, piece.bytes, kNever, store->site, store->add);
  }
  thread.open_group.push_back(store);
  machine->bulk_stores.push_back(store);
  Channel& channel = transient_channel();
  enqueue(channel, [store] { read_shared(*store); });
  enqueue(channel, [store] { write_global(*store, false); });
  maybe_yield();
}

std::shared_ptr<BulkStore> new_store(Thread& thread, uint32_t source, bool add, Site site) {
  auto store = std::make_shared<BulkStore>();
  store->by = &thread;
  store->cta = thread.cta;
  store->site = site;
  store->source = source & 0xFFFFFF;
  store->add = add;
  return store;
}

}  // namespace

void tma_store(const TensorMap& map, int column, int row, uint32_t source, bool add, Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 14);
  auto store = new_store(thread, source, add, site);
  store->element = map.shape.element;
  const Box box{&map, column, row};
  check_place(thread, source, 128, name_of(*store));
  check_range(*thread.cta, store->source, box.bytes(), name_of(*store));
  for (uint32_t r = 0; r < map.shape.box_rows; ++r) {
    const Box::Part part = box.part(r);
    for (uint32_t cell = 0; cell < box.row_bytes() / 16; ++cell) {
      // The whole box is read; what lies in the matrix is written.
      const uint32_t offset = box.shared_offset(store->source, r, cell);
      const uint32_t first = std::max(part.first, cell * 16);
      const uint32_t end = std::min(part.first + part.count, cell * 16 + 16);
      if (part.count == 0 || first >= end) {
        store->pieces.push_back({nullptr, offset, 16});
        continue;
      }
      if (first > cell * 16) store->pieces.push_back({nullptr, offset, first - cell * 16});
      store->pieces.push_back(
          {part.global + (first - part.first), offset + (first - cell * 16), end - first});
      if (end < cell * 16 + 16) {
        store->pieces.push_back({nullptr, offset + (end - cell * 16), cell * 16 + 16 - end});
      }
    }
  }
  issue(thread, store);
}

void bulk_store(void* destination, uint32_t source, uint32_t bytes, bool add, Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 15);
  auto store = new_store(thread, source, add, site);
  auto* to = static_cast<char*>(destination);
  check_place(thread, source, 16, name_of(*store));
  check_range(*thread.cta, store->source, bytes, name_of(*store));
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0) {
    fault(format("bulk store of %u bytes to %s: address and size come in multiples of 16", bytes,
                 machine->memory->name_of(to).c_str()));
  }
  store->pieces.push_back({to, store->source, bytes});
  issue(thread, store);
}

void bulk_commit(Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 16);
  thread.groups.push_back(std::move(thread.open_group));
  thread.open_group.clear();
}

void bulk_wait(int pending, bool read_only, Site site) {
  Thread& thread = enter(site);
  note_path(thread, 17);
  auto& groups = thread.groups;
  const size_t finished = groups.size() > static_cast<size_t>(pending)
                              ? groups.size() - static_cast<size_t>(pending)
                              : 0;
  for (size_t i = 0; i < finished; ++i) {
    for (auto& store : groups[i]) {
      if (read_only) {
        read_shared(*store);
      } else {
        write_global(*store, true);
      }
    }
  }
  if (!read_only) {
    groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(finished));
  }
  maybe_yield();
}

void finish_bulk_stores() {
  for (auto& store : machine->bulk_stores) write_global(*store, false);
}

}  // namespace hw::model
