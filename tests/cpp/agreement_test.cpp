// SPDX-License-Identifier: Apache-2.0
// Ranks that disagree, fail or do not come: one Error on all of them, in bounded time, and the next call works.
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "checks.h"

using namespace logitless;
using namespace logitless::testing;

namespace {

// What one rank hands to forward, to be changed on one of them.
struct Arguments {
  Inputs inputs;
  Options options;
  bool entropy = false;
  std::vector<Tensor> owned;  // keeps what `inputs` may be changed to point to
};

using Change = std::function<void(int rank, Arguments&)>;

void call_forward(Context& context, Arguments& arguments) {
  const int64_t tokens = arguments.inputs.target.shape[0];
  Tensor nll = Tensor::vector(DType::kFloat32, tokens);
  Tensor lse = Tensor::vector(DType::kFloat32, tokens);
  Tensor entropy = Tensor::vector(DType::kFloat32, tokens);
  forward(context, arguments.inputs, arguments.options,
          {nll.view(), lse.view(), arguments.entropy ? entropy.view() : TensorView{}}, {});
}

// Forward on all ranks with `change` applied; then an unchanged one on the same contexts, which must work.
// Returns the one Error that all ranks threw.
Error disagreement(const Case& problem, const Change& change) {
  const auto group = make_thread_group(problem.ranks(), std::chrono::seconds(20));
  std::vector<std::optional<Error>> second(group.size());
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    Context context(member, 1);
    const Arguments right{inputs_of(problem, rank), options_of(problem, {}), false, {}};
    Arguments changed = right;
    change(rank, changed);
    std::optional<Error> first;
    try {
      call_forward(context, changed);
    } catch (const Error& error) {
      first = error;
    }
    try {
      Arguments again = right;
      call_forward(context, again);
    } catch (const Error& error) {
      second[static_cast<size_t>(rank)] = error;
    }
    if (first) throw *first;
  });
  for (size_t rank = 0; rank < thrown.size(); ++rank) {
    CAPTURE(rank);
    REQUIRE(thrown[rank].has_value());
    CHECK(std::string(thrown[rank]->what()) == std::string(thrown[0]->what()));
    CHECK(thrown[rank]->kind() == thrown[0]->kind());
    if (second[rank]) FAIL_CHECK("the next call: " << std::string(second[rank]->what()));
  }
  return *thrown[0];
}

Case three_ranks(DType dtype = DType::kBFloat16) {
  return make_case({.tokens = 9, .hidden = 16, .shards = {40, 30, 50}, .dtype = dtype});
}

// On the last rank only.
Change on_last(const std::function<void(Arguments&)>& change) {
  return [change](int rank, Arguments& arguments) {
    if (rank == 2) change(arguments);
  };
}

}  // namespace

TEST_CASE("a different number of tokens is one error on every rank") {
  const Error error = disagreement(three_ranks(), on_last([](Arguments& arguments) {
                                     arguments.inputs.x.shape[0] = 8;
                                     arguments.inputs.target.shape[0] = 8;
                                   }));
  CHECK(error.kind() == ErrorKind::kValue);
  CHECK(says(error, {"tokens", "9", "8", "rank 2"}));
}

TEST_CASE("a different hidden size is one error on every rank") {
  const Error error = disagreement(three_ranks(), on_last([](Arguments& arguments) {
                                     arguments.inputs.x.shape[1] = 15;
                                     arguments.inputs.weight.shape[1] = 15;
                                   }));
  CHECK(says(error, {"hidden", "16", "15"}));
}

TEST_CASE("a different dtype is one error on every rank") {
  const Case other = three_ranks(DType::kFloat32);
  const Error error = disagreement(three_ranks(), on_last([&other](Arguments& arguments) {
                                     arguments.inputs.x = other.x.view();
                                     arguments.inputs.weight = other.weight[2].view();
                                   }));
  CHECK(error.kind() == ErrorKind::kType);
  CHECK(says(error, {"bfloat16", "float32"}));
}

