// SPDX-License-Identifier: Apache-2.0
// Names of the parts of a kernel's shared memory, so that a report can say `inputs.arrived[2]`
// instead of an offset. Host side only.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "cuda/hw/types.h"

namespace hw {

class Names {
 public:
  /// A part of `bytes` bytes at `offset`, made of elements of `stride` bytes.
  void add(const char* name, size_t offset, size_t bytes, size_t stride) {
    parts_.push_back({name, offset, bytes, stride});
  }
  /// A member of Smem; for a member of a member, `base` is the outer one's offset.
  template <class S, class M>
  void add(const char* name, M S::* member, size_t base = 0) {
    add(name, base + offset_of(member), sizeof(M), sizeof(std::remove_extent_t<M>));
  }
  template <class S, class M>
  static size_t offset_of(M S::* member) {
    // The address of a member of raw storage: nothing is read.
    alignas(S) static unsigned char storage[sizeof(S)];
    const auto* whole = reinterpret_cast<const S*>(storage);
    return static_cast<size_t>(reinterpret_cast<const unsigned char*>(&(whole->*member)) - storage);
  }
  /// `inputs.arrived[2]+8` for an offset into Smem; `smem+0x1234` where nothing has a name.
  std::string at(size_t offset) const {
    for (const Part& part : parts_) {
      if (offset < part.offset || offset >= part.offset + part.bytes) continue;
      const size_t inside = offset - part.offset;
      std::string text = part.name;
      if (part.bytes > part.stride) text += "[" + std::to_string(inside / part.stride) + "]";
      if (inside % part.stride != 0) text += "+" + std::to_string(inside % part.stride);
      return text;
    }
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string hex;
    for (size_t rest = offset; rest != 0 || hex.empty(); rest /= 16)
      hex.insert(0, 1, kDigits[rest % 16]);
    return "smem+0x" + hex;
  }

 private:
  struct Part {
    const char* name;
    size_t offset, bytes, stride;
  };
  std::vector<Part> parts_;
};

/// What kernel K calls the parts of its shared memory; nothing if it does not say.
template <class K>
Names names_of() {
  Names names;
  if constexpr (requires { K::describe(names); }) K::describe(names);
  return names;
}

}  // namespace hw
