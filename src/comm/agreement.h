// SPDX-License-Identifier: Apache-2.0
// Before a group computes, every rank shows every other what it was asked for. A disagreement, or one
// rank's bad input, becomes the same Error on all of them, and nobody is left waiting.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "logitless/group.h"
#include "logitless/problem.h"

namespace logitless {

// What one rank was asked for. Exchanged as bytes: plain numbers and text only.
struct Header {
  static constexpr int kMessageBytes = 400;

  int64_t version = 1;
  int64_t failed = 0;    // 1 + ErrorKind of a rank that cannot make the call; `message` says why
  int64_t tokens = 0;    // of target
  int64_t x_tokens = 0;  // of x: the token shard where sequence parallel, else `tokens`
  int64_t hidden = 0;
  int64_t vocab_rows = 0;
  int64_t vocab_start = -1;  // as given by the caller, −1 where not
  int64_t vocab_size = -1;   // likewise
  int64_t ignore_index = 0;
  int64_t per_token_temperature = 0;
  double temperature = 1.0;
  int64_t wants_entropy = 0;
  int64_t sequence_parallel = 0;
  int64_t upstream = 0;          // backward: 1 nll, 2 entropy, 4 lse
  int64_t wants_input_grad = 0;  // may differ: any rank's wish is enough
  uint64_t fingerprint = 0;      // of a few weight rows; 0 where they say nothing
  int64_t least_target = 0;  // over the tokens that are not ignored; least > most: there are none
  int64_t most_target = -1;
  char phase[16] = {};
  char dtype[16] = {};
  char message[kMessageBytes] = {};
};

// Copies as much of a text as a header's field holds.
template <size_t kSize>
void set_text(char (&field)[kSize], const std::string& text) {
  text.copy(field, kSize - 1);
  field[text.size() < kSize ? text.size() : kSize - 1] = '\0';
}

struct Shard {
  int64_t start = 0;
  int64_t rows = 0;
};

// What all ranks then know.
struct Agreement {
  std::vector<Shard> shards;  // by rank
  int64_t vocab_size = 0;
  std::vector<int64_t> token_offsets;  // [R + 1]: whose tokens are whose, in dX's exchange
  bool any_wants_input_grad = false;
  int64_t least_target = 0;
  int64_t most_target = -1;

  int64_t token_block() const;  // tokens of the largest part
  // The rank whose shard holds `id`, which must be in [0, vocab_size).
  int owner_of(int64_t id) const;
};

// Collective. Throws the same Error on every rank.
Agreement agree(Group& group, const Header& mine);

// The collective counterpart of agree() on a rank that cannot make the call. Returns the failure as every
// rank sees it, naming this one; peers that do not come to hear it change nothing.
Error announce(Group& group, const std::string& phase, const Error& failure);

// Pure: what agree() does with everybody's headers.
Agreement conclude(const std::vector<Header>& headers);

// A number that is equal where the first, middle and last rows of two weights are equal; 0 where all
// those values are the same one, as in a weight that was just zeroed.
uint64_t fingerprint_of(const TensorView& weight);

}  // namespace logitless
