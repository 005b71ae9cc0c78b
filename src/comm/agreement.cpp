// SPDX-License-Identifier: Apache-2.0
#include "comm/agreement.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "plan/cpu_tiles.h"

namespace logitless {

namespace {

static_assert(std::is_trivially_copyable_v<Header>, "headers travel as bytes");

std::string range(const Shard& shard) {
  return "[" + std::to_string(shard.start) + ", " + std::to_string(shard.start + shard.rows) + ")";
}

Error named(int rank, ErrorKind kind, const std::string& sentence) {
  return {kind, "rank " + std::to_string(rank) + ": " + sentence};
}

void throw_peer_failure(const std::vector<Header>& headers) {
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const Header& header = headers[rank];
    if (header.failed == 0) continue;
    throw named(static_cast<int>(rank), static_cast<ErrorKind>(header.failed - 1), header.message);
  }
}

template <typename Value>
void require_same(const std::vector<Header>& headers, const char* name, Value Header::* member) {
  for (size_t rank = 1; rank < headers.size(); ++rank) {
    const Value first = headers[0].*member;
    const Value other = headers[rank].*member;
    if (first == other || (first != first && other != other)) continue;
    throw Error(ErrorKind::kValue, std::string(name) + ": expected the same on every rank, got " +
                                       std::to_string(first) + " on rank 0 and " +
                                       std::to_string(other) + " on rank " + std::to_string(rank));
  }
}

void require_same_text(const std::vector<Header>& headers, ErrorKind kind, const char* name,
                       char (Header::*member)[16]) {
  for (size_t rank = 1; rank < headers.size(); ++rank) {
    const std::string first = headers[0].*member;
    const std::string other = headers[rank].*member;
    if (first == other) continue;
    std::string sentence = name;
    sentence += ": expected the same on every rank, got " + first;
    sentence += " on rank 0 and " + other;
    throw Error(kind, sentence + " on rank " + std::to_string(rank));
  }
}

// Every rank gave vocab_start, or none did: then shards follow each other in rank order.
std::vector<Shard> shards_of(const std::vector<Header>& headers) {
  std::vector<Shard> shards(headers.size());
  int64_t next = 0;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const bool given = headers[rank].vocab_start >= 0;
    if (given != (headers[0].vocab_start >= 0)) {
      throw Error(ErrorKind::kValue, "vocab_start: expected every rank to give it or none, got " +
                                         std::to_string(headers[0].vocab_start) +
                                         " on rank 0 and " +
                                         std::to_string(headers[rank].vocab_start) + " on rank " +
                                         std::to_string(rank) + " (-1: not given)");
    }
    shards[rank] = {given ? headers[rank].vocab_start : next, headers[rank].vocab_rows};
    next += headers[rank].vocab_rows;
  }
  return shards;
}

int64_t covered_vocabulary(const std::vector<Shard>& shards) {
  std::vector<size_t> order(shards.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return shards[a].start < shards[b].start; });
  int64_t next = 0;
  for (const size_t rank : order) {
    if (shards[rank].start != next) {
      throw Error(
          ErrorKind::kValue,
          "vocab_start: expected the shards of the group to follow each other from 0, got " +
              range(shards[rank]) + " on rank " + std::to_string(rank) + " where " +
              std::to_string(next) + " comes next");
    }
    next += shards[rank].rows;
  }
  return next;
}

// A rank that was given the whole weight instead of its shard.
void refuse_whole_weights(const std::vector<Header>& headers, const std::vector<Shard>& shards,
                          int64_t vocab_size) {
  if (headers.size() == 1 || headers[0].vocab_start >= 0) return;  // one rank, or placed on purpose
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    if (headers[rank].vocab_size < 0 || shards[rank].rows < vocab_size) continue;
    throw Error(ErrorKind::kValue,
                "weight: expected a shard of vocab_size " + std::to_string(vocab_size) +
                    " on each of " + std::to_string(headers.size()) + " ranks, got all " +
                    std::to_string(shards[rank].rows) + " rows on rank " + std::to_string(rank));
  }
  const bool equal = std::all_of(headers.begin(), headers.end(), [&](const Header& header) {
    return header.vocab_rows == headers[0].vocab_rows &&
           header.fingerprint == headers[0].fingerprint;
  });
  if (headers[0].vocab_size < 0 && equal && headers[0].fingerprint != 0) {
    throw Error(ErrorKind::kValue, "weight: expected a different shard on each of " +
                                       std::to_string(headers.size()) + " ranks, got the same " +
                                       std::to_string(headers[0].vocab_rows) +
                                       " rows on all (pass vocab_start if equal shards are meant)");
  }
}

