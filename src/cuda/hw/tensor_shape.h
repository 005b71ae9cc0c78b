// SPDX-License-Identifier: Apache-2.0
// What a tensor map describes, and what the copy engine can do with it. Host side.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/hw/layouts.h"

namespace hw {

enum class Element { kBf16, kF32 };
HW_BOTH int element_bytes(Element element) { return element == Element::kBf16 ? 2 : 4; }

/// A row-major matrix and the box that one copy moves. Elements outside the matrix are read as zero and
/// never written; a load still counts the whole box.
struct TensorShape {
  Element element = Element::kBf16;
  uint64_t rows, columns, pitch_bytes;
  uint32_t box_rows, box_columns;
  Swizzle swizzle = Swizzle::k128;
};

/// Throws std::invalid_argument, with the values, for what the engine cannot do (CUDA driver API,
/// "cuTensorMapEncodeTiled"), and for boxes that are not as wide as their swizzle's pattern, which
/// nothing here needs.
inline void check_tensor_shape(const void* base, const TensorShape& s) {
  const auto refuse = [](const std::string& what) {
    throw std::invalid_argument("tensor map: " + what);
  };
  const auto text = [](uint64_t value) { return std::to_string(value); };
  const auto bytes = static_cast<uint64_t>(element_bytes(s.element));
  if (base == nullptr || reinterpret_cast<uintptr_t>(base) % 16 != 0) {
    refuse("expected a base address that is a multiple of 16");
  }
  if (s.pitch_bytes % 16 != 0) {
    refuse("expected a pitch in multiples of 16 bytes, got " + text(s.pitch_bytes));
  }
  if (s.rows < 1 || s.columns < 1 || s.columns * bytes > s.pitch_bytes) {
    refuse("expected rows >= 1 and columns that fit a pitch of " + text(s.pitch_bytes) +
           " bytes, got " + text(s.rows) + " x " + text(s.columns));
  }
  if (s.box_rows < 1 || s.box_rows > 256 || s.box_columns < 1 || s.box_columns > 256) {
    refuse("expected a box of 1..256 x 1..256, got " + text(s.box_rows) + " x " +
           text(s.box_columns));
  }
  const uint64_t row = s.box_columns * bytes;
  const bool plain = s.swizzle == Swizzle::kNone;
  if (row % 16 != 0 || (!plain && row != swizzle_bytes(s.swizzle))) {
    refuse("expected box rows of " +
           (plain ? std::string("16 n") : text(swizzle_bytes(s.swizzle))) + " bytes, got " +
           text(row));
  }
}

}  // namespace hw
