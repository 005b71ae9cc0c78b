// SPDX-License-Identifier: Apache-2.0
// Operands of the tensor cores for tests: small matrices of whole numbers, put into shared memory by
// ordinary stores in every layout.
#pragma once

#include "runs.h"

namespace logitless::model_test {

/// Where a tile of rows x k elements lies in shared memory, densely. One instruction takes 16 of k.
struct TileLayout {
  hw::Major major;
  hw::OperandLayout operand;
  int rows, k;

  HW_BOTH static TileLayout of(hw::Major major, hw::Swizzle swizzle, int rows, int k) {
    const uint32_t row = hw::swizzle_bytes(swizzle);
    const auto urows = static_cast<uint32_t>(rows), uk = static_cast<uint32_t>(k);
    if (major == hw::Major::kK) {  // eight rows of one width of k after the other, then the next k
      return {major,
              {.leading_bytes = urows * row, .stride_bytes = 8 * row, .swizzle = swizzle},
              rows,
              k};
    }
    if (swizzle == hw::Swizzle::kNone) {
      return {major, {.leading_bytes = 128, .stride_bytes = uk * 16, .swizzle = swizzle}, rows, k};
    }
    return {
        major, {.leading_bytes = uk * row, .stride_bytes = 8 * row, .swizzle = swizzle}, rows, k};
  }
  /// Where the step that begins at k lies, from the tile's start.
  HW_BOTH uint32_t step(int from_k) const { return hw::operand_offset(major, operand, 0, from_k); }
};

/// All threads of the CTA store a row-major matrix [rows, k], from its row `first_row`, into a tile.
inline void store_tile(uint32_t tile, const TileLayout& layout, hw::Global<const hw::Bf16> from,
                       int first_row, int threads) {
  const bool by_k = layout.major == hw::Major::kK;
  // Two elements that share a word: neighbours in k or in the rows.
  const int outer = by_k ? layout.rows : layout.k, inner = by_k ? layout.k : layout.rows;
  for (int i = hw::thread(); i < outer * inner / 2; i += threads) {
    const int far = i / (inner / 2), near = i % (inner / 2) * 2;
    const auto element = [&](int at) {
      const int row = by_k ? far : at, k = by_k ? at : far;
      return uint32_t{hw::ld(from + ((first_row + row) * layout.k + k)).bits};
    };
    const uint32_t offset = by_k ? hw::operand_offset(layout.major, layout.operand, far, near)
                                 : hw::operand_offset(layout.major, layout.operand, near, far);
    hw::st_shared(hw::swizzled(tile + offset, layout.operand.swizzle),
                  element(near) | element(near + 1) << 16);
  }
}

/// Whole numbers in -8 ... 8: their products and sums are exact in every order.
inline std::vector<hw::Bf16> whole_numbers(uint64_t seed, int64_t count) {
  Random random(seed);
  std::vector<hw::Bf16> values(static_cast<size_t>(count));
  for (auto& v : values) v = to_bf16(static_cast<float>(random.below(17) - 8));
  return values;
}

/// a[m, k] b[n, k]^T, in plain loops.
inline std::vector<float> plain_product(const std::vector<hw::Bf16>& a,
                                        const std::vector<hw::Bf16>& b, int m, int n, int k) {
  std::vector<float> d(static_cast<size_t>(m) * static_cast<size_t>(n));
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int x = 0; x < k; ++x) {
        sum += value_of(a[static_cast<size_t>(i * k + x)]) *
               value_of(b[static_cast<size_t>(j * k + x)]);
      }
      d[static_cast<size_t>(i * n + j)] = static_cast<float>(sum);
    }
  }
  return d;
}

inline hw::Global<const hw::Bf16> upload(World& world, const char* name,
                                         const std::vector<hw::Bf16>& values, int rank = 0) {
  return hw::Global<const hw::Bf16>(world.upload(name, values, rank).address());
}

}  // namespace logitless::model_test
