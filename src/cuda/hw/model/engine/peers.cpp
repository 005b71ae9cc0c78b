// SPDX-License-Identifier: Apache-2.0
// Other GPUs: multicast memory and one-sided messages.
#include <cstring>

#include "cuda/hw/model/engine/global_memory.h"
#include "cuda/hw/model/engine/meeting.h"

namespace hw::model {
namespace {

float bf16_at(uint32_t word, int half) {
  const uint32_t bits = word >> (16 * half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
uint32_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

/// What the switch reads at one GPU: its memory, nothing that a GPU still holds back.
void read_member(const Thread& thread, const char* p, uint32_t (&words)[4]) {
  constexpr auto kWhat = "multimem.ld_reduce";
  GlobalMemory& memory = *machine->memory;
  const Region& region = memory.region_of(p, 16, *thread.gpu, kWhat);
  memory.check_read(*thread.cta, thread.alias, p, 16, kWhat);
  const Gpu& owner = *machine->gpus[static_cast<size_t>(region.rank)];
  for (int i = 0; i < 4; ++i) {
    const auto word = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(i) * 4;
    const auto holds = [&](const Words& level) { return level.count(word) != 0; };
    if (holds(owner.stores) || holds(thread.gpu->stores) || holds(thread.cta->stores) ||
        holds(thread.stores)) {
      fault(format("%s at %s: a write there has not been released at .sys", kWhat,
                   memory.name_of(p).c_str()));
    }
  }
  memory.read_gpu(owner, p, words, 16, kWhat);
  memory.mark_read(*thread.cta, p, 16, machine->now, thread.site);
}

void check_place(const void* address, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
    fault(format("%s: not aligned to 16 bytes", what));
}

}  // namespace

void multimem_load_add(const void* address, uint32_t* values, bool bf16, Site site) {
  constexpr auto kWhat = "multimem.ld_reduce";
  const Thread& thread = enter(site);
  check_place(address, kWhat);
  float sums[8] = {};
  const int count = bf16 ? 8 : 4;
  // The switch adds in an order of its own.
  auto members = machine->memory->multicast_members(address, 16, kWhat);
  for (size_t left = members.size(); left > 0; --left) {
    const uint32_t pick = random_below(static_cast<uint32_t>(left));
    uint32_t words[4];
    read_member(thread, members[pick], words);
    std::swap(members[pick], members[left - 1]);
    for (int i = 0; i < count; ++i) {
      float part;
      if (bf16) {
        part = bf16_at(words[i / 2], i % 2);
      } else {
        std::memcpy(&part, &words[i], 4);
      }
      sums[i] += part;
    }
  }
  for (int i = 0; i < 4; ++i) {
    if (bf16) {
      values[i] = to_bf16(sums[2 * i]) | to_bf16(sums[2 * i + 1]) << 16;
    } else {
      std::memcpy(&values[i], &sums[i], 4);
    }
  }
}

void multimem_store(void* address, const uint32_t* values, Site site) {
  constexpr auto kWhat = "multimem.st";
  Thread& thread = enter(site);
  check_place(address, kWhat);
  GlobalMemory& memory = *machine->memory;
  for (char* member : memory.multicast_members(address, 16, kWhat)) {
    memory.check_write(*thread.cta, thread.known.generic, member, 16, kWhat);
    memory.mark_write(*thread.cta, member, 16, machine->now, site, false, true);
    hold_back(thread.stores, reinterpret_cast<uintptr_t>(member), values, 16, thread.cta->index);
  }
}

void multimem_add(void* address, uint32_t value, Order order, Scope scope, Site site) {
  constexpr auto kWhat = "multimem.red";
  Thread& thread = enter(site);
  note_path(thread, 21);
  GlobalMemory& memory = *machine->memory;
  if (order == Order::kRelease) release_to(thread, scope);
  for (char* member : memory.multicast_members(address, 4, kWhat)) {
    memory.region_of(member, 4, *thread.gpu, kWhat);
    publish_flag(thread, member, order, scope, false);
    memory.mark_write(*thread.cta, member, 4, machine->now, site);
    memory.poke(member, memory.peek(member, 4) + value, 4);
  }
}

void fence_proxy_alias(Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 22);
  thread.alias = thread.known.generic;
  thread.alias.at[static_cast<size_t>(thread.cta->index)] = machine->now;
}

void put_signal(void* destination, const void* source, uint32_t bytes, uint64_t* signal,
                uint64_t value, int peer, Site site) {
  constexpr auto kWhat = "put with signal";
  constexpr uint32_t kPart = 256;  // messages travel in parts, in any order
  Thread* thread = &enter(site);
  meet_warp({.op = WarpOp::kPut, .what = kWhat, .argument = peer}, [&](Rendezvous& r) {
    GlobalMemory& memory = *machine->memory;
    char* to = memory.symmetric_peer(destination, bytes, peer, kWhat);
    char* flag = memory.symmetric_peer(signal, 8, peer, kWhat);
    const auto* from = static_cast<const char*>(source);
    memory.region_of(from, bytes, *thread->gpu, kWhat);
    for (Thread* lane : thread->warp->lanes) release_to(*lane, Scope::kSys);
    memory.check_read(*thread->cta, r.known.generic, from, bytes, kWhat);
    memory.mark_read(*thread->cta, from, bytes, kNever, site);

    struct Message {
      uint32_t parts_left;
    };
    auto message = std::make_shared<Message>(Message{(bytes + kPart - 1) / kPart});
    auto known = std::make_shared<Knowledge>(r.known);
    Cta* cta = thread->cta;
    const Gpu* receiver = machine->gpus[static_cast<size_t>(peer)].get();
    auto finish = [=, &memory] {
      stamp_release(*known, *cta);
      Flag& state = memory.flag(flag);
      state = Flag{};
      state.gpu = receiver;
      state.for_system = *known;
      memory.poke(flag, value, 8);
    };
    for (uint32_t done = 0; done < bytes; done += kPart) {
      const uint32_t part = std::min(kPart, bytes - done);
      enqueue(transient_channel(), [=, &memory] {
        std::vector<char> data(part);
        memory.read_gpu(*cta->cluster->gpu, from + done, data.data(), part, kWhat);
        memory.write_memory(to + done, data.data(), part);
        memory.mark_read(*cta, from + done, part, machine->now, site);
        memory.mark_write(*cta, to + done, part, machine->now, site);
        if (--message->parts_left == 0) finish();
      });
    }
  });
}

}  // namespace hw::model
