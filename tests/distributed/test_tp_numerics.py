# SPDX-License-Identifier: Apache-2.0
"""The loss and its gradients over several ranks against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from head_cases import (
    IGNORE,
    Case,
    Step,
    check,
    check_on,
    generator,
    make_case,
    run_step,
    same_bits,
    shards_of,
    truth_of,
)
from ranks import Ranks

DTYPES = [torch.bfloat16, torch.float32]
TILE = 512  # vocabulary rows of the CPU backend's projection tile


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [[700], [350, 350], [512, 130, 58], [1, 300, 17, 257, 125]])
@pytest.mark.filterwarnings("ignore:logitless:UserWarning")
def test_matches_float64(ranks: Ranks, rows: list[int], dtype: torch.dtype) -> None:
    check_on(ranks, make_case(37, 40, rows, dtype=dtype))


@pytest.mark.parametrize("seed", range(12))
def test_random_cuts(ranks: Ranks, seed: int) -> None:
    """Any shapes and cuts: hidden sizes that nothing divides, shards of one row, few tokens."""
    g = generator(1000 + seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    size = pick(2, 6)
    vocab = pick(size, 1500)
    cuts = (torch.randperm(vocab - 1, generator=g)[: size - 1] + 1).sort().values.tolist()
    rows = [b - a for a, b in zip([0, *cuts], [*cuts, vocab], strict=True)]
    tokens = pick(0, 90)
    case = make_case(
        tokens,
        pick(1, 70),
        rows,
        dtype=DTYPES[seed % 2],
        scale=float(pick(1, 6)),
        seed=seed,
        upstream=["nll", "nll entropy", "lse", "nll entropy lse"][pick(0, 4)],
        memory=["auto", "stash", "recompute"][pick(0, 3)],
        temperature=0.5 + pick(0, 3),
    )
    if pick(0, 2):
        inner = sorted(pick(0, tokens + 1) for _ in range(size - 1))
        case = replace(case, tokens=[0, *inner, tokens])
    check_on(ranks, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 64, 128, 255, TILE + 1, TILE + 8, TILE + 64])
def test_tail_is_not_counted(ranks: Ranks, rows: int, dtype: torch.dtype) -> None:
    """Every logit is −20: a padded column that entered as a logit of 0 would dominate the sum."""
    hidden, vocab = 32, 2 * rows
    weight = torch.full((vocab, hidden), -20.0 / hidden)
    # Rows that differ, exactly, without a change of their sums.
    weight += (torch.arange(vocab) * 7 % 11 - 5)[:, None] / 64 * torch.tensor([1, -1]).repeat(16)
    case = Case(
        torch.ones(5, hidden, dtype=dtype),
        weight.to(dtype),
        torch.tensor([0, rows - 1, rows, vocab - 1, IGNORE]),
        shards_of([rows, rows]),
        {"nll": torch.tensor([1.0, -2.0, 0.5, 3.0, 7.0]), "entropy": torch.ones(5)},
    )
    step = check_on(ranks, case)[0]
    want = torch.tensor([math.log(vocab)] * 4 + [0.0])
    torch.testing.assert_close(step.nll, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(step.entropy, want, rtol=0, atol=1e-4)
    assert (step.nll >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[TILE + 8, TILE + 8], [TILE + 8, 3, TILE + 1]])
def test_targets_around_shard_edges(ranks: Ranks, rows: list[int], dtype: torch.dtype) -> None:
    """Every id near an edge of a shard or a tile, also where a tile's padding would be."""
    vocab = sum(rows)
    edges = {0, vocab, TILE, 2 * TILE, *(s for s, _ in shards_of(rows))}
    edges |= {e + TILE for e in edges} | {e + 2 * TILE for e in edges}
    ids = sorted({e + d for e in edges for d in range(-9, 10) if 0 <= e + d < vocab})
    assert {0, vocab - 1, rows[0] - 1, rows[0], 2 * TILE - 1} <= set(ids)
    case = make_case(len(ids), 24, rows, dtype=dtype, scale=4.0, upstream="nll", ignored=False)
    check_on(ranks, replace(case, target=torch.tensor(ids)))


def test_upstream_per_token(ranks: Ranks) -> None:
    """Zero, negative, huge and tiny upstream gradients, each for its own token."""
    case = make_case(300, 24, [310, 290], upstream="nll", dtype=torch.float32)
    g = case.upstream["nll"]
    g[0], g[1], g[2], g[3] = 0.0, -5.0, 1e3, 1e-4
    case.target[:5] = torch.tensor([5, 5, 599, 309, IGNORE])
    steps = check_on(ranks, case)
    truth = truth_of(case)
    assert torch.count_nonzero(steps[0].dx[[0, 4]]) == 0
    for token in (1, 2, 3):  # beside 1e3, a wrong small row would not be seen in the norm
        torch.testing.assert_close(
            steps[0].dx[token].double(), truth.dx[token], rtol=1e-4, atol=1e-5 * g[token].abs()
        )