std::vector<int64_t> token_offsets_of(const std::vector<Header>& headers) {
  const auto ranks = static_cast<int64_t>(headers.size());
  const int64_t tokens = headers[0].tokens;
  std::vector<int64_t> offsets(headers.size() + 1, 0);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto place = static_cast<size_t>(rank);
    offsets[place + 1] = headers[0].sequence_parallel != 0
                             ? offsets[place] + headers[place].x_tokens
                             : std::min(tokens, (rank + 1) * ceil_div(tokens, ranks));
  }
  if (offsets.back() != tokens) {
    throw Error(ErrorKind::kValue,
                "tokens: expected the token shards of x to sum to target.shape[0], got " +
                    std::to_string(offsets.back()) + " and " + std::to_string(tokens));
  }
  return offsets;
}

}  // namespace

int64_t Agreement::token_block() const {
  int64_t block = 0;
  for (size_t rank = 0; rank + 1 < token_offsets.size(); ++rank) {
    block = std::max(block, token_offsets[rank + 1] - token_offsets[rank]);
  }
  return block;
}

int Agreement::owner_of(int64_t id) const {
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    if (id >= shards[rank].start && id < shards[rank].start + shards[rank].rows) {
      return static_cast<int>(rank);
    }
  }
  throw Error(ErrorKind::kValue, "target: no rank holds id " + std::to_string(id));
}

Agreement conclude(const std::vector<Header>& headers) {
  require_same(headers, "version", &Header::version);
  throw_peer_failure(headers);
  require_same_text(headers, ErrorKind::kType, "dtype", &Header::dtype);
  require_same_text(headers, ErrorKind::kState, "call", &Header::phase);
  require_same(headers, "sequence_parallel", &Header::sequence_parallel);
  require_same(headers, "tokens", &Header::tokens);
  require_same(headers, "hidden", &Header::hidden);
  require_same(headers, "ignore_index", &Header::ignore_index);
  require_same(headers, "per-token temperature", &Header::per_token_temperature);
  require_same(headers, "temperature", &Header::temperature);
  require_same(headers, "return_entropy", &Header::wants_entropy);
  require_same(headers, "upstream gradients (1 nll, 2 entropy, 4 lse)", &Header::upstream);
  require_same(headers, "vocab_size", &Header::vocab_size);

  Agreement agreement;
  agreement.shards = shards_of(headers);
  const int64_t covered = covered_vocabulary(agreement.shards);
  agreement.vocab_size = headers[0].vocab_size >= 0 ? headers[0].vocab_size : covered;
  refuse_whole_weights(headers, agreement.shards, agreement.vocab_size);
  if (agreement.vocab_size > covered || agreement.vocab_size < 1) {
    throw Error(ErrorKind::kValue, "vocab_size: expected 1 to " + std::to_string(covered) +
                                       " (the rows of all shards), got " +
                                       std::to_string(agreement.vocab_size));
  }
  agreement.token_offsets = token_offsets_of(headers);
  agreement.least_target = headers[0].least_target;
  agreement.most_target = headers[0].most_target;
  for (const Header& header : headers) {
    agreement.any_wants_input_grad |= header.wants_input_grad != 0;
    if (header.least_target > header.most_target) continue;
    const bool none_yet = agreement.least_target > agreement.most_target;
    agreement.least_target =
        none_yet ? header.least_target : std::min(agreement.least_target, header.least_target);
    agreement.most_target =
        none_yet ? header.most_target : std::max(agreement.most_target, header.most_target);
  }
  return agreement;
}

Agreement agree(Group& group, const Header& mine) {
  std::vector<Header> headers(static_cast<size_t>(group.size()));
  if (group.size() == 1) {
    headers[0] = mine;
  } else {
    group.all_gather(&mine, headers.data(), sizeof(Header), Device{}, mine.phase);
  }
  return conclude(headers);
}

Error announce(Group& group, const std::string& phase, const Error& failure) {
  if (group.size() == 1) return failure;
  Header header;
  header.failed = 1 + static_cast<int64_t>(failure.kind());
  set_text(header.phase, phase);
  set_text(header.message, failure.what());
  std::vector<Header> headers(static_cast<size_t>(group.size()));
  try {
    group.all_gather(&header, headers.data(), sizeof(Header), Device{}, header.phase);
  } catch (const Error&) {  // nobody came: the first failure is still the one to report
  }
  return named(group.rank(), failure.kind(), failure.what());
}

uint64_t fingerprint_of(const TensorView& weight) {
  const int64_t rows = weight.shape[0];
  const int64_t columns = weight.shape[1];
  const int64_t element = size_of(weight.dtype);
  constexpr uint64_t kPrime = 1099511628211ULL;  // FNV-1a, 64 bit
  uint64_t hash = 14695981039346656037ULL;
  bool constant = true;
  uint64_t first = 0;
  for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
    for (int64_t column = 0; column < columns; ++column) {
      uint64_t bits = 0;
      std::memcpy(&bits,
                  static_cast<const std::byte*>(weight.data) +
                      (row * weight.strides[0] + column * weight.strides[1]) * element,
                  static_cast<size_t>(element));
      if (row == 0 && column == 0) first = bits;
      constant &= bits == first;
      hash = (hash ^ bits) * kPrime;
    }
  }
  if (constant) return 0;
  return hash == 0 ? 1 : hash;
}

}  // namespace logitless