TEST_CASE("different options are one error on every rank") {
  const auto error_of = [](const std::function<void(Arguments&)>& change) {
    return disagreement(three_ranks(), on_last(change));
  };
  SUBCASE("entropy") {
    CHECK(says(error_of([](Arguments& arguments) { arguments.entropy = true; }), {"entropy"}));
  }
  SUBCASE("temperature") {
    CHECK(says(error_of([](Arguments& arguments) { arguments.options.temperature = 0.5F; }),
               {"temperature", "1", "0.5"}));
  }
  SUBCASE("temperature per token") {
    CHECK(says(error_of([](Arguments& arguments) {
                 arguments.owned.push_back(Tensor::vector(DType::kFloat32, 9));
                 for (int64_t i = 0; i < 9; ++i) arguments.owned.back().set(i, 1.0);
                 arguments.inputs.temperature = arguments.owned.back().view();
               }),
               {"temperature"}));
  }
  SUBCASE("ignore_index") {
    CHECK(says(error_of([](Arguments& arguments) { arguments.options.ignore_index = 3; }),
               {"ignore_index", "-100", "3"}));
  }
  SUBCASE("sequence_parallel") {
    CHECK(says(error_of([](Arguments& arguments) { arguments.options.sequence_parallel = true; }),
               {"sequence_parallel"}));
  }
  SUBCASE("vocab_size") {
    CHECK(says(error_of([](Arguments& arguments) { arguments.options.vocab_size = 119; }),
               {"vocab_size", "119"}));
  }
  SUBCASE("vocab_start on one rank only") {
    CHECK(says(error_of([](Arguments& arguments) { arguments.options.vocab_start = 70; }),
               {"vocab_start", "70"}));
  }
}

TEST_CASE("shards that leave a gap or overlap are one error on every rank") {
  for (const int64_t start : {69, 71}) {
    const Error error = disagreement(three_ranks(), [start](int rank, Arguments& arguments) {
      arguments.options.vocab_start = rank == 0 ? 0 : (rank == 1 ? 40 : start);
    });
    CHECK(says(error, {"vocab_start", std::to_string(start), "70"}));
  }
}

TEST_CASE("a vocabulary beyond the shards is one error on every rank") {
  const Error error = disagreement(
      three_ranks(), [](int, Arguments& arguments) { arguments.options.vocab_size = 121; });
  CHECK(says(error, {"vocab_size", "120", "121"}));
}

TEST_CASE("the whole weight on every rank is one error on every rank") {
  const Case problem = three_ranks();
  const Case whole = make_case({.tokens = 9, .hidden = 16, .shards = {120}});
  const auto error_of = [&](const std::function<void(Options&)>& change) {
    return disagreement(problem, [&](int, Arguments& arguments) {
      arguments.inputs.weight = whole.weight[0].view();
      change(arguments.options);
    });
  };
  SUBCASE("with the vocabulary's size given") {
    CHECK(says(error_of([](Options& options) { options.vocab_size = 120; }), {"weight", "120"}));
  }
  SUBCASE("with the start of the shard given") {
    CHECK(
        says(error_of([](Options& options) { options.vocab_start = 0; }), {"vocab_start", "120"}));
  }
  SUBCASE("with nothing given") {
    CHECK(says(error_of([](Options&) {}), {"weight", "120"}));
  }
}

TEST_CASE("token shards that do not sum to the targets are one error on every rank") {
  const Error error = disagreement(three_ranks(), [](int, Arguments& arguments) {
    arguments.options.sequence_parallel = true;
    arguments.inputs.x.shape[0] = 4;
  });
  CHECK(says(error, {"12", "9"}));
}

TEST_CASE("bad input on one rank is one error on every rank") {
  SUBCASE("a shape") {
    const Error error = disagreement(
        three_ranks(), on_last([](Arguments& arguments) { arguments.inputs.x.shape[0] = 8; }));
    CHECK(error.kind() == ErrorKind::kValue);
    CHECK(says(error, {"tokens", "8", "9", "rank 2"}));
  }
  SUBCASE("a dtype") {
    const Error error = disagreement(three_ranks(), on_last([](Arguments& arguments) {
                                       arguments.inputs.target.dtype = DType::kFloat32;
                                     }));
    CHECK(error.kind() == ErrorKind::kType);
    CHECK(says(error, {"target", "float32"}));
  }
  SUBCASE("an empty weight") {
    const Error error = disagreement(
        three_ranks(), on_last([](Arguments& arguments) { arguments.inputs.weight.shape[0] = 0; }));
    CHECK(says(error, {"weight", "0"}));
  }
  SUBCASE("a temperature") {
    const Error error = disagreement(
        three_ranks(), on_last([](Arguments& arguments) { arguments.options.temperature = 0.0F; }));
    CHECK(says(error, {"temperature"}));
  }
}

TEST_CASE("a target that no rank holds is one error on every rank") {
  Case problem = three_ranks();
  Case bad = problem;
  bad.target.set_id(4, 120);
  const Error error = disagreement(
      problem, [&](int, Arguments& arguments) { arguments.inputs.target = bad.target.view(); });
  CHECK(error.kind() == ErrorKind::kValue);
  CHECK(says(error, {"target", "120", "4"}));
}

TEST_CASE("a target that is bad on one rank only fails on every rank") {
  const Case problem = three_ranks();
  Case bad = problem;
  bad.target.set_id(4, -7);
  const auto thrown = on_ranks(
      make_thread_group(3, std::chrono::seconds(20)),
      [&](int rank, const std::shared_ptr<Group>& member) {
        Context context(member, 1);
        Arguments arguments{
            inputs_of(rank == 1 ? bad : problem, rank), options_of(problem, {}), false, {}};
        call_forward(context, arguments);
      });
  for (const auto& error : thrown) {
    REQUIRE(error.has_value());
    CHECK(error->kind() == ErrorKind::kValue);
    CHECK(says(*error, {"target", "-7"}));
  }
}

