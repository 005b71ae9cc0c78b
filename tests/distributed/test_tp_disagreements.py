# SPDX-License-Identifier: Apache-2.0
"""Ranks whose calls do not agree: one error, on every rank, in bounded time; then all is well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from head_cases import Case, Step, call, check, gradients, leaves, make_case, run_step, same_bits
from ranks import Outcome, Ranks

import logitless

Arguments = dict[str, Any]
Mischief = Callable[[int, Arguments], None]


class Failed(NamedTuple):
    kind: str
    message: str
    seconds: float
    after: Step  # of an ordinary call on the same group


def erring(group: dist.ProcessGroup, case: Case, mischief: Mischief) -> Failed:
    """Make a call that `mischief` changed, then an ordinary one, on one group."""
    rank = dist.get_rank(group)
    x, weight = leaves(case, rank)
    arguments: Arguments = {"x": x, "weight": weight, "target": case.target, **case.options}
    mischief(rank, arguments)
    begin = time.monotonic()
    try:
        logitless.linear_cross_entropy(**arguments, group=group)
        kind, message = "", ""
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    return Failed(kind, message, time.monotonic() - begin, run_step(group, case))


def check_failure(
    ranks: Ranks,
    mischief: Mischief,
    kind: str,
    message: str,
    *,
    size: int = 2,
    alike: bool = True,
    **options: Any,
) -> None:
    """Every rank gets the same error; where one rank is to blame, the others hear its words."""
    case = make_case(32, 24, [60, 50, 40][:size], **options)
    usual = ranks.run(size, run_step, case)
    check(case, usual)
    found = ranks.run(size, erring, case, mischief)
    if alike:
        assert len({failed.message for failed in found}) == 1, [f.message for f in found]
    for rank, failed in enumerate(found):
        assert failed.kind == kind, f"rank {rank}: {failed.kind}: {failed.message}"
        assert message in failed.message, f"rank {rank}: {failed.message}"
        assert "\n" not in failed.message
        assert failed.seconds < 10
        assert same_bits(failed.after, usual[rank])


def on(rank: int, blamed: int = 1) -> bool:
    return rank == blamed


def fewer_tokens(rank: int, call: Arguments) -> None:
    if on(rank):
        call["x"], call["target"] = call["x"][:31], call["target"][:31]


def fewer_rows_of_x(rank: int, call: Arguments) -> None:
    if on(rank):
        call["x"] = call["x"][:31]


def narrower(rank: int, call: Arguments) -> None:
    if on(rank):
        call["x"], call["weight"] = call["x"][:, :20], call["weight"][:, :20]


def other_dtype(rank: int, call: Arguments) -> None:
    if on(rank):
        call["x"], call["weight"] = call["x"].float(), call["weight"].float()


def without_native_path(rank: int, call: Arguments) -> None:
    if on(rank):
        call["x"], call["weight"] = call["x"].double(), call["weight"].double()


def mixed_dtypes(rank: int, call: Arguments) -> None:
    if on(rank):
        call["weight"] = call["weight"].float()


def no_target(rank: int, call: Arguments) -> None:
    if on(rank):
        call["target"] = None


def no_target_on_rank_0(rank: int, call: Arguments) -> None:
    if on(rank, 0):
        call["target"] = None


def floating_target(rank: int, call: Arguments) -> None:
    if on(rank):
        call["target"] = call["target"].float()


def entropy_on_one(rank: int, call: Arguments) -> None:
    call["return_entropy"] = on(rank)


def other_temperature(rank: int, call: Arguments) -> None:
    call["temperature"] = 1.0 + rank / 4


def temperature_per_token_on_one(rank: int, call: Arguments) -> None:
    call["temperature"] = torch.ones(32) if on(rank) else 1.0


def zero_temperature(rank: int, call: Arguments) -> None:
    call["temperature"] = 0.0 if on(rank) else 1.0


def no_temperature(rank: int, call: Arguments) -> None:
    call["temperature"] = None if on(rank) else 1.0


def nan_in_temperature(rank: int, call: Arguments) -> None:
    call["temperature"] = torch.ones(32)
    if on(rank):
        call["temperature"][5] = torch.nan


def other_ignore_index(rank: int, call: Arguments) -> None:
    call["ignore_index"] = -100 - rank


def other_vocab_size(rank: int, call: Arguments) -> None:
    call["vocab_size"] = 100 + rank


def vocab_start_on_one(rank: int, call: Arguments) -> None:
    call["vocab_start"] = 60 if on(rank) else None


def sequence_parallel_on_one(rank: int, call: Arguments) -> None:
    call["sequence_parallel"] = on(rank)


def bad_memory(rank: int, call: Arguments) -> None:
    call["memory"] = "much" if on(rank) else "auto"


def bad_reduction(rank: int, call: Arguments) -> None:
    call["reduction"] = "median" if on(rank) else "mean"


def weight_not_gathered(rank: int, call: Arguments) -> None:
    if on(rank):
        call["weight"] = torch.empty(0, dtype=call["weight"].dtype)


def module_as_weight(rank: int, call: Arguments) -> None:
    if on(rank):
        call["weight"] = torch.nn.Linear(24, 50, bias=False)


def small_main_grad(rank: int, call: Arguments) -> None:
    if on(rank):
        call["main_grad"] = torch.zeros(3, 24)


@pytest.mark.parametrize(
    ("mischief", "kind", "message"),
    [
        (fewer_tokens, "ValueError", "tokens: expected the same on every rank, got 32 on rank 0"),
        (fewer_rows_of_x, "ValueError", "x.shape[:-1] == target.shape, got (31,) and (32,)"),
        (narrower, "ValueError", "hidden: expected the same on every rank, got 24"),
        (other_dtype, "TypeError", "got bfloat16 on rank 0 and float32 on rank 1"),
        (without_native_path, "TypeError", "got bfloat16 on rank 0 and float64 on rank 1"),
        (mixed_dtypes, "TypeError", "got torch.bfloat16 and torch.float32"),
        (no_target, "TypeError", "target: expected a tensor, got NoneType"),
        (no_target_on_rank_0, "TypeError", "target: expected a tensor, got NoneType"),
        (floating_target, "TypeError", "target: expected int64 or int32, got torch.float32"),
        (entropy_on_one, "ValueError", "return_entropy: expected the same on every rank"),
        (other_temperature, "ValueError", "got 1.000000 on rank 0 and 1.250000 on rank 1"),
        (temperature_per_token_on_one, "ValueError", "per-token temperature: expected the same"),
        (zero_temperature, "ValueError", "temperature: expected a positive number"),
        (no_temperature, "TypeError", "temperature: expected a number or a tensor, got NoneType"),
        (nan_in_temperature, "ValueError", "got nan at position 5"),
        (other_ignore_index, "ValueError", "got -100 on rank 0 and -101 on rank 1"),
        (other_vocab_size, "ValueError", "vocab_size: expected the same on every rank, got 100"),
        (vocab_start_on_one, "ValueError", "vocab_start: expected every rank to give it or none"),
        (sequence_parallel_on_one, "ValueError", "sequence_parallel: expected the same"),
        (bad_memory, "ValueError", "memory: "),
        (bad_reduction, "ValueError", "reduction: expected one of"),
        (weight_not_gathered, "ValueError", "weight: expected [V_r, H], got shape (0,)"),
        (module_as_weight, "TypeError", "weight: expected a tensor, got the module Linear"),
        (small_main_grad, "ValueError", "main_grad: expected weight's shape (50, 24), got (3, 24)"),
    ],
)
@pytest.mark.filterwarnings("ignore:logitless:UserWarning")
def test_one_error_on_every_rank(ranks: Ranks, mischief: Mischief, kind: str, message: str) -> None:
    check_failure(ranks, mischief, kind, message)


def test_error_of_one_among_three(ranks: Ranks) -> None:
    check_failure(ranks, fewer_tokens, "ValueError", "got 32 on rank 0 and 31 on rank 1", size=3)
    check_failure(ranks, no_target, "TypeError", "target: expected a tensor", size=3)


# --- targets --------------------------------------------------------------------------------------


class BadTarget(NamedTuple):
    """A picklable mischief: `ident` at position 17, on all ranks or on one."""

    ident: int
    only: int | None = None

    def __call__(self, rank: int, call: Arguments) -> None:
        if self.only is None or on(rank, self.only):
            call["target"] = call["target"].clone()
            call["target"][17] = self.ident


@pytest.mark.filterwarnings("ignore:logitless:UserWarning")
@pytest.mark.parametrize("ident", [110, 115, 2**31, 2**32 + 5, -1, -101, -(2**63), 2**63 - 1])
def test_target_out_of_range(ranks: Ranks, ident: int) -> None:
    """No rank owns such an id: an error that names it and its position, rather than a loss."""
    message = f"or an id in [0, 110), got {ident} at position 17"
    check_failure(ranks, BadTarget(ident), "ValueError", message)
    double = torch.float64
    check_failure(ranks, BadTarget(ident), "ValueError", f"{ident} at position 17", dtype=double)


def test_target_out_of_range_on_one_rank(ranks: Ranks) -> None:
    """Targets are to be equal on all ranks; where they are not, still nobody is left waiting."""
    message = "target: expected ignore_index (-100)"
    check_failure(ranks, BadTarget(500, 1), "ValueError", message, alike=False)


# --- the vocabulary -------------------------------------------------------------------------------


def whole_weight(rank: int, call: Arguments) -> None:
    call["weight"] = torch.randn(110, 24, generator=torch.Generator().manual_seed(1)).bfloat16()


def whole_weight_of_known_size(rank: int, call: Arguments) -> None:
    whole_weight(rank, call)
    call["vocab_size"] = 110


def whole_weight_on_one(rank: int, call: Arguments) -> None:
    if on(rank):
        whole_weight(rank, call)
    call["vocab_size"] = 110


def overlapping(rank: int, call: Arguments) -> None:
    call["vocab_start"] = [0, 55][rank]


def gapped(rank: int, call: Arguments) -> None:
    call["vocab_start"] = [0, 64][rank]


def not_from_zero(rank: int, call: Arguments) -> None:
    call["vocab_start"] = [1, 61][rank]


def too_large_vocabulary(rank: int, call: Arguments) -> None:
    call["vocab_size"] = 111


@pytest.mark.parametrize(
    ("mischief", "message"),
    [
        (whole_weight, "weight: expected a different shard on each of 2 ranks, got the same 110"),
        (whole_weight_of_known_size, "weight: expected a shard of vocab_size 110 on each of 2"),
        (whole_weight_on_one, "got all 110 rows on rank 1"),
        (overlapping, "got [55, 105) on rank 1 where 60 comes next"),
        (gapped, "got [64, 114) on rank 1 where 60 comes next"),
        (not_from_zero, "got [1, 61) on rank 0 where 0 comes next"),
        (too_large_vocabulary, "vocab_size: expected 1 to 110 (the rows of all shards), got 111"),
    ],
)
def test_shards_that_do_not_fit(ranks: Ranks, mischief: Mischief, message: str) -> None:
    check_failure(ranks, mischief, "ValueError", message)


# --- sequence parallelism -------------------------------------------------------------------------


def token_shards(group: dist.ProcessGroup, case: Case, sizes: list[int]) -> None:
    x, weight = leaves(case, dist.get_rank(group))
    x = x[: sizes[dist.get_rank(group)]]
    call(case, group, x, weight, sequence_parallel=True)


def test_token_shards_that_do_not_sum_up(ranks: Ranks) -> None:
    case = make_case(32, 24, [60, 50])
    for outcome in ranks.attempt(2, token_shards, case, [16, 15]):
        assert outcome.kind == "ValueError"
        assert "to sum to target.shape[0], got 31 and 32" in outcome.message


# --- backward -------------------------------------------------------------------------------------


def backward_of_others(group: dist.ProcessGroup, case: Case) -> str:
    """Rank 1 has a gradient of lse too; then both do the same on the same graph."""
    rank = dist.get_rank(group)
    x, weight = leaves(case, rank)
    out = call(case, group, x, weight)
    loss = out.loss.sum() + (out.lse.sum() if rank == 1 else 0.0)
    try:
        torch.autograd.grad(loss, (x, weight), retain_graph=True)
    except ValueError as error:
        gradients(case, out, x, weight)
        return str(error)
    return ""


def test_other_upstream_gradients(ranks: Ranks) -> None:
    for message in ranks.run(2, backward_of_others, make_case(32, 24, [60, 50])):
        assert message.startswith("upstream gradients (1 nll, 2 entropy, 4 lse): expected the same")
        assert message.endswith("got 1 on rank 0 and 5 on rank 1")


def backward_against_forward(group: dist.ProcessGroup, case: Case) -> None:
    x, weight = leaves(case, dist.get_rank(group))
    out = call(case, group, x, weight)
    if dist.get_rank(group) == 0:
        call(case, group, x, weight)
    else:
        gradients(case, out, x, weight)


def test_other_order_of_calls(ranks: Ranks) -> None:
    for outcome in ranks.attempt(2, backward_against_forward, make_case(32, 24, [60, 50])):
        assert outcome.kind == "RuntimeError"
        assert "got forward on rank 0 and backward on rank 1" in outcome.message
        assert outcome.seconds < 10


# --- a rank that does not come --------------------------------------------------------------------


def only_rank_0(group: dist.ProcessGroup, case: Case, phase: str) -> None:
    x, weight = leaves(case, dist.get_rank(group))
    if phase == "backward":
        out = call(case, group, x, weight)
        if dist.get_rank(group) == 0:
            gradients(case, out, x, weight)
    elif dist.get_rank(group) == 0:
        call(case, group, x, weight)


def check_timeout(outcomes: list[Outcome], phase: str) -> None:
    assert outcomes[0].kind == "TimeoutError"
    assert f'rank 0 of 2: the exchange of "{phase}" timed out' in outcomes[0].message
    assert outcomes[0].seconds < 15
    assert not outcomes[1].kind


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_rank_that_never_comes(ranks: Ranks, phase: str) -> None:
    """The group's time-out ends the waiting; the process goes on with other groups."""
    case = make_case(32, 24, [60, 50])
    check_timeout(ranks.attempt(2, only_rank_0, case, phase, timeout=3.0), phase)
    check(case, ranks.run(2, run_step, case))


