// SPDX-License-Identifier: Apache-2.0
#include "kernels/push_add.h"

#include <bit>

#include "cases.h"

namespace logitless::model_test {
namespace {

constexpr int kTile = PushAdd::kCells * 4;

struct Case {
  int ranks, ctas, tiles, calls;
  bool gather = true;
  uint32_t first_epoch = 0;
};

/// parts[first] ... parts[last - 1], as src/comm/combine.h orders them.
float add_in_tree(const std::vector<float>& parts, int first, int last) {
  if (last - first == 1) return parts[static_cast<size_t>(first)];
  const int middle =
      first + static_cast<int>(std::bit_floor(static_cast<unsigned>(last - first - 1)));
  return add_in_tree(parts, first, middle) + add_in_tree(parts, middle, last);
}

hw::Float4* as_cells(hw::Global<float> p) { return reinterpret_cast<hw::Float4*>(p.address()); }
hw::Global<float> as_floats_of(hw::Global<hw::Float4> p) {
  return hw::Global<float>(reinterpret_cast<float*>(p.address()));
}

class Exchange {
 public:
  Exchange(const Case& c, uint64_t seed)
      : c_(c), world_(c.ranks), parts_(static_cast<size_t>(c.ranks)) {
    p_.ranks = c.ranks;
    p_.ctas = c.ctas;
    p_.tiles = c.tiles;
    p_.calls = c.calls;
    p_.gather = c.gather;
    Random random(seed);
    for (int r = 0; r < c.ranks; ++r) set_up(r, random);
  }

  hw::model::Report launch(uint64_t seed, int ranks) {
    for (int r = 0; r < c_.ranks; ++r) {
      world_.assign(p_.rank[r].ended, {0});
      poison(p_.rank[r].shard, c_.calls * c_.tiles);
      poison(p_.rank[r].dx, c_.calls * all());
    }
    return hw::launch<PushAdd>(world_, ranks * c_.ctas, p_,
                               {.seed = seed, .clusters_per_rank = c_.ctas});
  }

  /// Every bit of every sum, on every rank.
  std::string check() const {
    for (int r = 0; r < c_.ranks; ++r) {
      if (auto wrong = check_slots(r); !wrong.empty()) return wrong;
      const auto shard = download(p_.rank[r].shard, c_.calls * c_.tiles);
      const auto dx = download(p_.rank[r].dx, c_.calls * all());
      for (int i = 0; i < c_.calls * all() * kTile; ++i) {
        const int call = i / (all() * kTile), in_call = i % (all() * kTile);
        const int owner = in_call / (c_.tiles * kTile), in_shard = in_call % (c_.tiles * kTile);
        const float want = expected(i);
        if (owner == r) {
          const float got = shard[static_cast<size_t>(call * c_.tiles * kTile + in_shard)];
          if (hw::as_bits(got) != hw::as_bits(want)) return difference(r, "shard", i, want, got);
        }
        const float got = dx[static_cast<size_t>(i)];
        if (c_.gather && hw::as_bits(got) != hw::as_bits(want))
          return difference(r, "dx", i, want, got);
      }
    }
    return "";
  }
  /// What is left when a rank is missing: no number on any other, nothing pushed once they know.
  std::string check_nothing(int ranks) const {
    for (int r = 0; r < ranks; ++r) {
      const auto pushed = world_.download(p_.rank[r].pushed, all());
      for (int i = 0; i < ranks * c_.tiles; ++i) {
        const uint32_t last = pushed[static_cast<size_t>(i)];
        if (last != 1)
          return "rank " + std::to_string(r) + ": call " + std::to_string(last) + " was pushed";
      }
      const auto dx = download(p_.rank[r].dx, c_.calls * all());
      for (size_t i = 0; i < dx.size(); ++i) {
        if (hw::as_bits(dx[i]) != 0x7FFFFFFF)
          return difference(r, "dx", static_cast<int>(i), NAN, dx[i]);
      }
    }
    return "";
  }
  hw::PeerFailure failure(int rank) const {
    return world_.download(p_.rank[rank].abort.failure, 1)[0];
  }
  void reset() {
    for (int r = 0; r < c_.ranks; ++r) {
      const std::vector<uint32_t> none(static_cast<size_t>(all()), 0);
      world_.assign(p_.rank[r].pushed, none);
      world_.assign(p_.rank[r].summed, none);
      world_.assign(p_.rank[r].epoch, {0});
      world_.assign(p_.rank[r].abort.raised, {0});
      world_.assign(p_.rank[r].abort.failure, {hw::PeerFailure{}});
    }
  }

 private:
  int all() const { return c_.ranks * c_.tiles; }  // tiles of the matrix

