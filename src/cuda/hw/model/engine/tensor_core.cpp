// SPDX-License-Identifier: Apache-2.0
#include "cuda/hw/model/engine/tensor_core.h"

#include <cmath>
#include <cstring>

#include "cuda/hw/model/engine/report.h"
#include "cuda/hw/model/engine/shared_memory.h"
#include "cuda/hw/model/numbers.h"

namespace hw::model {
namespace {

[[noreturn]] void bad_field(const char* what, uint64_t descriptor, const std::string& why) {
  fault(format("%s: descriptor 0x%016llx: ", what, static_cast<unsigned long long>(descriptor)) +
        why);
}

Swizzle swizzle_of(uint64_t code, bool blackwell, const char* what, uint64_t descriptor) {
  if (blackwell) {
    switch (code) {
      case 0:
        return Swizzle::kNone;
      case 2:
        return Swizzle::k128;
      case 4:
        return Swizzle::k64;
      case 6:
        return Swizzle::k32;
      default:
        break;
    }
    bad_field(
        what, descriptor,
        format("swizzle is %llu; 0, 2, 4 and 6 exist here", static_cast<unsigned long long>(code)));
  }
  constexpr Swizzle kModes[] = {Swizzle::kNone, Swizzle::k128, Swizzle::k64, Swizzle::k32};
  return kModes[code & 3];
}

void check_reserved(uint64_t descriptor, uint64_t used, const char* what) {
  const uint64_t set = descriptor & ~used;
  if (set != 0) {
    bad_field(what, descriptor,
              format("reserved bits 0x%016llx are set", static_cast<unsigned long long>(set)));
  }
}

void check_base(uint32_t start, uint64_t base, Swizzle swizzle, const char* what,
                uint64_t descriptor) {
  if (swizzle == Swizzle::kNone) return;
  // The pattern repeats every eight rows; a start inside it needs the base offset.
  const uint32_t pattern = 8 * swizzle_bytes(swizzle);
  const uint64_t wanted = start % pattern >> 7 & 7;
  if (base != wanted) {
    bad_field(what, descriptor,
              format("start 0x%x lies %llu rows of 128 bytes into the swizzle's pattern, base "
                     "offset is %llu",
                     start, static_cast<unsigned long long>(wanted),
                     static_cast<unsigned long long>(base)));
  }
}

}  // namespace

Operand decode_wgmma(uint64_t descriptor, const char* what) {
  using D = WgmmaOperand;
  check_reserved(descriptor,
                 D::Start::put(~0ULL) | D::Leading::put(~0ULL) | D::Stride::put(~0ULL) |
                     D::Base::put(~0ULL) | D::SwizzleMode::put(~0ULL),
                 what);
  return {static_cast<uint32_t>(D::Start::get(descriptor)) << 4,
          {static_cast<uint32_t>(D::Leading::get(descriptor)) << 4,
           static_cast<uint32_t>(D::Stride::get(descriptor)) << 4,
           swizzle_of(D::SwizzleMode::get(descriptor), false, what, descriptor)},
          static_cast<uint32_t>(D::Base::get(descriptor))};
}

Operand decode_umma(uint64_t descriptor, const char* what) {
  using D = UmmaOperand;
  check_reserved(descriptor,
                 D::Start::put(~0ULL) | D::Leading::put(~0ULL) | D::Stride::put(~0ULL) |
                     D::Version::put(~0ULL) | D::Base::put(~0ULL) | D::Absolute::put(~0ULL) |
                     D::SwizzleMode::put(~0ULL),
                 what);
  if (D::Version::get(descriptor) != 1) {
    bad_field(what, descriptor,
              format("version (bits 46-48) is %llu, it must be 1",
                     static_cast<unsigned long long>(D::Version::get(descriptor))));
  }
  if (D::Absolute::get(descriptor) != 0) {
    bad_field(what, descriptor, "leading offset mode is absolute, which the model does not know");
  }
  const Operand operand{static_cast<uint32_t>(D::Start::get(descriptor)) << 4,
                        {static_cast<uint32_t>(D::Leading::get(descriptor)) << 4,
                         static_cast<uint32_t>(D::Stride::get(descriptor)) << 4,
                         swizzle_of(D::SwizzleMode::get(descriptor), true, what, descriptor)}};
  check_base(operand.start, D::Base::get(descriptor), operand.layout.swizzle, what, descriptor);
  return operand;
}

void load_operand(const Cta& cta, const Operand& operand, Major major, int rows, float* out,
                  int row_stride, int k_stride, const char* what) {
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < kProductK; ++k) {
      const uint32_t place = operand.start + operand_offset(major, operand.layout, r, k);
      // The row of the pattern is that of the address less the base offset.
      const uint32_t row = place - operand.base * 128;
      const uint32_t offset = place ^ swizzled(row, operand.layout.swizzle) ^ row;
      check_range(cta, offset, 2, what);
      check_async_read(cta, offset, 2, what);
      uint16_t bits;
      std::memcpy(&bits, &cta.async[offset], 2);
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      std::memcpy(&out[r * row_stride + k * k_stride], &wide, 4);
    }
  }
}

