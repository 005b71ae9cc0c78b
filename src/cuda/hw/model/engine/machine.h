// SPDX-License-Identifier: Apache-2.0
// The state of a run. Single-threaded: a run is one process, and a seed is one schedule.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/hw/layouts.h"
#include "cuda/hw/model/engine/fiber.h"
#include "cuda/hw/model/launch.h"

namespace hw::model {

inline constexpr uint32_t kSharedBase = 1024;  // offset of Smem in a CTA's window, as on hardware
inline constexpr uint32_t kSharedLimit = 228 << 10;
inline constexpr int kTmemLanes = 128, kTmemColumns = 512;
inline constexpr int kMaxCtas = 64;
inline constexpr uint32_t kPoison = 0xFFFFFFFF;  // a NaN, as f32 and as two bf16
inline constexpr uint32_t kNever = 0xFFFFFFFF;

struct Thread;
struct Warp;
struct Cta;
struct Cluster;
struct Gpu;

// --- what a thread knows ---------------------------------------------------------------------------

/// One time for every CTA: how much of its work is known. A vector clock whose processes are CTAs.
struct Clock {
  std::array<uint32_t, kMaxCtas> at{};
  void join(const Clock& other, int ctas) {
    for (int i = 0; i < ctas; ++i) at[i] = std::max(at[i], other.at[i]);
  }
};
/// Three kinds of work: generic accesses of global memory; what asynchronous copies may rely on (after
/// a proxy fence); tcgen05 operations.
struct Knowledge {
  Clock generic, async, tensor;
  uint32_t sync_time = 0;  // when this thread last synchronised with anybody
  void join(const Knowledge& other);
};

// --- asynchronous work -----------------------------------------------------------------------------

/// Work that happens in order, at a time the scheduler chooses.
struct Channel {
  std::deque<std::function<void()>> queue;
  bool listed = false, transient = false;
  bool lazy = false;  // moves only when nothing else can
};

/// A copy from shared to global memory between its issue and its completion.
struct BulkStore {
  Thread* by;
  Cta* cta;
  Site site;
  uint32_t source;
  bool add = false;
  Element element = Element::kF32;
  struct Piece {
    char* global;            // null: outside the matrix
    uint32_t offset, bytes;  // in shared memory
  };
  std::vector<Piece> pieces;
  std::vector<unsigned char> data;
  bool read = false, written = false;
};

/// The accumulator of a warpgroup while wgmma owns it: the matrix, and where each thread keeps its part.
struct Accumulator {
  float value[64][256];
  int n = 0;
  std::array<float*, 128> registers{};
  std::array<int, 128> last_use{};
};
struct WgmmaOperation {
  uint64_t a, b;
  int n;
  bool accumulate;
  Major major_a, major_b;
  Accumulator* accumulator;
  Site site;
  int joined = 0;
  bool done = false;
};
struct TmemAccess {  // one tcgen05.ld or .st of a warp
  Warp* warp;
  bool store;
  int column, columns;
  std::array<uint32_t*, 32> registers{};
  std::vector<uint32_t> values;  // of a store: [lane][column]
  Clock seen;
  Site site;
  bool done = false;
};

// --- threads, warps, CTAs --------------------------------------------------------------------------

enum class Stop { kNone, kMeeting, kBarrier, kFlag, kPeer, kRegisters, kOther };
/// Why a thread does not run.
struct Wait {
  Stop stop = Stop::kNone;
  const char* what = "";
  uint32_t a = 0, b = 0;  // barrier offset and parity; id and threads of a meeting
  const void* flag = nullptr;
  int flag_bytes = 4;
  uint64_t value = 0;
  const void* raised = nullptr;  // of a wait that may end softly
  bool expired = false;
};

struct StoredWord {
  uint32_t value, mask;
  int cta;
};
/// Words of global memory, by address, that some level of the hierarchy holds back.
using Words = std::unordered_map<uintptr_t, StoredWord>;
struct Range {
  uint32_t offset, bytes;
};

struct Thread {
  Self id;
  Context context;
  Cta* cta;
  Warp* warp;
  Gpu* gpu;
  bool done = false;
  Site site;
  Wait wait;
  uint32_t path = 0;  // what this lane did since its warp last met: .aligned operations compare it

  Knowledge known;
  Knowledge observed_gpu;     // of flags of this GPU read relaxed: an acquire fence makes it known
  Knowledge observed_system;  // of flags released at .sys, likewise
  Knowledge fenced;           // known at the last release fence: relaxed stores pass it on
  bool has_fenced = false;
  Scope fence_scope = Scope::kCta;
  Clock alias;                     // known.generic at the last fence.proxy.alias
  Clock tensor_seen;               // known.tensor at the last fence::after_thread_sync
  uint32_t tensor_fence_time = 0;  // of that fence
  Words stores;                    // weak stores that nobody else has to see yet
  std::vector<Range> dirty;        // generic writes of shared memory before a proxy fence

  std::vector<std::shared_ptr<BulkStore>> open_group;
  std::vector<std::vector<std::shared_ptr<BulkStore>>> groups;

