# SPDX-License-Identifier: Apache-2.0
"""Infinities, NaN, ignored rows, and what memory held before."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from truth import (
    IGNORE,
    TILE,
    Problem,
    budget,
    check,
    check_gradients,
    check_values,
    error,
    make_problem,
    run,
    same,
    truth,
)

import logitless

HUGE = -3e38  # finite in both dtypes; twice as much is not


@pytest.mark.parametrize("masked", ["some", "first tile", "last tile"])
@pytest.mark.parametrize("memory", ["stash", "recompute", "bytes"])
def test_c08_minus_infinity_counts_for_nothing(
    masked: str, memory: str, dtype: torch.dtype
) -> None:
    vocab = 2 * TILE + 40 if memory != "bytes" else 3000
    p = make_problem(33, 32, vocab, dtype=dtype, spread=2.0, upstream="g h q")
    gone = torch.zeros(vocab, dtype=torch.bool)
    if masked == "some":
        gone[::3] = True
    elif masked == "first tile":
        gone[:TILE] = True
    else:
        gone[-(vocab % TILE) :] = True
    p.x[:, 0] = 2.0
    p.weight[:, 0] = 0.0
    left = (~gone).nonzero()[:, 0]
    p = replace(p, target=left[p.target % len(left)])
    p.weight[gone, 0] = HUGE
    assert float((p.x[:1].float() @ p.weight[gone][:1].float().T).squeeze()) == -math.inf
    options = {"memory": budget(p, TILE) if memory == "bytes" else memory}
    result = run(p, **options)
    wanted = truth(p)
    assert wanted.reach > 1e38  # in float64 those logits are finite, and their p is 0
    kept = replace(
        p, weight=p.weight[~gone], target=(gone.cumsum(0).neg() + torch.arange(vocab))[p.target]
    )
    wanted = truth(kept)
    check_values(result, wanted, 32)
    assert result.dx is not None
    assert result.dw is not None
    assert not result.dw[gone].any()
    shown = result._replace(dw=result.dw[~gone])
    check_gradients(shown, wanted, kept)


def test_c08_entropy_at_equal_logits_of_30000(dtype: torch.dtype) -> None:
    vocab = 131072
    weight = torch.zeros(vocab, 8, dtype=dtype)
    weight[:, 0] = 125.0
    x = torch.zeros(5, 8, dtype=dtype)
    x[:, 0] = 240.0
    p = Problem(x, weight, torch.tensor([0, 1, 77, 65536, vocab - 1])).with_upstream("g h")
    for memory in ("stash", "recompute"):
        result = run(p, memory=memory)
        assert (result.entropy - math.log(vocab)).abs().max() <= 2e-5
        assert (result.nll - math.log(vocab)).abs().max() <= 2e-5
        check_gradients(result, truth(p), p, only="dw")


def test_c08_entropy_of_one_hot_rows(dtype: torch.dtype) -> None:
    vocab = 3000
    weight = torch.zeros(vocab, 16, dtype=dtype)
    x = torch.zeros(16, 16, dtype=dtype)
    winners = torch.arange(16) * 180 + 5
    for row in range(16):
        x[row, row] = 8.0
        weight[winners[row], row] = 25.0
    target = winners.clone()
    target[8:] = 0
    p = Problem(x, weight, target).with_upstream("g h")
    for memory in ("stash", "recompute"):
        result, wanted = run(p, memory=memory), truth(p)
        assert (result.entropy >= 0).all()
        assert result.entropy.max() <= 1e-6
        assert (result.nll[8:] - 200.0).abs().max() <= 1e-4
        assert not result.nll[:8].any()
        assert result.dx is not None
        assert bool(result.dx.isfinite().all())
        assert error(result.dx, wanted.dx) <= 5e-3
        assert error(result.dw, wanted.dw) <= 5e-3


def test_c08_gradient_of_the_entropy_alone(dtype: torch.dtype) -> None:
    p = make_problem(40, 32, 2500, dtype=dtype, spread=6.0, upstream="h")
    for memory in ("stash", "recompute", budget(p, 0)):
        check(p, memory=memory)


def test_c09_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    p = make_problem(257, 32, 1200, dtype=dtype, spread=3.0, upstream="g h q")
    for memory in ("stash", "recompute"):
        clean = run(p, memory=memory)
        broken = replace(p, x=p.x.clone())
        broken.x[100, 3] = torch.nan
        result = run(broken, memory=memory)
        others = torch.arange(257) != 100
        for name in ("nll", "lse", "entropy", "dx"):
            got, want = getattr(result, name), getattr(clean, name)
            assert got[100].isnan().all(), name
            assert torch.equal(got[others], want[others]), name
        assert result.dw is not None
        assert bool(result.dw.isnan().any())


def test_c09_nan_in_an_ignored_row_reaches_nothing(dtype: torch.dtype) -> None:
    p = make_problem(257, 32, 1200, dtype=dtype, spread=3.0, upstream="g h q")
    p.target[100] = p.target[256] = IGNORE
    p.x[100], p.x[256] = 0.0, 0.0
    for memory in ("stash", "recompute", "auto"):
        clean = run(p, memory=memory)
        broken = replace(p, x=p.x.clone())
        broken.x[100], broken.x[256] = torch.nan, torch.inf
        assert same(run(broken, memory=memory), clean)
    upstream = {n: getattr(p, n).clone() for n in "ghq"}
    for values in upstream.values():
        values[100] = torch.nan
        values[256] = torch.inf
    assert same(run(replace(p, **upstream)), run(p))


@pytest.mark.parametrize("column", [3, 600])
def test_c09_plus_infinity_is_never_finite(column: int, dtype: torch.dtype) -> None:
    p = make_problem(20, 16, 900, dtype=dtype, upstream="g h q")
    p.x[:, 0] = 0.0
    p.x[5, 0] = -2.0
    p.weight[:, 0] = 0.0
    p.weight[column, 0] = HUGE  # +inf for row 5
    p.target[5] = 7
    result = run(p)
    assert not result.nll[5].isfinite()
    assert not result.lse[5].isfinite()
    others = torch.arange(20) != 5
    wanted = truth(replace(p, x=p.x[others], target=p.target[others], g=None, h=None, q=None))
    assert (result.nll[others].double() - wanted.nll).abs().max() <= 1e-4
    assert result.dx is not None
    assert bool(result.dx[others].isfinite().all())
    plain = p.x.clone()
    plain[5, 0] = 0.0
    clean = run(replace(p, x=plain))
    assert clean.dx is not None
    assert torch.equal(result.dx[others], clean.dx[others])


def test_c09_a_row_without_any_finite_logit_is_nan_as_in_eager(dtype: torch.dtype) -> None:
    p = make_problem(20, 16, 900, dtype=dtype, upstream="g")
    p.x[:, 0] = 0.0
    p.x[4, 0] = 2.0
    p.weight[:, 0] = HUGE
    result = run(p)
    eager = F.cross_entropy((p.x.float() @ p.weight.float().T)[4:5], p.target[4:5])
    assert eager.isnan()
    assert result.nll[4].isnan()
    others = torch.arange(20) != 4
    assert bool(result.nll[others].isfinite().all())


def test_c09_a_masked_target_costs_infinitely_much(dtype: torch.dtype) -> None:
    p = make_problem(12, 16, 700, dtype=dtype, upstream="")
    p.x[:, 0] = 2.0
    p.weight[:, 0] = 0.0
    p.weight[600, 0] = HUGE
    p.target[3] = 600
    result = run(p)
    assert float(result.nll[3]) == math.inf
    assert bool(result.nll[torch.arange(12) != 3].isfinite().all())
    assert bool(result.lse.isfinite().all())


@pytest.mark.parametrize("kept", [[], [-1], [0]])
@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c10_almost_everything_ignored(kept: list[int], memory: str, dtype: torch.dtype) -> None:
    p = make_problem(200, 32, 1000, dtype=dtype, upstream="g h q", spread=2.0)
    before = run(p, memory=memory)
    target = torch.full((200,), IGNORE)
    for row in kept:
        target[row] = 17
    few = replace(p, target=target)
    result = run(few, memory=memory)
    dead = target == IGNORE
    for values in (result.nll, result.lse, result.entropy, result.dx):
        assert values is not None
        assert not values[dead].any()
    if kept:
        check(few, memory=memory)
    else:
        assert result.dw is not None
        assert not result.dw.any()
    assert same(run(p, memory=memory), before)
    for reduction in ("mean", "sum"):
        x, weight = p.x.clone().requires_grad_(), p.weight.clone().requires_grad_()
        loss = logitless.linear_cross_entropy(
            x, weight, torch.full((200,), IGNORE), reduction=reduction, memory=memory
        )
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert x.grad is not None and not x.grad.any()
        assert weight.grad is not None and not weight.grad.any()


def test_c10_first_wave_ignored_second_not(dtype: torch.dtype) -> None:
    p = make_problem(5000, 16, 300, dtype=dtype)
    p.target[:4096] = IGNORE
    result = check(p)
    tail = replace(p, x=p.x[4096:], target=p.target[4096:], g=p.g[4096:])
    alone = run(tail)
    assert torch.equal(result.nll[4096:], alone.nll)
    assert torch.equal(result.dx[4096:], alone.dx)


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c11_ignored_rows_are_written(memory: str, dtype: torch.dtype) -> None:
    """Outputs begin as NaN; the workspace keeps the large values of the call before."""
    p = make_problem(256, 32, 4096, dtype=dtype, upstream="g h q", ignored=0.25)
    assert 30 < int((p.target == IGNORE).sum()) < 100
    large = make_problem(256, 32, 4096, dtype=dtype, upstream="g h q", spread=20.0, seed=9)
    run(replace(large, g=large.g * 1e6, h=large.h * 1e6, q=large.q * 1e6), memory=memory)
    result = check(p, memory=memory)
    dead = p.target == IGNORE
    for values in (result.nll, result.lse, result.entropy, result.dx):
        assert not values[dead].any()
    # And with a NaN call before.
    run(replace(p, x=torch.full_like(p.x, torch.nan)), memory=memory)
    assert same(run(p, memory=memory), result)


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 999, 512, 123])
def test_c12_other_ignore_index(ignore_index: int, dtype: torch.dtype) -> None:
    p = make_problem(60, 32, 1000, dtype=dtype, upstream="g h q", spread=2.0)
    p.target[p.target == -100] = 5
    p.target[::4] = ignore_index
    p = replace(p, ignore_index=ignore_index)
    for memory in ("stash", "recompute"):
        check(p, memory=memory)


def test_c12_a_padding_token_of_a_large_vocabulary() -> None:
    p = make_problem(24, 8, 151936, upstream="g h", spread=3.0)
    p.target[::3] = 151643
    check(replace(p, ignore_index=151643))


@pytest.mark.parametrize("bad", [700, 705, 2**31, -1, -101, -(2**63), 2**63 - 1])
def test_c13_target_out_of_range(bad: int, dtype: torch.dtype) -> None:
    p = make_problem(30, 16, 700, dtype=dtype)
    good = run(p)
    broken = replace(p, target=p.target.clone())
    broken.target[11] = broken.target[20] = bad
    with pytest.raises(ValueError, match=rf"^target: .*\[0, 700\).* {bad} at position 11"):
        run(broken)
    assert same(run(p), good)


def test_c13_target_in_the_masked_part_of_the_vocabulary(dtype: torch.dtype) -> None:
    p = make_problem(30, 16, 700, dtype=dtype)
    p.target[:] = 3
    p.target[29] = 650
    with pytest.raises(ValueError, match=r"\[0, 650\).* 650 at position 29"):
        run(replace(p, vocab_size=650))


def test_c13_int32_target_out_of_range() -> None:
    p = make_problem(30, 16, 700)
    target = p.target.int()
    target[4] = -5
    with pytest.raises(ValueError, match="-5 at position 4"):
        run(replace(p, target=target))


def test_zero_upstream_rows_are_zero(dtype: torch.dtype) -> None:
    p = make_problem(40, 16, 600, dtype=dtype, upstream="g h q")
    for name in "ghq":
        getattr(p, name)[5:9] = 0.0
    for memory in ("stash", "recompute"):
        result = check(p, memory=memory)
        assert result.dx is not None
        assert not result.dx[5:9].any()
    result = run(replace(p, g=torch.zeros(40), h=None, q=None))
    assert not result.dx.any()
    assert not result.dw.any()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e8, 1e20])
def test_any_size_of_the_upstream_gradient(scale: float, dtype: torch.dtype) -> None:
    """Loss scalers and means of many tokens: nothing under- or overflows on the way."""
    p = make_problem(40, 32, 900, dtype=dtype, upstream="g")
    p = replace(p, g=p.g * scale)
    for memory in ("stash", "recompute"):
        check(p, memory=memory)
