# SPDX-License-Identifier: Apache-2.0
"""Values and gradients against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
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
    exact_problem,
    make_problem,
    policies,
    run,
    same,
    truth,
)

import logitless

LOGITS = {
    "flat": {"spread": 0.1},
    "ordinary": {"spread": 1.0},
    "peaked": {"spread": 6.0},
    "very peaked": {"spread": 12.0},
    "all negative": {"spread": 1.0, "offset": -40.0},
    "offset": {"spread": 2.0, "offset": 1024.0},
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("upstream", ["g", "g h q"])
def test_all_memory_policies(kind: str, upstream: str, dtype: torch.dtype) -> None:
    p = make_problem(70, 64, 3200, dtype=dtype, upstream=upstream, ignored=0.1, **LOGITS[kind])
    plans = [logitless.workspace.plan(70, 64, 3200, dtype=dtype, memory=m) for m in policies(p)]
    assert [plan.stash_columns for plan in plans] == [3200, 3200, 0, TILE]
    for memory in policies(p):
        check(p, memory=memory)


def test_values_do_not_depend_on_the_memory_policy(dtype: torch.dtype) -> None:
    p = make_problem(70, 64, 3200, dtype=dtype, upstream="g h q", spread=3.0)
    results = [run(p, memory=memory) for memory in policies(p)]
    for result in results:
        for name in ("nll", "lse", "entropy"):
            assert torch.equal(getattr(result, name), getattr(results[0], name)), name


@pytest.mark.parametrize("seed", range(4))
def test_our_part_of_the_error_is_small(seed: int, dtype: torch.dtype) -> None:
    """Where the logits are exact in float32 what remains is ours alone."""
    p = exact_problem(64, 32, 2500, dtype, seed)
    result, wanted = run(p), truth(p)
    # The entropy is a difference of moments, about an anchor tens of orders below a peaked row.
    for name, share in (("nll", 2e-6), ("lse", 2e-6), ("entropy", 1e-5)):
        want = getattr(wanted, name)
        limit = share * want.abs().clamp(min=1.0)
        assert bool(((getattr(result, name).double() - want).abs() <= limit).all()), name
    check_gradients(result, wanted, p)


@pytest.mark.parametrize("constant", [1.0, 1 / 96])
def test_constant_upstream(constant: float, dtype: torch.dtype) -> None:
    p = make_problem(96, 128, 2048, dtype=dtype)
    p = replace(p, g=torch.full((96,), constant))
    for memory in ("stash", "recompute"):
        check(p, memory=memory)


@pytest.mark.parametrize("columns", [1, 8, 64, 128, 255])
@pytest.mark.parametrize("vocab", [0, TILE, 2 * TILE])
def test_c01_padded_tail_is_in_no_sum(vocab: int, columns: int, dtype: torch.dtype) -> None:
    vocab += columns
    p = Problem(
        torch.ones(5, 64, dtype=dtype),
        torch.full((vocab, 64), -20 / 64, dtype=dtype),
        torch.arange(5) % vocab,
    ).with_upstream("g h q")
    for memory in ("stash", "recompute"):
        result = run(p, memory=memory)
        for values in (result.nll, result.entropy):
            assert (values - math.log(vocab)).abs().max() <= 2e-6 * max(1.0, math.log(vocab))
        assert (result.nll >= 0).all()
        check_gradients(result, truth(p), p, only="dw" if vocab > 1 else "")


def test_c01_a_vocabulary_of_129920(dtype: torch.dtype) -> None:
    vocab = 129920
    p = Problem(
        torch.ones(6, 16, dtype=dtype),
        torch.full((vocab, 16), -20 / 16, dtype=dtype),
        torch.tensor([0, 1, 511, 512, vocab - 2, vocab - 1]),
    ).with_upstream("g")
    for memory in ("stash", "recompute"):
        result = run(p, memory=memory)
        assert (result.nll - 11.774674).abs().max() <= 2e-5
        assert (result.entropy - math.log(vocab)).abs().max() <= 2e-5
        check_gradients(result, truth(p), p, only="dw")


def test_c01_peaked_logits_of_129920(dtype: torch.dtype) -> None:
    check(make_problem(40, 64, 129920, dtype=dtype, spread=6.0, upstream="g h"))


def test_c02_targets_at_the_edges_of_tiles(dtype: torch.dtype) -> None:
    vocab = 2 * TILE + 8
    edges = [0, 1, 63, 64, TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, vocab - 2, vocab - 1]
    p = make_problem(len(edges), 64, vocab, dtype=dtype, spread=4.0)
    p = replace(p, target=torch.tensor(edges))
    for memory in policies(p):
        check(p, memory=memory)


def test_c03_upstream_not_uniform(dtype: torch.dtype) -> None:
    p = make_problem(300, 64, 1500, dtype=dtype, spread=3.0)
    g = torch.randn(300, generator=torch.Generator().manual_seed(3))
    g[0], g[7], g[150], g[299] = 0.0, 1e3, -1e3, 1e-4
    p.target[0] = p.target[40] = IGNORE
    p = replace(p, g=g)
    for memory in ("stash", "recompute"):
        result = check(p, memory=memory)
        assert result.dx is not None
        # Each row by itself: the large ones must not hide the others.
        want = truth(p).dx
        for row in (7, 150, 151, 298, 299):
            assert error(result.dx[row], want[row]) <= (6e-2 if dtype == BF16 else 1e-4), row
        assert not result.dx[0].any()


def test_c03_small_shape_with_a_weight_mask() -> None:
    p = make_problem(8, 10, 15, dtype=FP32)
    target = p.target.reshape(2, 4).clone()
    target[0, 0] = target[1, 2] = IGNORE
    mask = torch.tensor([[0.0, 2.0, -1.0, 0.5], [3.0, 0.0, 1.0, -0.25]])
    x, weight = p.x.reshape(2, 4, 10).requires_grad_(), p.weight.requires_grad_()
    loss = logitless.linear_cross_entropy(x, weight, target, reduction="none")
    assert isinstance(loss, torch.Tensor)
    (loss * mask).sum().backward()
    assert logitless.last_backend() == "cpu"
    flat = replace(p, target=target.reshape(-1), g=mask.reshape(-1))
    flat = replace(flat, x=p.x.detach(), weight=p.weight.detach())
    wanted = truth(flat)
    assert x.grad is not None
    assert weight.grad is not None
    assert error(x.grad.reshape(8, 10), wanted.dx) <= 1e-5
    assert error(weight.grad, wanted.dw) <= 1e-5


@pytest.mark.parametrize("upstream", ["g", "h", "q", "g h", "g q", "h q", "g h q"])
def test_c05_only_some_outputs_used(upstream: str, dtype: torch.dtype) -> None:
    p = make_problem(50, 64, 3000, dtype=dtype, spread=3.0, upstream=upstream, ignored=0.2)
    results = [check(p, memory=m) for m in ("stash", "recompute", budget(p, TILE))]
    # A gradient of zeros for the others is the same thing.
    zero = torch.zeros(50)
    filled = replace(p, **{n: zero for n in "ghq" if getattr(p, n) is None})
    check(filled, memory="stash")
    assert all(torch.equal(r.nll, results[0].nll) for r in results)


def test_c05_opposite_gradients_of_nll_and_lse(dtype: torch.dtype) -> None:
    """g + q = 0: only the target's entry remains, dX = g·(−w_y)."""
    p = make_problem(50, 64, 1500, dtype=dtype, spread=2.0, upstream="g")
    assert p.g is not None
    p = replace(p, q=-p.g)
    for memory in ("stash", "recompute"):
        result, wanted = run(p, memory=memory), truth(p)
        assert result.dx is not None
        assert result.dw is not None
        limit = 3e-3 if dtype == BF16 else 1e-5
        assert error(result.dx, wanted.dx) <= limit
        assert error(result.dw, wanted.dw) <= limit


