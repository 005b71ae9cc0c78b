// SPDX-License-Identifier: Apache-2.0
// Running kernels on the device model. The model's half of ptx/launch.h, and what tests use: GPUs with
// memory, options of a run, and its report.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/hw/model/copy.h"
#include "cuda/hw/model/peer.h"
#include "cuda/hw/names.h"

namespace hw {

namespace model {

class GlobalMemory;

/// The GPUs of a group and their memory. Reading what nobody wrote is a fault, like every access
/// outside an allocation, or from another host.
class World {
 public:
  /// `hosts[r]` is the host of rank r; all on one host if empty.
  explicit World(int ranks = 1, std::vector<int> hosts = {});
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int ranks() const;

  /// `count` elements that nobody has written yet, on one GPU.
  template <class T>
  Global<T> allocate(const std::string& name, int64_t count, int rank = 0) {
    return Global<T>(static_cast<T*>(raw(name, count * sizeof(T), rank)));
  }
  template <class T>
  Global<T> upload(const std::string& name, const std::vector<T>& values, int rank = 0) {
    auto p = allocate<T>(name, static_cast<int64_t>(values.size()), rank);
    write(p.address(), values.data(), values.size() * sizeof(T));
    return p;
  }
  template <class T>
  Global<T> filled(const std::string& name, int64_t count, T value, int rank = 0) {
    return upload(name, std::vector<T>(static_cast<size_t>(count), value), rank);
  }
  /// One allocation per rank, at corresponding places (put_signal needs it).
  template <class T>
  std::vector<Global<T>> symmetric(const std::string& name, int64_t count) {
    std::vector<Global<T>> all;
    for (void* p : raw_symmetric(name, count * sizeof(T))) all.emplace_back(static_cast<T*>(p));
    return all;
  }
  template <class T>
  std::vector<Global<T>> symmetric_filled(const std::string& name, int64_t count, T value) {
    auto all = symmetric<T>(name, count);
    const std::vector<T> values(static_cast<size_t>(count), value);
    for (auto& p : all) write(p.address(), values.data(), values.size() * sizeof(T));
    return all;
  }
  /// The multicast address of symmetric memory.
  template <class T>
  Multicast<T> multicast(const std::vector<Global<T>>& members) {
    std::vector<void*> places;
    for (auto& m : members) places.push_back(m.address());
    return Multicast<T>(static_cast<T*>(raw_multicast(places)));
  }
  /// Between launches: host writes, and what a kernel left. Unwritten bytes come back as 0xFF.
  template <class T>
  std::vector<T> download(Global<T> p, int64_t count) const {
    std::vector<T> values(static_cast<size_t>(count));
    read(p.address(), values.data(), values.size() * sizeof(T));
    return values;
  }
  template <class T>
  void assign(Global<T> p, const std::vector<T>& values) {
    write(p.address(), values.data(), values.size() * sizeof(T));
  }

  GlobalMemory& memory() { return *memory_; }

 private:
  void* raw(const std::string& name, int64_t bytes, int rank);
  std::vector<void*> raw_symmetric(const std::string& name, int64_t bytes);
  void* raw_multicast(const std::vector<void*>& members);
  void write(void* p, const void* from, size_t bytes);
  void read(const void* p, void* to, size_t bytes) const;

  std::unique_ptr<GlobalMemory> memory_;
};

/// When asynchronous work happens: at random, only when every thread waits, or at once.
enum class Timing { kMixed, kLate, kEarly };

struct Options {
  uint64_t seed = 1;  // seed % 3 is the timing
  int clusters_per_rank = 1 << 30;
  int resident_clusters = 1 << 30;  // how many the GPUs hold at once; the rest start as others end
  bool exact = false;               // tensor cores accumulate as the hardware does, bit for bit
};

struct Report {
  bool ok = true;
  std::string what;  // the first fault, or who waits for what in a deadlock
  uint64_t switches = 0, async_operations = 0;
  int peer_timeouts = 0;  // waits on other ranks that gave up
  double seconds = 0;
};

struct Shape {
  int threads, cluster, clusters;
  size_t shared_bytes;
  Names names;
};
using Body = void (*)(const void* params, void* smem);
Report run(World& world, const Shape& shape, const Options& options, Body body, const void* params);

}  // namespace model

/// One launch of kernel K: `clusters` clusters, dealt to the ranks in blocks of
/// options.clusters_per_rank.
template <class K>
model::Report launch(model::World& world, int clusters, const typename K::Params& params,
                     const model::Options& options = {}) {
  return model::run(
      world, {K::kThreads, K::kCluster, clusters, sizeof(typename K::Smem), names_of<K>()}, options,
      [](const void* p, void* s) {
        K::run(*static_cast<const typename K::Params*>(p), *static_cast<typename K::Smem*>(s));
      },
      &params);
}

}  // namespace hw
