// SPDX-License-Identifier: Apache-2.0
// Rows to and from tensors of any dtype and stride.
#pragma once

#include <cstddef>
#include <cstdint>

#include "logitless/tensor.h"

namespace logitless {

// to[row, column ...] = values, rounded once.
void write_row(const float* values, int64_t count, const TensorView& to, int64_t row,
               int64_t column);

// to[row, column ...] += values, rounded once.
void add_row(const float* values, int64_t count, const TensorView& to, int64_t row, int64_t column);

// values += factor · from[row, column ...].
void add_scaled(float* values, int64_t count, float factor, const TensorView& from, int64_t row,
                int64_t column);

// A whole row as it is, to and from contiguous memory of the tensor's dtype.
void copy_row(const TensorView& from, int64_t row, std::byte* to);
void copy_row_to(const std::byte* from, const TensorView& to, int64_t row);

// Element of an int32 or int64 vector.
int64_t integer_at(const TensorView& vector, int64_t place);

}  // namespace logitless