@pytest.mark.filterwarnings("ignore:logitless:UserWarning")
def test_rank_that_never_comes_to_the_fallback(ranks: Ranks) -> None:
    case = make_case(32, 24, [60, 50], dtype=torch.float64)
    check_timeout(ranks.attempt(2, only_rank_0, case, "backward", timeout=3.0), "chunk backward")


def rank_1_is_late(group: dist.ProcessGroup, case: Case) -> None:
    if dist.get_rank(group) == 1:
        time.sleep(3)
    call(case, group, *leaves(case, dist.get_rank(group)))


def test_rank_that_comes_too_late(ranks: Ranks) -> None:
    """It finds a group that is broken: an error for it too, in bounded time."""
    first, second = ranks.attempt(2, rank_1_is_late, make_case(8, 24, [60, 50]), timeout=1.0)
    assert first.kind == "TimeoutError"
    assert second.kind in ("TimeoutError", "RuntimeError")
    assert 'rank 1 of 2: the exchange of "forward"' in second.message
    assert second.seconds < 20


def rank_1_fails_unannounced(group: dist.ProcessGroup, case: Case) -> None:
    """Fail on rank 1, in the front or in the native checks, after a call that was vouched for."""
    x, weight = leaves(case, dist.get_rank(group))
    call(case, group, x, weight)
    target, temperature = case.target, case.options["temperature"]
    if dist.get_rank(group) == 1 and temperature == 1.0:
        target = None
    elif dist.get_rank(group) == 1:
        temperature = 0.0
    logitless.linear_cross_entropy(
        x, weight, target, group=group, assume_uniform=True, temperature=temperature
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("tokens", [4, 100])
def test_failure_under_assume_uniform(ranks: Ranks, tokens: int, temperature: float) -> None:
    """Without headers nobody can be told: the peer's time-out ends the waiting, nothing crashes."""
    case = make_case(
        tokens, 24, [60, 50], upstream="nll", assume_uniform=True, temperature=temperature
    )
    first, second = ranks.attempt(2, rank_1_fails_unannounced, case, timeout=3.0)
    assert second.kind == ("TypeError" if temperature == 1.0 else "ValueError")
    assert first.kind == "TimeoutError"
    assert 'the exchange of "statistics" timed out' in first.message