  int wgmma_issued = 0;
  std::vector<int> wgmma_groups;  // operations issued up to each commit
  bool wgmma_fenced = false;
  std::vector<Accumulator*> accumulators;
};

enum class WarpOp {
  kSync,
  kShuffle,
  kElect,
  kClusterArrive,
  kClusterWait,
  kRegisters,
  kStoreMatrix,
  kWgmmaFence,
  kWgmmaCommit,
  kWgmmaWait,
  kTmemAlloc,
  kTmemRelinquish,
  kTmemDealloc,
  kTmemLoad,
  kTmemStore,
  kTmemWait,
  kPut
};
/// The lanes of a warp on their way to a warp-wide operation.
struct Rendezvous {
  WarpOp op{};
  int argument = 0;
  uint32_t path = 0, mask = 0;
  Site site;
  std::array<uint32_t, 32> in{}, out{};
  std::array<uint32_t*, 32> registers{};
  Knowledge known;
  std::vector<Thread*> waiting;
};
struct TmemUse {  // a finished load that its lanes have not fenced yet
  int column, columns;
  uint32_t lanes;
  bool waited, store;
};
struct Warp {
  Cta* cta;
  int index;
  std::array<Thread*, 32> lanes{};
  int alive = 32;
  uint32_t weight = 0;
  int registers = 0;
  Rendezvous meeting;
  std::vector<std::shared_ptr<TmemAccess>> accesses;  // not waited for
  std::vector<TmemUse> uses;
};

/// Threads on their way to bar.sync, bar.arrive or the cluster barrier.
struct Meeting {
  int arrived = 0, expected = 0;
  Knowledge known;
  std::vector<Thread*> waiting;
};
struct MBarrier {
  uint32_t count, pending;
  int64_t bytes = 0;                     // announced and not delivered
  int64_t announced = 0, delivered = 0;  // in this phase
  uint32_t phase = 0;
  bool fenced = false;
  Knowledge local, cluster;            // of the arrivals of this phase, by scope
  Knowledge local_done, cluster_done;  // of the last completed phase
  std::vector<Thread*> waiting;
};
struct WordState {
  uint8_t written : 1, dirty : 1, in_flight : 1;
};
struct TmemColumn {  // of one quarter of the lanes
  bool allocated = false, written = false, uncommitted = false;
  int in_flight = 0, unfenced = 0;
  uint32_t write_time = 0, release_time = 0;
  int write_cta = 0;
  const Thread* issuer = nullptr;   // of the tcgen05.mma
  const Warp* stored_by = nullptr;  // by tcgen05.st and not by tcgen05.mma
};
struct WarpGroup {
  std::deque<std::unique_ptr<WgmmaOperation>> operations;
  Channel channel;
  std::vector<Thread*> waiting;
  std::vector<std::unique_ptr<Accumulator>> accumulators;
};

struct Cta {
  Cluster* cluster;
  int rank, index;  // in the cluster; in the run
  int alive;
  bool exited = false;
  uint32_t bytes;
  unsigned char* generic;            // what C++ sees
  std::vector<unsigned char> async;  // what TMA and the tensor cores see
  std::vector<WordState> words;
  std::map<uint32_t, MBarrier> barriers;
  Meeting sync;
  std::array<Meeting, 16> named;
  Words stores;
  std::vector<Range> dirty;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<WarpGroup>> groups;
  std::vector<Thread*> registers_wanted;

  std::vector<float> tmem;  // [lane][column]
  std::array<std::array<TmemColumn, kTmemColumns>, 4> columns;
  std::vector<Range> tmem_allocations;  // offset: column
  std::vector<uint32_t> tmem_bases;     // of every allocation so far
  bool tmem_relinquished = false;
  int tmem_group = 0;
};
struct Cluster {
  int id;
  Gpu* gpu;
  bool started = false;
  std::vector<std::unique_ptr<Cta>> ctas;
  Meeting barrier;
  int phase = 0;
  Knowledge done;
  std::unordered_map<const Thread*, int> arrived_in;
  std::map<int, Channel> umma;  // by the CTA that issues
};
struct Gpu {
  int rank;
  Words stores;  // released at .gpu, not yet at .sys
};

// --- the run -----------------------------------------------------------------------------------------

struct Machine {
  Options options;
  Shape shape;
  Timing timing = Timing::kMixed;
  Body body = nullptr;
  const void* params = nullptr;
  GlobalMemory* memory = nullptr;

  uint64_t random = 0;
  uint32_t now = 1;
  int elected = 0;
  bool failed = false;
  std::string failure;
  int peer_timeouts = 0;
  uint64_t switches = 0, async_operations = 0;

  std::vector<std::unique_ptr<Gpu>> gpus;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<Cta*> ctas;
  std::vector<std::unique_ptr<Thread>> threads;
  int next_cluster = 0, live = 0;

  Context scheduler;
  Thread* current = nullptr;
  std::vector<Thread*> ready;
  std::vector<Thread*> flag_waiters;
  std::vector<Channel*> channels;
  std::vector<std::unique_ptr<Channel>> pool;
  std::vector<Channel*> free_channels;
  std::vector<std::shared_ptr<BulkStore>> bulk_stores;

  ~Machine();
  int cta_count() const { return static_cast<int>(ctas.size()); }
};
extern Machine* machine;

inline void Knowledge::join(const Knowledge& other) {
  const int ctas = machine->cta_count();
  generic.join(other.generic, ctas);
  async.join(other.async, ctas);
  tensor.join(other.tensor, ctas);
  sync_time = std::max(sync_time, other.sync_time);
}

}  // namespace hw::model
