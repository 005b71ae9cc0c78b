// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies: TMA tensors and plain bytes. The device model's half of ptx/copy.h.
#pragma once

#include "cuda/hw/model/memory.h"
#include "cuda/hw/tensor_shape.h"

namespace hw {

struct alignas(64) TensorMap {
  void* base;
  TensorShape shape;
};

namespace model {

TensorMap tensor_map(void* base, const TensorShape& shape);
enum class Landing { kOwn, kMulticast, kPair, kPairMulticast };
void tma_load(uint32_t destination, const TensorMap& map, int column, int row, uint32_t barrier,
              Landing landing, uint32_t ctas, Site site);
void tma_store(const TensorMap& map, int column, int row, uint32_t source, bool add, Site site);
void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
               Site site);
void bulk_store(void* destination, uint32_t source, uint32_t bytes, bool add, Site site);
void bulk_commit(Site site);
void bulk_wait(int pending, bool read_only, Site site);

}  // namespace model

/// Host side: describes `base` to the copy engine. Throws what check_tensor_shape throws.
template <class T>
TensorMap tensor_map(Global<T> base, const TensorShape& shape) {
  return model::tensor_map(const_cast<void*>(static_cast<const void*>(base.address())), shape);
}

inline void prefetch(const TensorMap&) {}
/// A box from global into this CTA's shared memory; its bytes are reported to `barrier`, which is this
/// CTA's.
template <Cache kCache = Cache::kNormal>
inline void tma_load(uint32_t destination, const TensorMap& map, int column, int row,
                     uint32_t barrier, Site site = Site::current()) {
  model::tma_load(destination, map, column, row, barrier, model::Landing::kOwn, 0, site);
}
/// Into the same place of every CTA in the mask; each one's own barrier is told.
template <Cache kCache = Cache::kNormal>
inline void tma_load_multicast(uint32_t destination, const TensorMap& map, int column, int row,
                               uint32_t barrier, uint16_t ctas, Site site = Site::current()) {
  model::tma_load(destination, map, column, row, barrier, model::Landing::kMulticast, ctas, site);
}
/// As tma_load, but the barrier may be the pair's leader's (cta_group::2).
template <Cache kCache = Cache::kNormal>
inline void tma_load_pair(uint32_t destination, const TensorMap& map, int column, int row,
                          uint32_t barrier, Site site = Site::current()) {
  model::tma_load(destination, map, column, row, barrier, model::Landing::kPair, 0, site);
}
/// Multicast; for each destination CTA the barrier at the same offset in its pair's CTA that
/// `barrier` names (own or leader) is told.
template <Cache kCache = Cache::kNormal>
inline void tma_load_pair_multicast(uint32_t destination, const TensorMap& map, int column, int row,
                                    uint32_t barrier, uint16_t ctas, Site site = Site::current()) {
  model::tma_load(destination, map, column, row, barrier, model::Landing::kPairMulticast, ctas,
                  site);
}
template <Cache kCache = Cache::kNormal>
inline void tma_store(const TensorMap& map, int column, int row, uint32_t source,
                      Site site = Site::current()) {
  model::tma_store(map, column, row, source, false, site);
}
/// Adds the box to global memory, each element .relaxed.gpu: never into another GPU's memory.
inline void tma_reduce_add(const TensorMap& map, int column, int row, uint32_t source,
                           Site site = Site::current()) {
  model::tma_store(map, column, row, source, true, site);
}
/// Plain bytes; addresses and sizes in multiples of 16.
template <class T>
inline void bulk_load(uint32_t destination, Global<T> source, uint32_t bytes, uint32_t barrier,
                      Site site = Site::current()) {
  model::bulk_load(destination, source.address(), bytes, barrier, site);
}
template <class T>
inline void bulk_store(Global<T> destination, uint32_t source, uint32_t bytes,
                       Site site = Site::current()) {
  model::bulk_store(destination.address(), source, bytes, false, site);
}
inline void bulk_reduce_add(Global<float> destination, uint32_t source, uint32_t bytes,
                            Site site = Site::current()) {
  model::bulk_store(destination.address(), source, bytes, true, site);
}
/// Closes the group of this thread's stores and reductions so far.
inline void bulk_commit(Site site = Site::current()) { model::bulk_commit(site); }
/// Until at most kPending groups have still to read shared memory.
template <int kPending>
inline void bulk_wait_read(Site site = Site::current()) {
  model::bulk_wait(kPending, true, site);
}
/// Until at most kPending groups are incomplete; the writes of the others are visible to this thread.
template <int kPending>
inline void bulk_wait(Site site = Site::current()) {
  model::bulk_wait(kPending, false, site);
}

}  // namespace hw
