// SPDX-License-Identifier: Apache-2.0
// The types of the instruction layer. Included through hw.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/hw/macros.h"

namespace hw {

/// A bfloat16 in memory.
struct Bf16 {
  uint16_t bits;
};
struct alignas(8) Vec2 {
  uint32_t x, y;
};
struct alignas(16) Vec4 {
  uint32_t x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};

/// Who takes part in an ordering (PTX ISA, "Scope").
enum class Scope { kCta, kCluster, kGpu, kSys };
/// How an access orders others around it (PTX ISA, "Memory consistency model").
enum class Order { kRelaxed, kAcquire, kRelease, kAcqRel };
/// How long L2 should keep what a copy touches.
enum class Cache { kNormal, kEvictFirst, kEvictLast };
/// One CTA works alone, or two of a cluster as a pair (tcgen05).
enum class CtaGroup { kOne = 1, kTwo = 2 };
/// Which index of a matrix operand is contiguous.
enum class Major : uint32_t { kK = 0, kMn = 1 };

/// An address in global memory. It cannot be dereferenced: hw::ld and hw::st do that, and the model
/// sees every access.
template <class T>
class Global {
 public:
  Global() = default;
  HW_BOTH explicit Global(T* address) : address_(address) {}
  /// Element `index` further on.
  HW_BOTH Global operator+(int64_t index) const { return Global(address_ + index); }
  HW_BOTH explicit operator bool() const { return address_ != nullptr; }
  /// The address itself: for the instruction layer and for hosts.
  HW_BOTH T* address() const { return address_; }

 private:
  T* address_;
};

/// An address that reaches the same place in every GPU of a group; only multimem instructions may
/// touch it (PTX ISA, "multimem").
template <class T>
class Multicast {
 public:
  Multicast() = default;
  HW_BOTH explicit Multicast(T* address) : address_(address) {}
  HW_BOTH Multicast operator+(int64_t index) const { return Multicast(address_ + index); }
  HW_BOTH explicit operator bool() const { return address_ != nullptr; }
  HW_BOTH T* address() const { return address_; }

 private:
  T* address_;
};

/// An mbarrier in shared memory (PTX ISA, "mbarrier").
class Barrier {
  uint64_t bits_;
};

/// Bytes of shared memory that are reached by address only.
template <int kBytes, int kAlign = 1024>
class Buffer {
 public:
  static constexpr int kSize = kBytes;

 private:
  alignas(kAlign) unsigned char bytes_[kBytes];
};

/// What a wait on another rank tells the host when it ends without its flag. Lives in memory that
/// the host can read while the kernel runs.
struct PeerFailure {
  uint32_t state;  // 0: nothing happened; 1: the fields below hold the first failure
  uint32_t rank, peer;
  uint32_t what;            // the caller's name of the wait
  uint32_t expected, seen;  // of the flag
};
/// What waits on other ranks share: the first that gives up stops the others.
struct Abort {
  Global<uint32_t> raised;  // 0, or 1 once a wait has given up; global memory of this rank
  Global<PeerFailure> failure;
  uint64_t patience_ns;
};
/// One wait on another rank, for its report.
struct PeerWait {
  uint32_t rank, peer, what;
};

}  // namespace hw
