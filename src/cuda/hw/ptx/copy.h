// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies (PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk").
#pragma once

#include <cuda.h>

#include "cuda/hw/ptx/memory.h"
#include "cuda/hw/tensor_shape.h"

namespace hw {

using TensorMap = CUtensorMap;

namespace ptx {

/// The driver's function, found at run time: nothing here links the driver.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || found == nullptr) {
    throw std::runtime_error("tensor map: the CUDA driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}
inline CUtensorMapSwizzle swizzle_mode(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::k128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case Swizzle::k64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::k32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}
/// What createpolicy.fractional.L2 returns for a fraction of one; kNormal is a copy without a hint.
template <Cache kCache>
constexpr uint64_t kCachePolicy =
    kCache == Cache::kEvictFirst ? 0x12F0000000000000 : 0x14F0000000000000;

}  // namespace ptx

template <class T>
inline TensorMap tensor_map(Global<T> base, const TensorShape& shape) {
  auto* address = const_cast<void*>(static_cast<const void*>(base.address()));
  check_tensor_shape(address, shape);
  const cuuint64_t sizes[2] = {shape.columns, shape.rows}, pitches[1] = {shape.pitch_bytes};
  const cuuint32_t box[2] = {shape.box_columns, shape.box_rows}, steps[2] = {1, 1};
  TensorMap map;
  static const auto encode = ptx::tensor_map_encoder();
  const CUresult result =
      encode(&map,
             shape.element == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
             2, address, sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             ptx::swizzle_mode(shape.swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("tensor map: cuTensorMapEncodeTiled returned " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

HW_FN void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
template <Cache kCache = Cache::kNormal>
HW_FN void tma_load(uint32_t destination, const TensorMap& map, int column, int row,
                    uint32_t barrier) {
  if constexpr (kCache == Cache::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(ptx::kCachePolicy<kCache>)
        : "memory");
  }
}
template <Cache kCache = Cache::kNormal>
HW_FN void tma_load_multicast(uint32_t destination, const TensorMap& map, int column, int row,
                              uint32_t barrier, uint16_t ctas) {
  if constexpr (kCache == Cache::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ctas), "l"(ptx::kCachePolicy<kCache>)
        : "memory");
  }
}
// Elsewhere these two do not exist, and a kernel that calls them does not compile.
#if !defined(__CUDA_ARCH__) || __CUDA_HAS_ARCH_FAMILY_SPECIFIC(100)
template <Cache kCache = Cache::kNormal>
HW_FN void tma_load_pair(uint32_t destination, const TensorMap& map, int column, int row,
                         uint32_t barrier) {
  if constexpr (kCache == Cache::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2 [%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(ptx::kCachePolicy<kCache>)
        : "memory");
  }
}
template <Cache kCache = Cache::kNormal>
HW_FN void tma_load_pair_multicast(uint32_t destination, const TensorMap& map, int column, int row,
                                   uint32_t barrier, uint16_t ctas) {
  if constexpr (kCache == Cache::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.cta_group::2 [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.cta_group::2.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(
            destination),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ctas), "l"(ptx::kCachePolicy<kCache>)
        : "memory");
  }
}
#endif
template <Cache kCache = Cache::kNormal>
HW_FN void tma_store(const TensorMap& map, int column, int row, uint32_t source) {
  if constexpr (kCache == Cache::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
            &map),
        "r"(column), "r"(row), "r"(source)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"
        " [%0, {%1, %2}], [%3], %4;" ::"l"(&map),
        "r"(column), "r"(row), "r"(source), "l"(ptx::kCachePolicy<kCache>)
        : "memory");
  }
}
HW_FN void tma_reduce_add(const TensorMap& map, int column, int row, uint32_t source) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], "
      "[%3];" ::"l"(&map),
      "r"(column), "r"(row), "r"(source)
      : "memory");
}
template <class T>
HW_FN void bulk_load(uint32_t destination, Global<T> source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source.address()), "r"(bytes), "r"(barrier)
      : "memory");
}
template <class T>
HW_FN void bulk_store(Global<T> destination, uint32_t source, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination.address()),
      "r"(source), "r"(bytes)
      : "memory");
}
HW_FN void bulk_reduce_add(Global<float> destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   destination.address()),
               "r"(source), "r"(bytes)
               : "memory");
}
HW_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
HW_FN void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
HW_FN void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace hw
