# SPDX-License-Identifier: Apache-2.0
"""How the vocabulary may lie over the ranks: uneven, padded, in any order of ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from head_cases import (
    Case,
    check,
    check_on,
    make_case,
    run_step,
    same_bits,
    shards_of,
    truth_of,
)
from ranks import Ranks

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "hidden"),
    [
        ([25129, 25128], 8),  # 50257
        ([75968, 75968], 4),  # 151936
        ([48, 32, 64], 24),
        ([1, 1], 3),
        ([1000, 1], 24),
        ([1, 1, 1, 1, 777], 24),
    ],
)
def test_uneven_shards(ranks: Ranks, rows: list[int], hidden: int, dtype: torch.dtype) -> None:
    """The first id of a shard is the sum of the shards before it, not rank · V_r."""
    case = make_case(33, hidden, rows, dtype=dtype)
    edges = [e for first, last in case.shards for e in (first, last - 1)]
    case.target[: len(edges)] = torch.tensor(edges)
    check_on(ranks, case)


def padded_case(rows: list[int], vocab: int, padding: float, dtype: torch.dtype) -> Case:
    case = make_case(40, 24, rows, dtype=dtype, vocab_size=vocab)
    case.target.clamp_(max=vocab - 1)
    case.target[3] = vocab - 1
    case.weight[vocab:] = padding
    return replace(case, true_vocab=vocab)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", ["stash", "recompute"])
@pytest.mark.parametrize("padding", [0.0, 100.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [
        ([640, 640], 1279),
        ([640, 640], 700),
        ([64, 64, 64], 100),  # a rank of nothing but padding
        ([64, 64, 64], 65),
        ([64, 64, 64, 64, 64], 129),
    ],
)
def test_padded_vocabulary(
    ranks: Ranks, rows: list[int], vocab: int, padding: float, memory: str, dtype: torch.dtype
) -> None:
    """Rows from vocab_size on take part in nothing, whatever they hold; their gradient is 0."""
    case = padded_case(rows, vocab, padding, dtype).with_options(memory=memory)
    steps = check_on(ranks, case)
    for step, (first, last) in zip(steps, case.shards, strict=True):
        rest = step.dw[max(0, min(vocab, last) - first) :]
        assert torch.count_nonzero(rest) == 0
        assert torch.isfinite(step.dx).all()


def test_targets_in_the_padding(ranks: Ranks) -> None:
    """A row of the weight exists for the id, but it is not part of the vocabulary: an error."""
    case = padded_case([64, 64], 100, 0.0, torch.bfloat16)
    case.target[7] = 100
    for outcome in ranks.attempt(2, run_step, case):
        assert outcome.kind == "ValueError"
        assert "or an id in [0, 100), got 100 at position 7" in outcome.message


@pytest.mark.filterwarnings("ignore:logitless:UserWarning")
def test_padding_in_the_fallback(ranks: Ranks) -> None:
    for rows, vocab in (([640, 640], 700), ([64, 64, 64], 100)):
        check_on(ranks, padded_case(rows, vocab, math.nan, torch.float64))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    "shards",
    [
        [(60, 110), (0, 60)],
        [(64, 100), (0, 64), (100, 150)],
        [(140, 150), (100, 140), (60, 100), (0, 60), (150, 199)],
    ],
)
@pytest.mark.filterwarnings("ignore:logitless:UserWarning")
def test_order_of_shards(ranks: Ranks, shards: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """With vocab_start, shards need not lie in the order of the ranks."""
    rows = max(last for _, last in shards)
    case = make_case(40, 24, [rows], dtype=dtype)
    case = replace(case, shards=shards, starts=[first for first, _ in shards])
    check_on(ranks, case)
    padded = case.with_options(vocab_size=rows - 7)
    padded.target.clamp_(max=rows - 8)
    check_on(ranks, replace(padded, true_vocab=rows - 7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_explicit_is_as_implied(ranks: Ranks, dtype: torch.dtype) -> None:
    """vocab_start and vocab_size that say what the group would agree on change no bit."""
    case = make_case(40, 24, [48, 32, 64], dtype=dtype)
    usual = check_on(ranks, case)
    starts = [first for first, _ in case.shards]
    for told in (
        replace(case, starts=starts),
        case.with_options(vocab_size=144),
        replace(case, starts=starts).with_options(vocab_size=144),
    ):
        steps = ranks.run(3, run_step, told)
        assert all(same_bits(a, b) for a, b in zip(steps, usual, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_zero_weights(ranks: Ranks, size: int) -> None:
    """A head that starts from zeros has the same shard on all ranks, and that is no mistake."""
    case = make_case(40, 24, [50] * size)
    case.weight.zero_()
    step = check_on(ranks, case)[0]
    live = case.target >= 0
    assert torch.allclose(step.nll[live], torch.tensor(math.log(50 * size)))


def test_constant_weights(ranks: Ranks) -> None:
    case = make_case(40, 24, [50, 50], upstream="nll", dtype=torch.float32)
    case.weight.fill_(0.25)
    steps = ranks.run(2, run_step, case)
    truth = truth_of(case)
    for step in steps:
        torch.testing.assert_close(step.nll.double(), truth.nll, rtol=1e-6, atol=1e-6)


def test_equal_shards_that_are_meant(ranks: Ranks) -> None:
    """With explicit starts, two shards may have the same rows."""
    case = make_case(40, 24, [50, 50])
    case.weight[50:] = case.weight[:50]
    for outcome in ranks.attempt(2, run_step, case):
        assert outcome.kind == "ValueError"
        assert "got the same 50 rows on all" in outcome.message
    check_on(ranks, replace(case, starts=[0, 50]))


def test_no_tokens(ranks: Ranks) -> None:
    """M = 0 is a call like any other, also with sequence parallelism."""
    case = make_case(0, 24, [50, 60, 7])
    for problem in (case, replace(case, tokens=[0, 0, 0, 0])):
        for step, (first, last) in zip(check_on(ranks, problem), case.shards, strict=True):
            assert step.nll.shape == (0,) and step.dx.shape == (0, 24)
            assert step.dw.shape == (last - first, 24)
            assert torch.count_nonzero(step.dw) == 0


def test_shard_sizes_change_between_calls(ranks: Ranks) -> None:
    """Agreed on anew at each call: the second head of a process is cut in another way."""
    for rows in ([48, 32, 64], [64, 48, 32], [10, 120, 14]):
        case = make_case(40, 24, rows, seed=7)
        assert case.shards == shards_of(rows)
        check(case, ranks.run(3, run_step, case))
