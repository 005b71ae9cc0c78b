# SPDX-License-Identifier: Apache-2.0
"""Random problems of every kind against float64, and properties that hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from truth import (
    BF16,
    FP32,
    TILE,
    Problem,
    budget,
    check,
    check_values,
    eager_gradients,
    error,
    make_problem,
    run,
    same,
    truth,
)

import logitless
from logitless import _memory

# The same examples on every run, and no complaint about a slow machine.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.load_profile("fixed")

DTYPES = st.sampled_from([BF16, FP32])


def _strided(t: Tensor, kind: str) -> Tensor:
    if kind == "gapped":
        big = torch.full((t.shape[0], t.shape[1] + 3), torch.nan, dtype=t.dtype)
        big[:, 1:-2] = t
        return big[:, 1:-2]
    if kind == "transposed":
        return t.t().contiguous().t()
    if kind == "stepped":
        big = torch.full((2 * t.shape[0], 2 * t.shape[1]), torch.nan, dtype=t.dtype)
        big[::2, ::2] = t
        return big[::2, ::2]
    return t


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    tokens = draw(st.integers(1, 140))
    vocab = draw(st.one_of(st.integers(2, 700), st.sampled_from([512, 513, 1024, 2047, 2600])))
    p = make_problem(
        tokens,
        draw(st.integers(8, 90)),
        vocab,
        dtype=draw(DTYPES),
        spread=draw(st.sampled_from([0.1, 1.0, 3.0, 8.0])),
        # Of a few classes the roundings of a common column do not average out.
        offset=draw(st.sampled_from([0.0, 0.0, -40.0, 256.0])) if vocab >= 64 else 0.0,
        seed=draw(st.integers(0, 10**6)),
        upstream=draw(st.sampled_from(["g", "g h", "h", "q", "g q", "g h q"])),
    )
    kind = draw(st.sampled_from(["number", "per token", "single"]))
    if kind == "number":
        p = replace(p, temperature=draw(st.sampled_from([0.5, 1.0, 2.5])))
    elif kind == "single":
        p = replace(p, temperature=torch.tensor([0.8]))
    else:
        p = replace(p, temperature=torch.linspace(0.5, 2.0, tokens))
    target = p.target % draw(st.sampled_from([vocab, max(1, vocab // 2), 1]))
    ignore_index = draw(st.sampled_from([-100, -1, 0, vocab - 1]))
    pattern = draw(st.sampled_from(["none", "first", "last", "every other", "all but one"]))
    rows = {
        "none": slice(0, 0),
        "first": slice(0, tokens // 2),
        "last": slice(tokens // 2, tokens),
        "every other": slice(0, tokens, 2),
        "all but one": slice(1, tokens),
    }[pattern]
    target[rows] = ignore_index
    if draw(st.booleans()):
        target = target.int()
    live = target[target != ignore_index]
    smallest = int(live.max()) + 1 if live.numel() else 1
    size = draw(st.one_of(st.none(), st.integers(max(smallest, 2), max(vocab, 2))))
    layouts = st.sampled_from(["dense", "dense", "gapped", "transposed", "stepped"])
    return replace(
        p,
        x=_strided(p.x, draw(layouts)),
        weight=_strided(p.weight, draw(layouts)),
        target=target,
        ignore_index=ignore_index,
        vocab_size=size,
    )


@given(problems(), st.sampled_from(["auto", "stash", "recompute", "bytes"]), st.data())
@settings(max_examples=120)
def test_everything_against_float64(p: Problem, memory: str, data: st.DataObject) -> None:
    options = {}
    options["memory"] = (
        budget(p, TILE * data.draw(st.integers(0, 3))) if memory == "bytes" else memory
    )
    # Where the truth itself is almost nothing, an error relative to it says nothing.
    wanted = truth(p)
    result = run(p, **options)
    check_values(result, wanted, p.x.shape[1])
    assume(float(wanted.dx.norm()) > 1e-3 and float(wanted.dw.norm()) > 1e-3)
    if p.x.dtype == BF16:
        limits = [
            max(2 * error(e, w), 1e-2) for e, w in zip(eager_gradients(p), wanted[3:5], strict=True)
        ]
    else:
        limits = [3e-5 * max(1.0, wanted.reach)] * 2
    assert error(result.dx, wanted.dx) <= limits[0]
    assert error(result.dw, wanted.dw) <= limits[1]
    dead = p.target == p.ignore_index
    for values in (result.nll, result.lse, result.entropy, result.dx):
        assert not values[dead].any()


@given(problems(), st.booleans(), st.booleans())
@settings(max_examples=25)
def test_flags_change_nothing_of_what_is_wanted(p: Problem, want_x: bool, want_w: bool) -> None:
    every = run(p, memory="stash")
    some = run(p, memory="stash", want_x=want_x, want_w=want_w)
    for name, wanted in (
        ("nll", True),
        ("lse", True),
        ("entropy", True),
        ("dx", want_x),
        ("dw", want_w),
    ):
        got = getattr(some, name)
        assert (got is not None) == wanted
        assert not wanted or torch.equal(got, getattr(every, name)), name


@given(problems(), st.data())
@settings(max_examples=30)
def test_c29_any_row_alone(p: Problem, data: st.DataObject) -> None:
    tokens = len(p.target)
    first = data.draw(st.integers(0, tokens - 1))
    part = slice(first, data.draw(st.integers(first + 1, tokens)))
    every = run(p)
    tau = p.temperature
    if isinstance(tau, Tensor) and tau.numel() == tokens > 1:
        tau = tau[part]
    some = run(
        replace(p, x=p.x[part], target=p.target[part], temperature=tau, g=None, h=None, q=None)
    )
    for name in ("nll", "lse", "entropy"):
        assert torch.equal(getattr(some, name), getattr(every, name)[part]), name


@given(problems())
@settings(max_examples=20)
def test_the_same_call_gives_the_same_bits(p: Problem) -> None:
    assert same(run(p), run(p))


@given(
    st.integers(0, 70000),
    st.integers(1, 300000),
    DTYPES,
    st.one_of(st.sampled_from(["auto", "stash", "recompute"]), st.integers(0, 2**36)),
    st.one_of(st.none(), st.integers(1, 300000)),
)
@example(0, 1000, BF16, 0, None)
@example(4096, 131072, BF16, "auto", None)
@example(4097, 131072, BF16, "auto", None)
@example(16, 2048, FP32, 24 * 16 + 2048 * 64, None)
@example(16, 2560, FP32, 24 * 16 + 2560 * 64, None)
@example(16, 2560, FP32, 24 * 16 + 2560 * 64 - 1, None)
@settings(max_examples=400)
def test_stash_columns_equal_the_native_plan(
    tokens: int, rows: int, kind: torch.dtype, memory: str | int, vocab_size: int | None
) -> None:
    live = rows if vocab_size is None else min(rows, vocab_size)
    size = 2 if kind == BF16 else 4
    refusal = None
    try:
        columns = _memory.stash_columns(tokens, live, size, _memory.encode(memory))
    except ValueError as problem:
        refusal = str(problem)
    if refusal is not None:
        least = 24 * tokens + min(live, 2048) * _memory.token_pitch(tokens) * size
        assert str(least) in refusal
        with pytest.raises(ValueError, match=str(least)):
            logitless.workspace.plan(
                tokens, 64, rows, dtype=kind, memory=memory, vocab_size=vocab_size
            )
        return
    plan = logitless.workspace.plan(
        tokens, 64, rows, dtype=kind, memory=memory, vocab_size=vocab_size
    )
    assert plan.stash_columns == columns
    assert plan.token_pitch == _memory.token_pitch(tokens)
    assert plan.stash_bytes == columns * plan.token_pitch * size
    if isinstance(memory, int):
        assert plan.rows_bytes + plan.stash_bytes <= memory
    if memory == "auto":
        assert plan.stash_bytes <= 2**30


@given(st.floats(-3, 3), st.integers(0, 1000))
@settings(max_examples=15)
def test_gradients_are_linear_in_the_upstream(factor: float, seed: int) -> None:
    p = make_problem(30, 16, 300, dtype=FP32, seed=seed)
    assume(abs(factor) > 1e-3)
    plain, scaled = run(p), run(replace(p, g=p.g * factor))
    assert error(scaled.dx, plain.dx.double() * factor) <= 1e-6
    assert error(scaled.dw, plain.dw.double() * factor) <= 1e-6


def test_a_shift_of_all_logits_changes_nothing_but_lse() -> None:
    p = make_problem(30, 16, 300, dtype=FP32, spread=1.0)
    p.x[:, 0] = 1.0
    moved = replace(p, weight=p.weight.clone())
    moved.weight[:, 0] += 64.0
    a, b = run(p), run(moved)
    assert (a.nll - b.nll).abs().max() <= 5e-5
    assert (b.lse - a.lse - 64.0).abs().max() <= 5e-5
    check(moved)