  void set_up(int r, Random& random) {
    auto& part = parts_[static_cast<size_t>(r)];
    part.resize(static_cast<size_t>(c_.calls * all() * kTile));
    for (auto& v : part) v = static_cast<float>(random());
    const auto slot_rows = 2 * all() * PushAdd::kRows;
    const auto slots = world_.allocate<float>("slots", int64_t{slot_rows} * PushAdd::kColumns, r);
    p_.rank[r] = {
        .part = hw::Global<const hw::Float4>(as_cells(world_.upload("part", part, r))),
        .slots = hw::tensor_map(slots, {.element = hw::Element::kF32,
                                        .rows = static_cast<uint64_t>(slot_rows),
                                        .columns = PushAdd::kColumns,
                                        .pitch_bytes = PushAdd::kColumns * 4,
                                        .box_rows = PushAdd::kRows,
                                        .box_columns = PushAdd::kColumns}),
        .shard = world_.allocate<hw::Float4>("shard", c_.calls * c_.tiles * PushAdd::kCells, r),
        .dx = world_.allocate<hw::Float4>("dx", c_.calls * all() * PushAdd::kCells, r),
        .pushed = world_.filled("pushed", all(), c_.first_epoch, r),
        .summed = world_.filled("summed", all(), c_.first_epoch, r),
        .ended = world_.allocate<uint32_t>("ended", 1, r),
        .epoch = world_.filled("epoch", 1, c_.first_epoch, r),
        .abort = {world_.filled<uint32_t>("raised", 1, 0, r),
                  world_.filled<hw::PeerFailure>("failure", 1, {}, r), 1'000'000}};
  }
  /// The slots of the last call: tiles of every source, row by row.
  std::string check_slots(int r) const {
    const auto parity = static_cast<int>(world_.download(p_.rank[r].epoch, 1)[0] & 1);
    const auto slots = world_.download(
        hw::Global<float>(static_cast<float*>(p_.rank[r].slots.base)), 2 * all() * kTile);
    for (int source = 0; source < c_.ranks; ++source) {
      for (int i = 0; i < c_.tiles * kTile; ++i) {
        const float got =
            slots[static_cast<size_t>((parity * c_.ranks + source) * c_.tiles * kTile + i)];
        const int in_part = ((c_.calls - 1) * c_.ranks + r) * c_.tiles * kTile + i;
        const float want = parts_[static_cast<size_t>(source)][static_cast<size_t>(in_part)];
        if (got != want) return difference(r, "slots", i, want, got);
      }
    }
    return "";
  }
  void poison(hw::Global<hw::Float4> p, int tiles) {
    world_.assign(as_floats_of(p),
                  std::vector<float>(static_cast<size_t>(tiles * kTile), 12345.0F));
  }
  std::vector<float> download(hw::Global<hw::Float4> p, int tiles) const {
    return world_.download(as_floats_of(p), tiles * kTile);
  }
  float expected(int i) const {
    std::vector<float> parts;
    for (const auto& part : parts_) parts.push_back(part[static_cast<size_t>(i)]);
    return add_in_tree(parts, 0, c_.ranks);
  }
  static std::string difference(int rank, const char* what, int i, float want, float got) {
    return "rank " + std::to_string(rank) + " " + what + ", element " + std::to_string(i) +
           ": expected " + std::to_string(want) + ", got " + std::to_string(got);
  }

  Case c_;
  mutable hw::model::World world_;
  PushAdd::Params p_{};
  std::vector<std::vector<float>> parts_;  // [rank][call, owner, tile, element]
};

void run_case(const Case& c, int launches) {
  CAPTURE(c.ranks);
  CAPTURE(c.ctas);
  CAPTURE(c.gather);
  for_seeds(12, [&](uint64_t seed) -> std::string {
    Exchange exchange(c, seed);
    for (int launch = 0; launch < launches; ++launch) {
      const auto report = exchange.launch(seed + static_cast<uint64_t>(launch), c.ranks);
      if (!report.ok) return report.what;
      if (auto wrong = exchange.check(); !wrong.empty()) return wrong;
    }
    return "";
  });
}

TEST_CASE("parts are pushed to owners, added in tree order, and gathered") {
  run_case({.ranks = 2, .ctas = 2, .tiles = 3, .calls = 2}, 3);
  run_case({.ranks = 3, .ctas = 2, .tiles = 3, .calls = 1}, 2);
  run_case({.ranks = 5, .ctas = 1, .tiles = 2, .calls = 2}, 2);
  run_case({.ranks = 8, .ctas = 2, .tiles = 1, .calls = 2}, 2);
}

TEST_CASE("every rank keeps the tiles it owns") {
  run_case({.ranks = 2, .ctas = 2, .tiles = 3, .calls = 4, .gather = false}, 2);
  run_case({.ranks = 4, .ctas = 1, .tiles = 2, .calls = 4, .gather = false}, 2);
  // A CTA that merges nothing waits for no peer: only the end of a call holds it back.
  run_case({.ranks = 3, .ctas = 2, .tiles = 1, .calls = 4, .gather = false}, 2);
}

TEST_CASE("epochs of pushed tiles may wrap round") {
  run_case({.ranks = 3, .ctas = 2, .tiles = 1, .calls = 2, .first_epoch = 0xFFFFFFFE}, 2);
}

TEST_CASE("a rank that pushes nothing leaves no number behind") {
  constexpr Case kCase{.ranks = 3, .ctas = 2, .tiles = 3, .calls = 3};
  constexpr int kPresent = 2;
  for_seeds(12, [&](uint64_t seed) -> std::string {
    Exchange exchange(kCase, seed);
    auto report = exchange.launch(seed, kPresent);
    if (!report.ok) return report.what;
    if (report.peer_timeouts != kPresent) {
      return "expected " + std::to_string(kPresent) + " time-outs, got " +
             std::to_string(report.peer_timeouts);
    }
    if (auto wrong = exchange.check_nothing(kPresent); !wrong.empty()) return wrong;
    for (uint32_t r = 0; r < kPresent; ++r) {
      const hw::PeerFailure f = exchange.failure(static_cast<int>(r));
      if (f.state != 1 || f.rank != r || f.expected != 1 || f.seen != 0) {
        return "rank " + std::to_string(r) + " reports state " + std::to_string(f.state) +
               " expected " + std::to_string(f.expected) + " seen " + std::to_string(f.seen);
      }
    }
    // Until the host has reset them, they go on so: who comes late is left alone too.
    report = exchange.launch(seed + 1, kCase.ranks);
    if (!report.ok) return report.what;
    if (auto wrong = exchange.check_nothing(kPresent); !wrong.empty()) return wrong;
    exchange.reset();
    report = exchange.launch(seed + 2, kCase.ranks);
    return report.ok ? exchange.check() : report.what;
  });
}

}  // namespace
}  // namespace logitless::model_test