namespace {

/// A finite f32 as sign * magnitude * 2^(exponent - 23).
struct Parts {
  int64_t magnitude;
  int exponent;
  bool negative;
};
Parts parts_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const int biased = static_cast<int>(bits >> 23 & 0xFF);
  const int64_t fraction = bits & 0x7FFFFF;
  return {biased == 0 ? fraction : fraction | 0x800000, biased == 0 ? -126 : biased - 127,
          bits >> 31 != 0};
}
/// `magnitude` moved by `shift` bits; what falls off is lost.
int64_t moved(int64_t magnitude, int shift) {
  if (shift >= 0) return shift > 62 ? 0 : magnitude << shift;
  return shift < -62 ? 0 : magnitude >> -shift;
}
/// sum * 2^(exponent), cut toward zero to f32.
float cut_to_f32(int64_t sum, int exponent) {
  const bool negative = sum < 0;
  uint64_t magnitude = negative ? static_cast<uint64_t>(-sum) : static_cast<uint64_t>(sum);
  if (magnitude == 0) return 0;
  const int bits = 64 - __builtin_clzll(magnitude);
  if (bits > 24) {
    magnitude >>= bits - 24;
    exponent += bits - 24;
  }
  // Subnormal results lose the bits below 2^-149.
  if (exponent < -149) {
    const int lost = -149 - exponent;
    magnitude = lost > 63 ? 0 : magnitude >> lost;
    exponent = -149;
  }
  if (magnitude == 0) return 0;  // never -0
  const auto value = static_cast<float>(std::ldexp(static_cast<double>(magnitude), exponent));
  return negative ? -value : value;
}

/// What a sum is that has terms which are not finite; 0 if it has none.
float not_finite(float c, const float* a, const float* b, int b_stride) {
  bool positive = c == INFINITY, negative = c == -INFINITY, nan = std::isnan(c);
  for (int k = 0; k < kProductK; ++k) {
    const float product = a[k] * b[k * b_stride];  // of bf16: overflows only here if infinite
    if (std::isfinite(a[k]) && std::isfinite(b[k * b_stride])) continue;
    nan = nan || std::isnan(product);
    positive = positive || product == INFINITY;
    negative = negative || product == -INFINITY;
  }
  if (nan || (positive && negative)) return as_float(0x7FFFFFFF);
  return positive ? INFINITY : negative ? -INFINITY : 0;
}

}  // namespace

float exact_sum(float c, const float* a, const float* b, int b_stride) {
  constexpr int kFraction = 25, kSmallest = -133;  // found by comparing with a Hopper GPU
  const float special = not_finite(c, a, b, b_stride);
  if (special != 0) return special;
  Parts pa[kProductK], pb[kProductK];
  const Parts pc = parts_of(c);
  int top = c != 0 ? std::max(pc.exponent, kSmallest) : kSmallest;
  for (int k = 0; k < kProductK; ++k) {
    pa[k] = parts_of(a[k]);
    pb[k] = parts_of(b[k * b_stride]);
    if (a[k] != 0 && b[k * b_stride] != 0) top = std::max(top, pa[k].exponent + pb[k].exponent);
  }
  int64_t sum = 0;
  const auto add = [&](int64_t magnitude, int exponent, bool negative) {
    const int64_t part = moved(magnitude, exponent + kFraction - top);
    sum += negative ? -part : part;
  };
  for (int k = 0; k < kProductK; ++k) {
    // bf16 has 16 zero bits below its fraction: the product of the upper parts is exact.
    add((pa[k].magnitude >> 16) * (pb[k].magnitude >> 16), pa[k].exponent + pb[k].exponent - 14,
        pa[k].negative != pb[k].negative);
  }
  add(pc.magnitude, pc.exponent - 23, pc.negative);
  return cut_to_f32(sum, top - kFraction);
}

void multiply(float* d, int d_stride, const float* a, const float* b, int b_stride, int m, int n,
              bool accumulate) {
  for (int i = 0; i < m; ++i) {
    float* row = d + static_cast<int64_t>(i) * d_stride;
    if (!accumulate) std::fill(row, row + n, 0.0F);
    if (machine->options.exact) {
      for (int j = 0; j < n; ++j) row[j] = exact_sum(row[j], a + i * kProductK, b + j, b_stride);
      continue;
    }
    for (int k = 0; k < kProductK; ++k) {
      const float x = a[i * kProductK + k];
      const float* from = b + k * b_stride;
      for (int j = 0; j < n; ++j) row[j] += x * from[j];
    }
  }
}

}  // namespace hw::model
