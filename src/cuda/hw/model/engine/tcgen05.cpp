// SPDX-License-Identifier: Apache-2.0
// Blackwell's tensor core and TMEM. The order that tcgen05 operations need is checked by time: a
// missing commit, wait or fence is found whatever the schedule.
#include "cuda/hw/model/engine/tcgen05.h"

#include "cuda/hw/model/engine/mbarrier.h"
#include "cuda/hw/model/engine/meeting.h"
#include "cuda/hw/model/engine/shared_memory.h"
#include "cuda/hw/model/engine/tensor_core.h"

namespace hw::model {

void check_group(Cta& cta, CtaGroup group, const char* what) {
  if (group == CtaGroup::kTwo && cta.cluster->ctas.size() < 2) {
    fault(format("%s: cta_group::2 in a cluster of one CTA", what));
  }
  if (cta.tmem_group == 0) cta.tmem_group = static_cast<int>(group);
  if (cta.tmem_group != static_cast<int>(group)) {
    fault(format("%s: cta_group::%d in a CTA that has used cta_group::%d", what,
                 static_cast<int>(group), cta.tmem_group));
  }
}

void check_fenced(const Thread& thread, const char* what) {
  if (thread.known.sync_time > thread.tensor_fence_time) {
    fault(
        format("%s after a wait without fence::after_thread_sync: it is not ordered after what was "
               "waited for",
               what));
  }
}

// --- products ------------------------------------------------------------------------------------------

namespace {

struct Product {
  CtaGroup group;
  int m, n;
  Major major_a, major_b;

  int ctas() const { return static_cast<int>(group); }
  int rows_of_a() const { return m / ctas(); }  // in each CTA
  int rows_of_b() const { return n / ctas(); }
  /// Columns of TMEM in each CTA.
  int width() const { return group == CtaGroup::kTwo && m == 128 ? n / 2 : n; }
};

[[noreturn]] void bad_instruction(uint32_t bits, const std::string& why) {
  fault(format("tcgen05.mma: instruction descriptor 0x%08x: ", bits) + why);
}

Product decode_instruction(CtaGroup group, uint32_t bits) {
  using D = UmmaInstruction;
  const Product p{group, static_cast<int>(D::M::get(bits)) * 16,
                  static_cast<int>(D::N::get(bits)) * 8, static_cast<Major>(D::MajorA::get(bits)),
                  static_cast<Major>(D::MajorB::get(bits))};
  const uint64_t known = D::D::put(~0ULL) | D::A::put(~0ULL) | D::B::put(~0ULL) |
                         D::MajorA::put(~0ULL) | D::MajorB::put(~0ULL) | D::N::put(~0ULL) |
                         D::M::put(~0ULL);
  if ((bits & ~known) != 0) {
    bad_instruction(bits, format("bits 0x%08x: sparse, saturating, negated and shifted products "
                                 "are not modelled, the rest is reserved",
                                 static_cast<uint32_t>(bits & ~known)));
  }
  if (D::D::get(bits) != 1) bad_instruction(bits, "D is not f32");
  if (D::A::get(bits) != 1 || D::B::get(bits) != 1) bad_instruction(bits, "A or B is not bf16");
  const bool two = group == CtaGroup::kTwo;
  const bool good_m = two ? p.m == 128 || p.m == 256 : p.m == 64 || p.m == 128;
  const int step = two ? 32 : p.m == 64 ? 8 : 16;
  if (!good_m || p.n < step || p.n > 256 || p.n % step != 0) {
    bad_instruction(bits, format("M = %d, N = %d do not exist for cta_group::%d", p.m, p.n,
                                 static_cast<int>(group)));
  }
  return p;
}

/// The accumulator must be this CTA's, and nobody may be using it.
void check_accumulator(const Thread& thread, Cta& cta, uint32_t d, const Product& p,
                       bool accumulate) {
  for (int quarter = 0; quarter < 4; ++quarter) {
    for (int i = 0; i < p.width(); ++i) {
      const uint32_t number = d + static_cast<uint32_t>(i);
      const TmemColumn& column = cta.columns[static_cast<size_t>(quarter)][number];
      const auto where = [&] {
        return format("tcgen05.mma: column %u of CTA %d ", number, cta.rank);
      };
      if (!column.allocated) fault(where() + "is not allocated");
      if (column.unfenced != 0) {
        fault(where() + format("is still read or stored by warp %d of its quarter (wait::ld or "
                               "wait::st, then fence::before_thread_sync, are missing)",
                               quarter));
      }
      if (column.release_time > thread.tensor_seen.at[cta.index]) {
        fault(where() +
              "was read or stored, and nothing orders this product after that (wait, then "
              "fence::after_thread_sync)");
      }
      if (accumulate && !column.written && column.in_flight == 0) {
        fault(where() + "is accumulated on, and nothing was ever written there");
      }
    }
  }
}

/// D of one CTA, row by row where tmem_place puts it.
void accumulate_rows(Cta& cta, int base, const Product& p, const float* a, const float* b,
                     bool accumulate) {
  const int rows = p.rows_of_a();
  const int first_m = p.ctas() == 2 ? (cta.rank & 1) * rows : 0;
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < p.n; n += p.width()) {
      const TmemPlace place = tmem_place(p.group, p.m, p.n, first_m + r, n);
      multiply(tmem_at(cta, place.lane, base + place.column), kTmemColumns, a + r * kProductK,
               b + n, p.n, 1, p.width(), accumulate);
    }
  }
}