@pytest.mark.parametrize("tokens", [4096, 5 * 4096])
@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c06_weight_gradient_is_added_up_in_float32(tokens: int, memory: str) -> None:
    """256 and ones: a running sum in bfloat16 would stick at 256."""
    vocab, step = 4096, tokens // 64
    x = torch.zeros(tokens, 16, dtype=BF16)
    x[::step, 3] = 1.0
    x[0, 3] = 256.0
    p = Problem(
        x,
        torch.zeros(vocab, 16, dtype=BF16),
        torch.full((tokens,), 7),
        g=torch.ones(tokens),
    )
    exact = -(256 + 63) * (1 - 1 / vocab)
    result = run(p, memory=memory)
    assert result.dw is not None
    # Recomputed logit gradients are rounded themselves: −319·(1 ± 2^-9) may go either way.
    allowed = {-318.0} if memory == "stash" else {-318.0, -320.0}
    assert float(result.dw[7, 3]) in allowed
    assert (result.dw[8:, 3] - 319 / vocab).abs().max() <= 319 / vocab / 256
    main_grad = torch.zeros(vocab, 16)
    weight = p.weight.clone().requires_grad_()
    loss = logitless.linear_cross_entropy(
        x, weight, p.target, memory=memory, main_grad=main_grad, reduction="sum"
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert logitless.last_backend() == "cpu"
    assert float(main_grad[7, 3]) == pytest.approx(exact, rel=2e-6 if memory == "stash" else 2**-9)


@pytest.mark.parametrize("memory", ["stash", "recompute", "bytes"])
def test_c06_input_gradient_is_added_up_in_float32(memory: str, dtype: torch.dtype) -> None:
    tiles = 64
    vocab = tiles * TILE
    weight = torch.zeros(vocab, 16, dtype=dtype)
    weight[::TILE, 5] = 1.0
    weight[0, 5] = 256.0
    p = Problem(
        torch.zeros(17, 16, dtype=dtype),
        weight,
        torch.full((17,), 9),
        g=torch.full((17,), float(vocab)),
    )
    result = run(p, memory=budget(p, 8 * TILE) if memory == "bytes" else memory)
    assert result.dx is not None
    # 319 lies half way between two bfloat16 numbers.
    want = {BF16: (318.0, 320.0), FP32: (319.0,)}[dtype]
    assert all(
        float(v) == pytest.approx(want[-1], abs=want[-1] - want[0] + 1e-3) for v in result.dx[:, 5]
    )
    assert not result.dx[:, :5].any()


def test_c06_error_does_not_grow_with_the_tokens() -> None:
    errors = []
    for tokens in (64, 640, 2560):
        p = make_problem(tokens, 64, 1024)
        result, wanted = run(p), truth(p)
        assert result.dw is not None
        errors.append(error(result.dw, wanted.dw))
    assert max(errors) <= 3e-3
    assert errors[-1] <= 1.2 * errors[0]


@pytest.mark.parametrize("constant", [1.0, 1 / 7])
@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c07_confident_rows_keep_their_gradient(
    constant: float, memory: str, dtype: torch.dtype
) -> None:
    vocab, hidden = 131072, 16
    chances = torch.tensor([0.5, 0.997, 0.998, 0.999, 0.9999, 1 - 1e-5, 1 - 1e-6]).double()
    tokens = len(chances)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(vocab, hidden, generator=generator)
    weight[:, 8 : 8 + tokens] = 0.0
    logits = (chances * (vocab - 1) / (1 - chances)).log()
    target = torch.randperm(vocab, generator=generator)[:tokens]
    x = torch.zeros(tokens, hidden)
    for row in range(tokens):
        x[row, 8 + row] = 1.0
        weight[target[row], 8 + row] = logits[row]
    p = Problem(x.to(dtype), weight.to(dtype), target, g=torch.full((tokens,), constant))
    result, wanted = run(p, memory=memory), truth(p)
    check_values(result, wanted, hidden)
    assert ((result.nll.double() / wanted.nll) - 1).abs().max() <= 1e-5
    check_gradients(result, wanted, p)
    assert result.dx is not None
    assert result.dw is not None
    for row in range(tokens):
        assert error(result.dx[row], wanted.dx[row]) <= 1e-2
        assert error(result.dw[target[row]], wanted.dw[target[row]]) <= 1e-2


@pytest.mark.parametrize("temperature", [0.1, 0.5, 0.7, 1.0, 1.5, 10.0])
def test_c26_temperature_in_values_and_gradients(temperature: float, dtype: torch.dtype) -> None:
    p = make_problem(60, 64, 1300, dtype=dtype, spread=2.0, upstream="g h q", ignored=0.1)
    p = replace(p, temperature=temperature)
    results = [check(p, memory=memory) for memory in ("stash", "recompute")]
    per_token = torch.full((60,), temperature)
    again = run(replace(p, temperature=per_token), memory="stash")
    assert same(again, results[0])
    single = run(replace(p, temperature=torch.tensor(temperature)), memory="stash")
    assert same(single, results[0])
    assert same(run(replace(p, temperature=torch.tensor([temperature])), memory="stash"), single)


def test_c26_temperature_per_token(dtype: torch.dtype) -> None:
    p = make_problem(60, 64, 3000, dtype=dtype, spread=2.0, upstream="g h q", ignored=0.1)
    p = replace(p, temperature=torch.linspace(0.2, 5.0, 60))
    for memory in ("stash", "recompute", budget(p, TILE)):
        check(p, memory=memory)
    strided = torch.zeros(60, 3)
    strided[:, 1] = torch.linspace(0.2, 5.0, 60)
    assert same(run(replace(p, temperature=strided[:, 1])), run(p))


def test_c26_small_temperature_of_large_logits(dtype: torch.dtype) -> None:
    p = make_problem(33, 64, 700, dtype=dtype, spread=15.0, upstream="g h q")
    result = run(replace(p, temperature=1e-3))
    wanted = truth(replace(p, temperature=1e-3))
    assert wanted.reach > 3e4
    for values in result:
        assert values is not None
        assert bool(values.isfinite().all())
    assert (result.nll.double() - wanted.nll).abs().max() <= 1e-5 * wanted.reach
    assert result.entropy.max() <= math.log(700)


@pytest.mark.parametrize("top", [7e4, 1e6])
def test_c27_logits_beyond_float16(top: float, dtype: torch.dtype) -> None:
    p = make_problem(9, 32, 900, dtype=dtype, upstream="g h q")
    p.x[:, 0] = 1000.0
    p.weight[:, 0] = 0.0
    p.weight[123, 0] = top / 1000.0
    p.target[:] = 123
    result = run(p)
    assert not result.nll.any()
    assert result.entropy.max() <= 1e-12
    assert all(v is not None and bool(v.isfinite().all()) for v in result)


@pytest.mark.parametrize(("base", "step"), [(3000.0, 0.5), (200.0, 0.25)])
def test_c27_small_differences_of_large_logits(
    base: float, step: float, dtype: torch.dtype
) -> None:
    """Logits base and base + step are told apart: x has a column for each part."""
    x = torch.zeros(4, 16)
    weight = torch.zeros(640, 16)
    x[:, 0], weight[:, 0] = 8.0, base / 8.0
    x[:, 1], weight[::2, 1] = 1.0, step
    p = Problem(x.to(dtype), weight.to(dtype), torch.tensor([0, 1, 638, 639])).with_upstream("g")
    wanted = truth(p)
    assert float(wanted.nll[1] - wanted.nll[0]) == pytest.approx(step)
    for memory in ("stash", "recompute"):
        result = run(p, memory=memory)
        assert (result.nll.double() - wanted.nll).abs().max() <= 2e-6 * float(wanted.nll.max())
        check_gradients(result, wanted, p, only="dw")


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c29_same_bits_on_every_run_and_number_of_threads(memory: str, dtype: torch.dtype) -> None:
    p = make_problem(300, 96, 3000, dtype=dtype, spread=4.0, upstream="g h q", ignored=0.1)
    if memory == "recompute":
        first = run(p, memory=budget(p, TILE))
        assert same(run(p, memory=budget(p, TILE)), first)
    first = run(p, memory=memory)
    for _ in range(5):
        assert same(run(p, memory=memory), first)
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        assert same(run(p, memory=memory), first), threads


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 200, 513])
def test_c29_a_row_does_not_depend_on_the_others(tokens: int, dtype: torch.dtype) -> None:
    whole = make_problem(520, 80, 1111, dtype=dtype, spread=5.0, upstream="")
    every = run(whole)
    for start in {0, 1, 7, 520 - tokens}:
        if start + tokens > 520:
            continue
        part = slice(start, start + tokens)
        some = run(replace(whole, x=whole.x[part], target=whole.target[part]))
        for name in ("nll", "lse", "entropy"):
            assert torch.equal(getattr(some, name), getattr(every, name)[part]), (name, start)


