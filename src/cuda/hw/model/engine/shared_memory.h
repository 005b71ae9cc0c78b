// SPDX-License-Identifier: Apache-2.0
// Shared memory: two views of its bytes, generic and asynchronous, and a state for every word.
#pragma once

#include "cuda/hw/model/engine/machine.h"

namespace hw::model {

/// The CTA that a shared::cluster address names.
Cta& cta_of(Cluster& cluster, uint32_t address, const char* what);
void check_range(const Cta& cta, uint32_t offset, uint32_t bytes, const char* what);
/// An asynchronous engine reads or writes these bytes: they must be settled.
void check_async_read(const Cta& cta, uint32_t offset, uint32_t bytes, const char* what);
/// The bytes are on their way: nobody may look, and who does finds poison.
void begin_async_write(Cta& cta, uint32_t offset, uint32_t bytes, const char* what);
void async_write(Cta& cta, uint32_t offset, const void* from, uint32_t bytes);
void end_async_write(Cta& cta, uint32_t offset, uint32_t bytes);
/// A generic write by the running thread, visible to asynchronous engines only after a proxy fence.
void note_generic_write(Cta& cta, uint32_t offset, uint32_t bytes, const char* what);
void make_cta_memory(Cta& cta, uint32_t bytes);

}  // namespace hw::model