void run_product(const std::vector<Cta*>& ctas, uint32_t d, const Product& p, uint64_t a,
                 uint64_t b, bool accumulate) {
  static float left[2][128 * kProductK], right[kProductK * 256];
  const Operand from_a = decode_umma(a, "tcgen05.mma A"), from_b = decode_umma(b, "tcgen05.mma B");
  float* rows_of_b = right;  // the even CTA's first
  for (size_t i = 0; i < ctas.size(); ++i, rows_of_b += p.rows_of_b()) {
    if (ctas[i]->exited) fault("tcgen05.mma reads the shared memory of a CTA that has exited");
    load_operand(*ctas[i], from_a, p.major_a, p.rows_of_a(), left[i], kProductK, 1,
                 "tcgen05.mma A");
    load_operand(*ctas[i], from_b, p.major_b, p.rows_of_b(), rows_of_b, 1, p.n, "tcgen05.mma B");
  }
  for (size_t i = 0; i < ctas.size(); ++i) {
    accumulate_rows(*ctas[i], static_cast<int>(d), p, left[i], right, accumulate);
    for (auto& quarter : ctas[i]->columns) {
      for (int c = 0; c < p.width(); ++c) {
        TmemColumn& column = quarter[d + static_cast<uint32_t>(c)];
        --column.in_flight;
        column.uncommitted = column.written = true;
        column.stored_by = nullptr;
      }
    }
  }
}

}  // namespace

void tcgen05_mma(CtaGroup group, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                 bool accumulate, Site site) {
  constexpr auto kWhat = "tcgen05.mma";
  Thread& thread = enter_here(site);
  note_path(thread, 18);
  Cta& own = *thread.cta;
  check_group(own, group, kWhat);
  if (group == CtaGroup::kTwo && (own.rank & 1) != 0)
    fault("tcgen05.mma cta_group::2 issued by the odd CTA of a pair");
  check_fenced(thread, kWhat);
  const Product p = decode_instruction(group, instruction);
  if (d >> 16 != 0) fault(format("tcgen05.mma: accumulator 0x%08x: its lane must be 0", d));
  if (d + static_cast<uint32_t>(p.width()) > kTmemColumns) {
    fault(format("tcgen05.mma: an accumulator of %d columns at column %u", p.width(), d));
  }
  std::vector<Cta*> ctas;
  for (int i = 0; i < p.ctas(); ++i) {
    const int rank = own.rank + i;
    Cta* cta = own.cluster->ctas[static_cast<size_t>(rank)].get();
    if (cta->exited) fault(format("tcgen05.mma: CTA %d of the pair has exited", cta->rank));
    check_accumulator(thread, *cta, d, p, accumulate);
    ctas.push_back(cta);
  }
  for (Cta* cta : ctas) {
    for (auto& quarter : cta->columns) {
      for (int c = 0; c < p.width(); ++c) {
        TmemColumn& column = quarter[d + static_cast<uint32_t>(c)];
        ++column.in_flight;
        column.issuer = &thread;
        column.write_cta = own.index;
      }
    }
  }
  enqueue(own.cluster->umma[own.rank], [=] { run_product(ctas, d, p, a, b, accumulate); });
  maybe_yield();
}