def test_c29_single_rows_equal_their_batch(dtype: torch.dtype) -> None:
    whole = make_problem(70, 64, 700, dtype=dtype, spread=9.0, upstream="g")
    every = run(whole)
    for row in range(0, 70, 3):
        part = slice(row, row + 1)
        alone = run(replace(whole, x=whole.x[part], target=whole.target[part], g=whole.g[part]))
        for name in ("nll", "lse", "entropy"):
            assert torch.equal(getattr(alone, name), getattr(every, name)[part]), (name, row)


def test_rows_that_need_another_anchor(dtype: torch.dtype) -> None:
    """The top logit lies far above, or all far below, the first 128 columns'."""
    p = make_problem(48, 64, 2000, dtype=dtype, spread=1.0, upstream="g h q")
    p.x[:, 0] = 8.0
    p.weight[:, 0] = 0.0
    p.weight[1500:, 0] = 50.0  # +400
    p.x[24:, 0] = -8.0  # the other rows have them at −400
    p.target[::2] = 1700
    for memory in ("stash", "recompute", budget(p, TILE)):
        check(p, memory=memory)
    moved = replace(p, weight=p.weight.flip(0), target=1999 - p.target)
    for memory in ("stash", "recompute"):
        check(moved, memory=memory)


def test_rows_far_above_and_far_below_their_anchor(dtype: torch.dtype) -> None:
    for level in (-300.0, 300.0):
        p = make_problem(20, 64, 1000, dtype=dtype, upstream="g h q")
        p.x[:, 0], p.weight[:, 0] = 4.0, 0.0
        p.weight[128:, 0] = level / 4.0
        p.target[:10] = torch.arange(10)
        check(p, memory="stash")
        check(p, memory="recompute")


@pytest.mark.parametrize("hidden", [4096, 5120])
def test_large_hidden_sizes(hidden: int, dtype: torch.dtype) -> None:
    check(make_problem(48, hidden, 700, dtype=dtype, spread=3.0, upstream="g h"))
