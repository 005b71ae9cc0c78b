// SPDX-License-Identifier: Apache-2.0
// Every argument is checked here, once, before anything is computed: one sentence with the values.
#pragma once

#include "comm/agreement.h"
#include "logitless/head.h"

namespace logitless {

// Local checks of what both directions take; strides of axes of length 1 are made the natural ones.
Inputs checked(const Inputs& inputs, const Options& options);

void check_outputs(const Inputs& inputs, const Outputs& outputs);
void check_saved(const Inputs& inputs, const Saved& saved);
// The part of a stash that holds vocabulary: all of it, or a whole number of tiles.
TensorView live_stash(const Problem& problem, const TensorView& stash);
void check_backward(const Inputs& inputs, const Saved& saved, const Upstream& upstream,
                    const Gradients& gradients);

// What this rank tells the others of a call; the phase is filled in by the context.
Header header_of(const Inputs& inputs, const Options& options, int ranks);

// The first target outside [0, vocab_size) that is not ignored, as an Error naming its position.
void check_targets(const Agreement& agreement, const Inputs& inputs, const Options& options);

}  // namespace logitless