void tcgen05_commit(CtaGroup group, uint32_t barrier, uint32_t ctas, bool multicast, Site site) {
  constexpr auto kWhat = "tcgen05.commit";
  Thread* thread = &enter_here(site);
  note_path(*thread, 19);
  Cta& own = *thread->cta;
  check_group(own, group, kWhat);
  Cluster* cluster = own.cluster;
  if (!multicast) ctas = 1U << own.rank;
  if (ctas == 0 || ctas >> cluster->ctas.size() != 0) {
    fault(format("tcgen05.commit: multicast mask 0x%x in a cluster of %zu", ctas,
                 cluster->ctas.size()));
  }
  const int issuer = own.index;
  enqueue(cluster->umma[own.rank], [=] {
    ++machine->now;
    for (auto& cta : cluster->ctas) {
      for (auto& quarter : cta->columns) {
        for (auto& column : quarter) {
          if (!column.uncommitted || column.issuer != thread) continue;
          column.uncommitted = false;
          column.write_time = machine->now;
        }
      }
    }
    Knowledge known;
    known.tensor.at[static_cast<size_t>(issuer)] = machine->now;
    for (uint32_t rank = 0; rank < cluster->ctas.size(); ++rank) {
      if ((ctas >> rank & 1) == 0) continue;
      // Commits promise no order among themselves, nor do the CTAs that one tells.
      enqueue(transient_channel(),
              [=] { arrive_plain(cta_of(*cluster, rank << 24, kWhat), barrier, known, kWhat); });
    }
  });
  maybe_yield();
}

// --- order ---------------------------------------------------------------------------------------------

namespace {

/// This lane's finished loads and stores are now before whatever it synchronises with.
void fence_before(Thread& thread) {
  Warp& warp = *thread.warp;
  Machine& m = *machine;
  ++m.now;
  const uint32_t lane = 1U << thread.id.lane;
  auto& quarter = thread.cta->columns[static_cast<size_t>(warp.index % 4)];
  for (TmemUse& use : warp.uses) {
    if (!use.waited || (use.lanes & lane) == 0) continue;
    use.lanes &= ~lane;
    if (use.lanes != 0) continue;
    for (int i = use.column; i < use.column + use.columns; ++i) {
      TmemColumn& column = quarter[static_cast<size_t>(i)];
      --column.unfenced;
      column.release_time = m.now;
      if (use.store) column.write_time = m.now;
    }
  }
  auto& uses = warp.uses;
  uses.erase(
      std::remove_if(uses.begin(), uses.end(), [](const TmemUse& use) { return use.lanes == 0; }),
      uses.end());
  thread.known.tensor.at[static_cast<size_t>(thread.cta->index)] = m.now;
}

}  // namespace

void tcgen05_fence(bool after, Site site) {
  Thread& thread = enter_here(site);
  note_path(thread, 20);
  if (after) {
    thread.tensor_seen = thread.known.tensor;
    thread.tensor_fence_time = thread.known.sync_time;
  } else {
    fence_before(thread);
  }
}

}  // namespace hw::model