@pytest.mark.parametrize("used", ["nll", "entropy", "lse", "nll entropy", "entropy lse"])
@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_only_some_outputs_used(ranks: Ranks, used: str, memory: str) -> None:
    case = make_case(70, 24, [100, 140, 60], upstream=used, memory=memory)
    check_on(ranks, case.with_options(return_entropy="entropy" in used))


def test_entropy_as_metric_only(ranks: Ranks) -> None:
    """An entropy without gradient changes no bit of anything else."""
    case = make_case(70, 24, [100, 140], upstream="nll")
    plain = check_on(ranks, case)
    metric = ranks.run(2, run_step, case.with_options(return_entropy=True))
    for a, b in zip(plain, metric, strict=True):
        assert same_bits(a, b._replace(entropy=None))
    want = truth_of(replace(case, upstream={})).entropy
    torch.testing.assert_close(metric[0].entropy.double(), want, rtol=0, atol=2e-4)


def masked_case(dtype: torch.dtype, masked: slice) -> Case:
    """Return two shards of 90 rows; those in `masked` have logits of −inf from finite inputs."""
    case = make_case(20, 16, [90, 90], dtype=dtype, ignored=False)
    case.x[:, 0] = 2.0
    case.weight[:, 0] = 0.0
    case.weight[masked, 0] = -3e38
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("owner", [0, 1])
def test_shard_without_mass(ranks: Ranks, owner: int, dtype: torch.dtype) -> None:
    """All logits of one rank are −inf: the result is that of the other shard alone."""
    own, other = (slice(0, 90), slice(90, 180))[:: 1 if owner == 0 else -1]
    case = masked_case(dtype, other)
    case.target.remainder_(90).add_(90 * owner)
    steps = ranks.run(2, run_step, case)
    weight = case.weight[own].clone()
    alone = replace(case, weight=weight, target=case.target - 90 * owner, shards=shards_of([90]))
    single = ranks.run(1, run_step, alone)[0]
    check(alone, [single])
    for step in steps:
        for name in ("nll", "entropy", "lse"):
            got, want = getattr(step, name), getattr(single, name)
            assert torch.isfinite(got).all()
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert torch.isfinite(step.dx).all()
        torch.testing.assert_close(step.dx, single.dx)
    assert torch.count_nonzero(steps[1 - owner].dw) == 0
    torch.testing.assert_close(steps[owner].dw, single.dw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_target_without_probability(ranks: Ranks, dtype: torch.dtype) -> None:
    """The target lies in the masked shard: its loss is +inf, and the other rows keep their own."""
    case = masked_case(dtype, slice(90, 180))
    case = replace(case, upstream={"nll": case.upstream["nll"]})
    case.target.remainder_(90)
    clean = check_on(ranks, case)
    case.target[3] = 100
    steps = ranks.run(2, run_step, case)
    others = torch.arange(20) != 3
    for step, before in zip(steps, clean, strict=True):
        assert step.nll[3] == math.inf
        assert torch.equal(step.nll[others], before.nll[others])
        assert torch.equal(step.dx[others], before.dx[others])


def test_every_class_masked(ranks: Ranks) -> None:
    """No class has any mass on any rank: NaN, as log-softmax gives."""
    case = masked_case(torch.float32, slice(0, 180))
    for step in ranks.run(2, run_step, case.with_options(return_entropy=True)):
        assert torch.isnan(step.nll).all()
        assert torch.isnan(step.lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_hidden_row_stays_alone(ranks: Ranks, bad: float, dtype: torch.dtype) -> None:
    case = make_case(257, 16, [90, 100], dtype=dtype, ignored=False)
    clean = check_on(ranks, case)
    case.x[100, 3] = bad
    others = torch.arange(257) != 100
    for step, before in zip(ranks.run(2, run_step, case), clean, strict=True):
        assert not torch.isfinite(step.nll[100])
        for name in ("nll", "entropy", "lse", "dx"):
            got, want = getattr(step, name), getattr(before, name)
            assert torch.equal(got[others], want[others]), name


@pytest.mark.parametrize("size", [2, 3])
def test_all_tokens_ignored(ranks: Ranks, size: int) -> None:
    """Exact zeros, and the next call has what it has without such a call before it."""
    usual = make_case(50, 24, [60] * size)
    none = replace(usual, x=usual.x.clone(), target=torch.full_like(usual.target, IGNORE))
    none.x[4] = math.nan  # the hidden state of padding may hold anything
    last = replace(none, x=usual.x, target=none.target.clone())
    last.target[-1] = 70
    before, zeros, one, after = zip(
        *ranks.run(size, run_steps, [usual, none, last, usual]), strict=True
    )
    for rank in range(size):
        for name in ("nll", "entropy", "lse", "dx", "dw"):
            assert torch.count_nonzero(getattr(zeros[rank], name)) == 0, name
        assert torch.count_nonzero(one[rank].dx[:-1]) == 0
        assert same_bits(before[rank], after[rank])
    check(usual, after)
    check(last, one)


def run_steps(group: torch.distributed.ProcessGroup, cases: list[Case]) -> list[Step]:
    return [run_step(group, case) for case in cases]


@pytest.mark.parametrize("ignore", [-100, -1, 0, 199, 150])
def test_ignore_index(ranks: Ranks, ignore: int) -> None:
    """Also an id of either shard: its rows vanish, its class stays in the softmax of others."""
    case = make_case(80, 24, [100, 100], ignored=False)
    case.target[::7] = ignore
    case = case.with_options(ignore_index=ignore)
    step = check_on(ranks, case)[1]
    assert torch.count_nonzero(step.nll[::7]) == 0
    assert torch.count_nonzero(step.dx[::7]) == 0
    assert torch.count_nonzero(step.nll) == int((case.target != ignore).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.5, 10.0])
def test_temperature(ranks: Ranks, temperature: float, dtype: torch.dtype) -> None:
    check_on(ranks, make_case(40, 24, [130, 70], dtype=dtype, temperature=temperature))


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_temperature_per_token(ranks: Ranks, memory: str) -> None:
    tau = 0.2 + 3.0 * torch.rand(40, generator=generator(5))
    case = make_case(40, 24, [130, 70, 50], temperature=tau, memory=memory)
    steps = check_on(ranks, case)
    same = ranks.run(3, run_step, case.with_options(temperature=torch.full((40,), 0.75)))
    one = ranks.run(3, run_step, case.with_options(temperature=0.75))
    assert all(same_bits(a, b) for a, b in zip(same, one, strict=True))
    assert not torch.equal(steps[0].nll, one[0].nll)


def test_large_common_offset(ranks: Ranks) -> None:
    """All logits near 30000: the anchors cancel the offset, on each rank its own."""
    case = make_case(30, 16, [100, 100], dtype=torch.float32, scale=1.0)
    case.x[:, 0] = 240.0
    case.weight[:, 0] = 125.0
    check_on(ranks, case)
    for memory in ("stash", "recompute"):
        case.x[:, 0], case.weight[:, 0] = 240.0, 0.0
        case.weight[100:, 0] = -1.0  # rank 1 is 240 below rank 0
        check_on(ranks, case.with_options(memory=memory))


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(ranks: Ranks, dtype: torch.dtype) -> None:
    case = make_case(90, 24, [130, 70, 50], dtype=dtype)
    first, *others = zip(*ranks.run(3, run_steps, [case] * 5), strict=True)
    check(case, first)
    for again in others:
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_does_not_depend_on_batch(ranks: Ranks, dtype: torch.dtype) -> None:
    """A token alone has the bits of loss, entropy and lse that it has among others."""
    case = make_case(131, 40, [600, 55], dtype=dtype)
    batch = check_on(ranks, case)[0]
    for part in (slice(0, 1), slice(64, 65), slice(130, 131), slice(3, 70)):
        alone = replace(
            case,
            x=case.x[part],
            target=case.target[part],
            upstream={n: g[part] for n, g in case.upstream.items()},
        )
        step = ranks.run(2, run_step, alone)[0]
        for name in ("nll", "entropy", "lse"):
            assert torch.equal(getattr(step, name), getattr(batch, name)[part]), (name, part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_part_of_the_stash(ranks: Ranks, dtype: torch.dtype) -> None:
    """A bound in bytes with which every rank keeps 512 of its columns and projects the others."""
    case = make_case(16, 8, [2700, 2600], dtype=dtype, upstream="nll lse")
    pitch_bytes = 16 * dtype.itemsize
    bound = 24 * 16 + (2048 + 512) * pitch_bytes
    check_on(ranks, case.with_options(memory=bound))
    for outcome in ranks.attempt(2, run_step, case.with_options(memory=24 * 16)):
        assert outcome.kind == "ValueError"
        assert f"at least {24 * 16 + 2048 * pitch_bytes} bytes" in outcome.message


@pytest.mark.parametrize("memory", ["stash", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_one_rank(ranks: Ranks, dtype: torch.dtype, memory: str | int) -> None:
    """Two ranks against one that holds the whole weight; all targets on rank 0, or on both."""
    for only_first in (False, True):
        case = make_case(64, 24, [600, 600], dtype=dtype, memory=memory, upstream="nll lse")
        if only_first:
            case.target.clamp_(max=599)
        both = check_on(ranks, case)
        whole = check_on(ranks, replace(case, shards=shards_of([1200])))[0]
        limit = 2 * (3e-3 if dtype == torch.bfloat16 else 1e-5)
        for step, (first, last) in zip(both, case.shards, strict=True):
            torch.testing.assert_close(step.nll, whole.nll, rtol=0, atol=1e-4)
            for got, want in ((step.dx, whole.dx), (step.dw, whole.dw[first:last])):
                assert (got - want).double().norm() <= limit * want.double().norm()