TEST_CASE("different upstream gradients and a missing forward are one error on every rank") {
  const Case problem = three_ranks();
  for (const bool missing_rows : {false, true}) {
    const auto group = make_thread_group(3, std::chrono::seconds(20));
    const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
      Context context(member, 1);
      const Inputs inputs = inputs_of(problem, rank);
      const Options options = options_of(problem, {});
      const SavedBuffers saved(plan_call(context, inputs, options, {false, true, true}));
      Tensor nll = Tensor::vector(DType::kFloat32, 9);
      Tensor lse = Tensor::vector(DType::kFloat32, 9);
      Tensor dx = Tensor::matrix(DType::kBFloat16, 9, 16);
      forward(context, inputs, options, {nll.view(), lse.view(), {}}, saved.view());
      Upstream upstream;
      upstream.nll = problem.grad_nll.view();
      if (rank == 1 && !missing_rows) upstream.lse = problem.grad_lse.view();
      const bool forgets = rank == 1 && missing_rows;
      backward(context, inputs, options, forgets ? Saved{} : saved.view(), upstream,
               {dx.view(), {}, false});
    });
    for (const auto& error : thrown) {
      REQUIRE(error.has_value());
      CHECK(std::string(error->what()) == std::string(thrown[0]->what()));
      CHECK(says(*error, {missing_rows ? "rows" : "upstream"}));
    }
  }
}

TEST_CASE("forward on one rank and configure on another is one error") {
  const Case problem = three_ranks();
  const auto thrown =
      on_ranks(make_thread_group(3, std::chrono::seconds(20)),
               [&](int rank, const std::shared_ptr<Group>& member) {
                 Context context(member, 1);
                 if (rank == 0) {
                   context.configure({9, 16, 40, DType::kBFloat16});
                   return;
                 }
                 Arguments arguments{inputs_of(problem, rank), options_of(problem, {}), false, {}};
                 call_forward(context, arguments);
               });
  for (const auto& error : thrown) {
    REQUIRE(error.has_value());
    CHECK(error->kind() == ErrorKind::kState);
    CHECK(says(*error, {"configure", "forward"}));
  }
}

TEST_CASE("an announced failure reaches every peer") {
  const Case problem = three_ranks();
  const auto group = make_thread_group(3, std::chrono::seconds(20));
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    Context context(member, 1);
    std::optional<Error> first;
    try {
      if (rank == 1) {
        announce_failure(context, "forward", Error(ErrorKind::kMemory, "no room for 77 bytes"));
      } else {
        Arguments arguments{inputs_of(problem, rank), options_of(problem, {}), false, {}};
        call_forward(context, arguments);
      }
    } catch (const Error& error) {
      first = error;
    }
    Arguments arguments{inputs_of(problem, rank), options_of(problem, {}), false, {}};
    call_forward(context, arguments);
    if (first) throw *first;
  });
  for (const size_t rank : {0U, 2U}) {
    REQUIRE(thrown[rank].has_value());
    CHECK(thrown[rank]->kind() == ErrorKind::kMemory);
    CHECK(says(*thrown[rank], {"no room for 77 bytes", "rank 1"}));
  }
}

TEST_CASE("a rank that does not come is named in bounded time and reset makes the next call work") {
  const Case problem = three_ranks();
  const auto group = make_thread_group(3, std::chrono::milliseconds(600));
  std::vector<std::optional<Error>> first(3);
  const auto start = std::chrono::steady_clock::now();
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    Context context(member, 1);
    Arguments arguments{inputs_of(problem, rank), options_of(problem, {}), false, {}};
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(900));
    } else {
      if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      try {
        call_forward(context, arguments);
      } catch (const Error& error) {
        first[static_cast<size_t>(rank)] = error;
      }
      // Without a reset the group stays closed.
      try {
        if (rank == 0) member->all_gather("a", std::string(3, ' ').data(), 1, {}, "letters");
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kTimeout) throw;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    reset_thread_group(*member);
    call_forward(context, arguments);
  });
  CHECK(all_returned(thrown));
  for (const size_t rank : {0U, 2U}) {
    REQUIRE(first[rank].has_value());
    CHECK(first[rank]->kind() == ErrorKind::kTimeout);
    CHECK(says(*first[rank], {"rank(s) 1 of 3", "0.600 s"}));
  }
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST_CASE("a reset right after a time-out does not strand a peer that has yet to notice") {
  for (int repetition = 0; repetition < 5; ++repetition) {
    const auto group = make_thread_group(3, std::chrono::milliseconds(400));
    const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
      char letters[3] = {};
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(550));
      } else {
        if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(30));
        try {
          member->all_gather("x", letters, 1, {}, "letters");
          throw Error(ErrorKind::kState, "an exchange without rank 1 succeeded");
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::kTimeout) throw;
        }
      }
      reset_thread_group(*member);
      const char mine = static_cast<char>('a' + rank);
      member->all_gather(&mine, letters, 1, {}, "letters");
      if (std::memcmp(letters, "abc", 3) != 0) throw Error(ErrorKind::kState, "wrong letters");
    });
    CHECK(all_returned(thrown));
  }
}

