# SPDX-License-Identifier: Apache-2.0
"""Sizes, strides, alignments, and the shapes of what is returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from truth import (
    BF16,
    FP32,
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


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 129])
@pytest.mark.parametrize("vocab", [1, 2, 7, TILE - 1, TILE, TILE + 1])
def test_small_and_ragged(tokens: int, vocab: int, dtype: torch.dtype) -> None:
    p = make_problem(tokens, 24, vocab, dtype=dtype, upstream="g h q")
    for memory in ("stash", "recompute"):
        if vocab == 1:  # a certain outcome: nothing but rounding is left of the gradient of g
            result = run(p, memory=memory)
            assert not result.nll.any()
            assert result.entropy.max() <= 1e-5
        else:
            check(p, memory=memory)


@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 8, 9, 31, 33, 72, 100, 257, 2052, 2056])
def test_c15_any_hidden_size(hidden: int, dtype: torch.dtype) -> None:
    p = make_problem(37, hidden, 600, dtype=dtype, upstream="g h q")
    for memory in ("stash", "recompute"):
        check(p, memory=memory)


@pytest.mark.parametrize("vocab", [TILE - 8, TILE + 8, 2 * TILE + 65, 2048, 2049, 5003])
def test_ragged_vocabulary_in_slices(vocab: int, dtype: torch.dtype) -> None:
    p = make_problem(45, 40, vocab, dtype=dtype, spread=3.0, upstream="g h q", ignored=0.2)
    p.target[0], p.target[1] = vocab - 1, 0
    for memory in ("stash", "recompute", budget(p, TILE)):
        check(p, memory=memory)


def _odd_offset(t: Tensor) -> Tensor:
    big = torch.full((t.shape[0], t.shape[1] + 8), torch.nan, dtype=t.dtype)
    big[:, 1 : t.shape[1] + 1] = t
    return big[:, 1 : t.shape[1] + 1]


def _wide_rows(t: Tensor) -> Tensor:
    big = torch.full((t.shape[0], 3 * t.shape[1]), torch.nan, dtype=t.dtype)
    big[:, : t.shape[1]] = t
    return big[:, : t.shape[1]]


def _odd_row(t: Tensor) -> Tensor:
    big = torch.full((t.shape[0] + 3, t.shape[1]), torch.nan, dtype=t.dtype)
    big[1 : t.shape[0] + 1] = t
    return big[1 : t.shape[0] + 1]


def _column_major(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def _every_other_row(t: Tensor) -> Tensor:
    big = torch.full((2 * t.shape[0], t.shape[1]), torch.nan, dtype=t.dtype)
    big[::2] = t
    return big[::2]


def _every_other_column(t: Tensor) -> Tensor:
    big = torch.full((t.shape[0], 2 * t.shape[1]), torch.nan, dtype=t.dtype)
    big[:, ::2] = t
    return big[:, ::2]


def _odd_pitch(t: Tensor) -> Tensor:
    big = torch.full((t.shape[0] * (t.shape[1] + 1) + 1,), torch.nan, dtype=t.dtype)
    view = big.as_strided(t.shape, (t.shape[1] + 1, 1), 1)
    view.copy_(t)
    return view


VIEWS = [
    _odd_offset,
    _wide_rows,
    _odd_row,
    _column_major,
    _every_other_row,
    _every_other_column,
    _odd_pitch,
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("hidden", [72, 64, 33])
def test_c15_views_equal_contiguous(
    view: Callable[[Tensor], Tensor], hidden: int, dtype: torch.dtype
) -> None:
    p = make_problem(50, hidden, 900, dtype=dtype, upstream="g h q", spread=2.0)
    for memory in ("stash", "recompute"):
        plain = run(p, memory=memory)
        assert same(run(replace(p, x=view(p.x)), memory=memory), plain)
        for x in (p.x, view(p.x)):
            result = run(replace(p, x=x, weight=view(p.weight)), memory=memory)
            if view is _column_major:  # another product in float32: a few last bits may differ
                assert result.dx is not None
                assert error(result.dx, plain.dx.double()) <= 3e-6
                result = result._replace(dx=plain.dx)
            assert same(result, plain)


def test_c15_sequence_first_hidden_states(dtype: torch.dtype) -> None:
    p = make_problem(42, 24, 300, dtype=dtype)
    plain = run(p)
    batched = p.x.reshape(6, 7, 24).transpose(0, 1).contiguous()  # [S, B, H] in memory
    viewed = replace(
        p, x=batched.transpose(0, 1), target=p.target.reshape(6, 7), g=p.g.reshape(6, 7)
    )
    result = run(viewed)
    assert result.dx is not None
    assert result.dx.shape == (6, 7, 24)
    assert torch.equal(result.nll.reshape(-1), plain.nll)
    assert torch.equal(result.dx.reshape(42, 24), plain.dx)
    assert torch.equal(result.dw, plain.dw)


def test_c15_expanded_inputs(dtype: torch.dtype) -> None:
    p = make_problem(20, 16, 300, dtype=dtype)
    row = p.x[:1]
    wide = run(replace(p, x=row.expand(20, 16)))
    assert same(wide, run(replace(p, x=row.repeat(20, 1))))
    wide = run(replace(p, weight=p.weight[:1].expand(300, 16)))
    assert same(wide, run(replace(p, weight=p.weight[:1].repeat(300, 1))))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_c14_targets_of_any_stride(kind: torch.dtype, dtype: torch.dtype) -> None:
    p = make_problem(24, 16, 300, dtype=dtype)
    plain = run(p)
    labels = torch.full((24, 5), 299, dtype=kind)
    labels[:, 3] = p.target.to(kind)
    assert same(run(replace(p, target=labels[:, 3])), plain)
    shifted = torch.full((4, 7), -7, dtype=kind)
    shifted[:, 1:] = p.target.reshape(4, 6).to(kind)
    result = run(replace(p, x=p.x.reshape(4, 6, 16), target=shifted[:, 1:], g=p.g.reshape(4, 6)))
    assert result.nll.shape == (4, 6)
    assert torch.equal(result.nll.reshape(-1), plain.nll)
    assert torch.equal(result.dw, plain.dw)
    scalar = torch.tensor(11, dtype=kind)
    assert same(
        run(replace(p, target=scalar.expand(24))),
        run(replace(p, target=torch.full((24,), 11))),
    )


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 2, 3), (1, 12), (12, 1), ()])
def test_outputs_keep_the_shape_of_target(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    count = 12 if shape else 1
    p = make_problem(count, 16, 50, dtype=dtype, upstream="g h q")
    plain = run(p)
    upstream = {name: getattr(p, name).reshape(shape) for name in "ghq"}
    shaped = replace(p, x=p.x.reshape(*shape, 16), target=p.target.reshape(shape), **upstream)
    result = run(shaped)
    assert result.nll.shape == result.lse.shape == result.entropy.shape == shape
    assert result.dx is not None
    assert result.dx.shape == (*shape, 16)
    assert torch.equal(result.nll.reshape(-1), plain.nll)
    assert torch.equal(result.dx.reshape(count, 16), plain.dx)
    assert torch.equal(result.dw, plain.dw)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_return_entropy_and_lse_per_token(reduction: str, dtype: torch.dtype) -> None:
    p = make_problem(12, 16, 50, dtype=dtype, ignored=0.4)
    out = logitless.linear_cross_entropy(
        p.x.reshape(3, 4, 16),
        p.weight,
        p.target.reshape(3, 4),
        reduction=reduction,
        return_entropy=True,
        return_lse=True,
    )
    assert logitless.last_backend() == "cpu"
    assert isinstance(out, logitless.HeadLoss)
    assert out.entropy is not None and out.entropy.shape == (3, 4)
    assert out.lse is not None and out.lse.shape == (3, 4)
    assert out.loss.shape == ((3, 4) if reduction == "none" else ())
    wanted = truth(p)
    valid = int((p.target != IGNORE).sum())
    expected = {"none": wanted.nll.reshape(3, 4), "sum": wanted.nll.sum()}
    expected["mean"] = wanted.nll.sum() / valid
    assert (out.loss.double() - expected[reduction]).abs().max() <= 2e-4


def test_no_tokens_at_all(dtype: torch.dtype) -> None:
    p = Problem(
        torch.zeros(0, 16, dtype=dtype),
        torch.randn(700, 16).to(dtype),
        torch.zeros(0, dtype=torch.int64),
    ).with_upstream("g h q")
    for memory in ("auto", "stash", "recompute", 0):
        result = run(p, memory=memory)
        assert result.nll.shape == result.lse.shape == result.entropy.shape == (0,)
        assert result.dx is not None and result.dx.shape == (0, 16)
        assert result.dw is not None and result.dw.shape == (700, 16)
        assert not result.dw.any()
    for reduction in ("sum", "mean"):
        loss = logitless.linear_cross_entropy(p.x, p.weight, p.target, reduction=reduction)
        assert isinstance(loss, Tensor)
        assert float(loss) == 0.0


@pytest.mark.parametrize("vocab_size", [1, 511, 512, 513, 1000, 1099])
@pytest.mark.parametrize("upstream", ["g", "g h q"])
def test_padded_vocabulary_counts_for_nothing(
    vocab_size: int, upstream: str, dtype: torch.dtype
) -> None:
    """The rows beyond the true vocabulary are NaN: nothing may read a value from them."""
    p = make_problem(40, 32, 1100, dtype=dtype, upstream=upstream, spread=2.0)
    p.weight[vocab_size:] = torch.nan
    padded = replace(p, target=p.target % vocab_size, vocab_size=vocab_size)
    short = replace(padded, weight=p.weight[:vocab_size], vocab_size=None)
    for memory in ("stash", "recompute"):
        result, plain = run(padded, memory=memory), run(short, memory=memory)
        for name in ("nll", "lse", "entropy", "dx"):
            assert torch.equal(getattr(result, name), getattr(plain, name)), name
        assert result.dw is not None
        assert torch.equal(result.dw[:vocab_size], plain.dw)
        assert not result.dw[vocab_size:].any()
    p.weight[vocab_size:] = 0.0
    if vocab_size > 1:
        check(replace(padded, weight=p.weight))


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c16_offsets_beyond_2_to_31_elements(memory: str) -> None:
    """Few rows, far apart: untouched pages of the storage cost nothing."""
    p = make_problem(9, 32, 700, spread=2.0, upstream="g h q")
    plain = run(p, memory=memory)
    storage = torch.empty(2**31 + 2**20, dtype=BF16)
    far = storage.as_strided((9, 32), (2**28, 1), 5)
    assert far.storage_offset() + 8 * far.stride(0) > 2**31
    far.copy_(p.x)
    assert same(run(replace(p, x=far), memory=memory), plain)
    far = storage.as_strided((700, 32), (2**31 // 699, 1), 77)
    far.copy_(p.weight)
    assert same(run(replace(p, weight=far), memory=memory), plain)
    far = storage.as_strided((700, 32), (1, 2**31 // 31), 3)
    far.copy_(p.weight)
    assert same(run(replace(p, weight=far), memory=memory), plain)


def test_c16_more_than_2_to_31_logits() -> None:
    """M·V = 2^31 + 2^17·128; the rows in between are ignored in groups, not left out."""
    tokens, vocab, hidden = 16512, 131072, 8
    generator = torch.Generator().manual_seed(2)
    x = torch.zeros(tokens, hidden, dtype=BF16)
    seen = torch.cat(
        (torch.arange(16), torch.arange(8192, 8208), torch.arange(tokens - 16, tokens))
    )
    x[seen] = torch.randn(48, hidden, generator=generator).to(BF16)
    weight = torch.randn(vocab, hidden, generator=generator).to(BF16)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target[-1] = vocab - 1
    p = Problem(x, weight, target).with_upstream("g")
    result = run(p, memory="recompute", want_w=True)
    # Rows of zeros add nothing to dW, so the others are the whole truth of it.
    part = replace(p, x=x[seen], target=target[seen], g=p.g[seen])
    wanted = truth(part)
    assert result.dx is not None
    assert result.dw is not None
    shown = type(result)(
        result.nll[seen], result.lse[seen], result.entropy[seen], result.dx[seen], result.dw
    )
    check_values(shown, wanted, hidden)
    check_gradients(shown, wanted, part)
    assert error(result.dw[-512:], wanted.dw[-512:]) <= 5e-3
    rest = torch.ones(tokens, dtype=torch.bool)
    rest[seen] = False
    assert (result.nll[rest] - torch.tensor(float(vocab)).log()).abs().max() <= 3e-5


def test_hidden_of_one_element_per_row() -> None:
    p = make_problem(20, 1, 40, dtype=FP32, upstream="g h")
    check(p)
