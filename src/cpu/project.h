// SPDX-License-Identifier: Apache-2.0
// The projection: tiles of logits, each handed to an epilogue and forgotten.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu/products.h"
#include "cpu/workers.h"
#include "head/backend.h"

namespace logitless::cpu {

// logits[columns][kTileTokens] of tokens [token, token + tokens) and columns [column, column + columns).
struct LogitsTile {
  float* logits;
  int64_t token;
  int64_t tokens;
  int64_t column;
  int64_t columns;
};

// Which part of x·Wᵀ: positions [0, tokens) of `index` (or the tokens themselves where it is null)
// by columns [begin, end); `begin` is a multiple of kTileVocab.
struct ProjectionRange {
  int64_t tokens;
  const int32_t* index;
  int64_t begin;
  int64_t end;
};

using Epilogue = std::function<void(const LogitsTile& tile)>;

void project(const LocalCall& call, Workers& workers, Products& products,
             const ProjectionRange& range, const Epilogue& epilogue);

// The operand of a product that a weight view is.
Operand weight_operand(const TensorView& weight);

}  // namespace logitless::cpu