TEST_CASE("calls fail until every member has reset") {
  const auto group = make_thread_group(3, std::chrono::seconds(5));
  std::vector<std::optional<Error>> early(3);
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    char letters[3] = {};
    if (rank == 2) {
      member->abort(Error(ErrorKind::kMemory, "out of paper"));
    } else {
      // By now rank 2 waits in its reset, and its failure is news to the others all the same.
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      try {
        member->all_gather("x", letters, 1, {}, "letters");
      } catch (const Error& error) {
        early[static_cast<size_t>(rank)] = error;
      }
    }
    reset_thread_group(*member);
    const char mine = static_cast<char>('a' + rank);
    member->all_gather(&mine, letters, 1, {}, "letters");
    if (std::memcmp(letters, "abc", 3) != 0) throw Error(ErrorKind::kState, "wrong letters");
  });
  CHECK(all_returned(thrown));
  for (const size_t rank : {0U, 1U}) {
    REQUIRE(early[rank].has_value());
    CHECK(early[rank]->kind() == ErrorKind::kMemory);
    CHECK(says(*early[rank], {"rank 2", "out of paper"}));
  }
}

TEST_CASE("a rank that aborts takes its peers with it") {
  const Case problem = three_ranks();
  const auto group = make_thread_group(3, kPatience);
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    Context context(member, 1);
    if (rank == 0) {
      member->abort(Error(ErrorKind::kMemory, "out of paper"));
      return;
    }
    Arguments arguments{inputs_of(problem, rank), options_of(problem, {}), false, {}};
    call_forward(context, arguments);
  });
  for (const size_t rank : {1U, 2U}) {
    REQUIRE(thrown[rank].has_value());
    CHECK(thrown[rank]->kind() == ErrorKind::kMemory);
    CHECK(says(*thrown[rank], {"rank 0", "out of paper"}));
  }
}

TEST_CASE("the exchanges of a thread group move what they say") {
  const int ranks = 4;
  const auto group = make_thread_group(ranks, kPatience);
  const auto thrown = on_ranks(group, [&](int rank, const std::shared_ptr<Group>& member) {
    for (int round = 0; round < 50; ++round) {
      int32_t mine[2] = {rank, round};
      int32_t all[8];
      member->all_gather(mine, all, sizeof mine, {}, "pairs");
      int32_t send[4];
      int32_t receive[4];
      for (int to = 0; to < ranks; ++to) send[to] = 100 * rank + to + round;
      member->all_to_all(send, receive, sizeof(int32_t), {}, "numbers");
      for (int from = 0; from < ranks; ++from) {
        if (all[2 * from] != from || all[2 * from + 1] != round ||
            receive[from] != 100 * from + rank + round) {
          throw Error(ErrorKind::kState, "wrong block from rank " + std::to_string(from));
        }
      }
    }
  });
  REQUIRE(all_returned(thrown));
}

TEST_CASE("exchanges of different sizes are one error on every rank") {
  const auto thrown = on_ranks(make_thread_group(3, std::chrono::seconds(20)),
                               [](int rank, const std::shared_ptr<Group>& member) {
                                 char mine[8] = {};
                                 char all[24] = {};
                                 member->all_gather(mine, all, rank == 1 ? 8 : 4, {}, "bytes");
                               });
  for (const auto& error : thrown) {
    REQUIRE(error.has_value());
    CHECK(error->kind() == ErrorKind::kState);
    CHECK(says(*error, {"4", "8"}));
  }
}

TEST_CASE("groups and contexts refuse what they cannot be") {
  CHECK(thrown_by([] { make_thread_group(0, kPatience); }).kind() == ErrorKind::kValue);
  CHECK(thrown_by([] { reset_thread_group(*single_rank()); }).kind() == ErrorKind::kType);
  CHECK(thrown_by([] { Context context(nullptr, 1); }).kind() == ErrorKind::kValue);
  CHECK(says(thrown_by([] { Context context(single_rank(), -2); }), {"threads", "-2"}));
  CHECK(single_rank()->size() == 1);
  CHECK(single_rank()->rank() == 0);
  CHECK(make_thread_group(1, kPatience)[0]->size() == 1);
}
