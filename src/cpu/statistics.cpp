// SPDX-License-Identifier: Apache-2.0
#include "cpu/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/fold.h"
#include "cpu/pack.h"
#include "cpu/project.h"
#include "plan/cpu_tiles.h"

namespace logitless::cpu {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// A total outside this range lost precision, or overflowed: its row is projected again.
const double kLeastTotal = std::ldexp(1.0, -100);
const double kMostTotal = std::ldexp(1.0, 100);

// Statistics of 512 columns each, [column tile][kind][padded tokens].
class ColumnStatistics {
 public:
  ColumnStatistics(const LocalCall& call, int64_t padded)
      : data_(call.arena.get<float>(region::kColumnStatistics)),
        padded_(padded),
        kinds_(call.plan.wanted.entropy ? 3 : 2) {}

  TileStatistics at(int64_t column, int64_t token, float* target_exponent) const {
    float* tile = data_ + column / kTileVocab * kinds_ * padded_ + token;
    return {tile, tile + padded_, kinds_ == 3 ? tile + 2 * padded_ : nullptr,
            target_exponent + token};
  }

 private:
  float* data_;
  int64_t padded_;
  int64_t kinds_;
};

struct Totals {
  double sum = 0.0;
  double moment = 0.0;
  float maximum = -kInfinity;
};

// In column order: the bits of a row depend on nothing but the row.
Totals total_of(const ColumnStatistics& columns, int64_t live, int64_t token, float* exponents) {
  Totals totals;
  for (int64_t column = 0; column < live; column += kTileVocab) {
    const TileStatistics tile = columns.at(column, token, exponents);
    totals.sum += *tile.sum;
    if (tile.moment != nullptr) totals.moment += *tile.moment;
    totals.maximum = std::max(totals.maximum, *tile.maximum);
  }
  return totals;
}

class Statistics {
 public:
  Statistics(const LocalCall& call, Workers& workers, Products& products,
             const LocalStatistics& out, const TensorView& stash)
      : call_(call),
        workers_(workers),
        products_(products),
        out_(out),
        stash_(stash),
        tokens_(call.plan.problem.tokens),
        live_(call.plan.problem.live_rows()),
        padded_(round_up(tokens_, kTileTokens)),
        columns_(call, padded_) {
    auto* rows = call.arena.get<float>(region::kRows);
    const auto take = [&rows, this] {
      float* array = rows;
      rows += padded_;
      return array;
    };
    const auto take_ints = [&take] { return reinterpret_cast<int32_t*>(take()); };
    rows_ = {take(), take(), take_ints(), take_ints()};
    exponents_ = take();
    again_rows_ = {take(), take(), take_ints(), take_ints()};
    again_exponents_ = take();
    again_ = take_ints();
    fill_projection_rows(call, rows_);
    std::fill(exponents_, exponents_ + padded_, -kInfinity);
  }

  void run() {
    // The first tile of columns gives the anchors that all others need.
    project_and_fold({tokens_, nullptr, 0, std::min(live_, kTileVocab)}, rows_, exponents_, true);
    project_and_fold({tokens_, nullptr, kTileVocab, live_}, rows_, exponents_, false);
    const int64_t again = write_totals_and_list_the_bad();
    if (again == 0) return;
    project_and_fold({again, again_, 0, live_}, again_rows_, again_exponents_, false);
    for (int64_t i = 0; i < again; ++i) {
      write(again_[i], again_rows_.anchor[i], total_of(columns_, live_, i, again_exponents_),
            again_exponents_[i]);
    }
  }

 private:
  void project_and_fold(const ProjectionRange& range, const ProjectionRows& rows, float* exponents,
                        bool anchors) {
    project(call_, workers_, products_, range, [&](const LogitsTile& tile) {
      const ProjectionRows mine = rows_at(rows, tile.token);
      if (anchors) {
        find_anchors(tile.logits, std::min(tile.columns, kAnchorVocab), mine.scale, mine.anchor);
      }
      fold_statistics(tile.logits, tile.columns, tile.column, mine,
                      columns_.at(tile.column, tile.token, exponents));
      stash_tile(tile, range.index);
    });
  }

  void stash_tile(const LogitsTile& tile, const int32_t* index) const {
    const int64_t stashed = stash_.present() ? stash_.shape[0] : 0;
    const int64_t columns = std::min(tile.columns, stashed - tile.column);
    if (columns <= 0) return;
    const int64_t pitch = stash_.strides[0];
    std::byte* to =
        static_cast<std::byte*>(stash_.data) + tile.column * pitch * size_of(stash_.dtype);
    if (index == nullptr) {
      store_tile(tile.logits, columns, tile.tokens, nullptr,
                 to + tile.token * size_of(stash_.dtype), pitch, stash_.dtype);
    } else {
      store_tile(tile.logits, columns, tile.tokens, index + tile.token, to, pitch, stash_.dtype);
    }
  }

  void write(int64_t token, float anchor, const Totals& totals, float exponent) const {
    out_.anchor[token] = anchor;
    out_.sum[token] = static_cast<float>(totals.sum);
    out_.moment[token] = static_cast<float>(totals.moment);
    out_.target_exponent[token] = exponent;
  }

  // Returns how many tokens need another projection with an exact anchor.
  int64_t write_totals_and_list_the_bad() const {
    int64_t again = 0;
    for (int64_t token = 0; token < tokens_; ++token) {
      const Totals totals = total_of(columns_, live_, token, exponents_);
      write(token, rows_.anchor[token], totals, exponents_[token]);
      const double total = totals.sum + std::exp2(static_cast<double>(exponents_[token]));
      const bool good = total >= kLeastTotal && total <= kMostTotal;  // false for NaN
      // NaN, +inf and wholly masked rows are final, and so are ignored ones.
      const bool final =
          std::isnan(total) || !std::isfinite(totals.maximum) || rows_.live[token] == 0;
      if (good || final) continue;
      again_[again] = static_cast<int32_t>(token);
      again_rows_.scale[again] = rows_.scale[token];
      again_rows_.anchor[again] = std::ceil(totals.maximum * rows_.scale[token]);
      again_rows_.target[again] = rows_.target[token];
      again_rows_.live[again] = rows_.live[token];
      again_exponents_[again] = -kInfinity;
      ++again;
    }
    for (int64_t i = again; i < round_up(again, kTileTokens); ++i) {
      again_rows_.scale[i] = 0.0F;
      again_rows_.anchor[i] = 0.0F;
      again_rows_.target[i] = -1;
      again_rows_.live[i] = 0;
    }
    return again;
  }

  const LocalCall& call_;
  Workers& workers_;
  Products& products_;
  const LocalStatistics& out_;
  const TensorView& stash_;
  int64_t tokens_;
  int64_t live_;
  int64_t padded_;
  ColumnStatistics columns_;
  ProjectionRows rows_{};
  float* exponents_ = nullptr;
  ProjectionRows again_rows_{};
  float* again_exponents_ = nullptr;
  int32_t* again_ = nullptr;
};

}  // namespace

void compute_statistics(const LocalCall& call, Workers& workers, Products& products,
                        const LocalStatistics& out, const TensorView& stash) {
  Statistics(call, workers, products, out, stash).run();
}

}  // namespace logitless::cpu
