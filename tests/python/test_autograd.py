# SPDX-License-Identifier: Apache-2.0
"""What autograd does with the operation: who needs gradients, how often, in which order."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from truth import (
    BF16,
    FP32,
    IGNORE,
    TILE,
    Problem,
    budget,
    check,
    check_gradients,
    error,
    make_problem,
    run,
    same,
    truth,
)

import logitless


def leaves(p: Problem) -> tuple[Tensor, Tensor]:
    return p.x.detach().clone().requires_grad_(), p.weight.detach().clone().requires_grad_()


def loss_of(x: Tensor, weight: Tensor, target: Tensor, **options: object) -> Tensor:
    loss = logitless.linear_cross_entropy(x, weight, target, **options)  # type: ignore[arg-type]
    assert isinstance(loss, Tensor)
    assert logitless.last_backend() == "cpu"
    return loss


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c04_upstream_of_any_stride(memory: str, dtype: torch.dtype) -> None:
    p = make_problem(64, 32, 900, dtype=dtype)
    x, weight = leaves(p)
    loss = loss_of(x, weight, p.target, memory=memory)

    def grads(value: Tensor, upstream: Tensor | None = None) -> list[Tensor]:
        return list(torch.autograd.grad(value, (x, weight), upstream, retain_graph=True))

    def equal(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))

    assert equal(grads(loss.sum()), grads(loss, torch.ones(64)))
    half = torch.zeros(64)
    half[::2] = 1.0
    assert equal(grads(loss[::2].sum()), grads(loss, half))
    one = torch.tensor([0.37])
    assert equal(grads(loss, one.expand(64)), grads(loss, torch.full((64,), 0.37)))
    big = torch.randn(64, 7, generator=torch.Generator().manual_seed(4))
    column = big[:, 3]
    assert column.stride() == (7,)
    assert equal(grads(loss, column), grads(loss, column.contiguous()))
    assert equal(grads(loss, column.flip(0)), grads(loss, column.flip(0).contiguous()))
    # A float64 gradient arrives where the caller's loss is in float64.
    coarse = column.to(BF16)
    assert equal(grads((loss.double() * coarse.double()).sum()), grads(loss, coarse.float()))
    assert equal(grads((loss.to(torch.float64) * coarse).sum()), grads(loss, coarse.float()))


def test_c04_strided_upstream_of_entropy_and_lse(dtype: torch.dtype) -> None:
    p = make_problem(64, 32, 900, dtype=dtype)
    wide = torch.randn(3, 64, 5, generator=torch.Generator().manual_seed(4))
    strided = replace(p, g=wide[0, :, 1], h=wide[1, :, 2], q=wide[2, :, 4])
    dense = replace(p, g=wide[0, :, 1].clone(), h=wide[1, :, 2].clone(), q=wide[2, :, 4].clone())
    assert same(run(strided), run(dense))
    check(strided)


def test_c05_metrics_cost_no_gradient(dtype: torch.dtype) -> None:
    """A detached entropy changes nothing of the gradient, and stays as it was."""
    p = make_problem(50, 32, 900, dtype=dtype)
    assert p.g is not None
    x, weight = leaves(p)
    out = logitless.linear_cross_entropy(x, weight, p.target, return_entropy=True)
    assert isinstance(out, logitless.HeadLoss)
    assert out.lse is None
    assert out.entropy is not None
    metric = out.entropy.detach()
    before = metric.clone()
    (out.loss * p.g).sum().backward()
    plain = run(p)
    assert x.grad is not None
    assert torch.equal(x.grad, plain.dx)
    assert torch.equal(weight.grad, plain.dw)
    assert torch.equal(metric, before)
    bare = loss_of(*leaves(p), p.target)
    assert torch.equal(bare.detach(), plain.nll)


@pytest.mark.parametrize("memory", ["stash", "recompute", "bytes"])
def test_c19_backward_twice(memory: str, dtype: torch.dtype) -> None:
    p = make_problem(60, 32, 3000, dtype=dtype, upstream="g")
    options = {"memory": budget(p, TILE) if memory == "bytes" else memory}
    x, weight = leaves(p)
    target = p.target.clone()
    out = logitless.linear_cross_entropy(
        x, weight, target, return_entropy=True, return_lse=True, **options
    )
    values = (out.loss, out.entropy, out.lse)
    kept = [t.detach().clone() for t in (x, weight, target, *values)]
    first, second = p, p.with_upstream("g h q", seed=99)
    results = []
    for problem in (first, second, first):
        used = [(v, u) for v, u in zip(values, problem.upstream, strict=True) if u is not None]
        outputs, upstream = zip(*used, strict=True)
        grads = torch.autograd.grad(outputs, (x, weight), upstream, retain_graph=True)
        results.append((grads, [g.clone() for g in grads]))
    for (grads, copies), problem in zip(results, (first, second, first), strict=True):
        assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))
        wanted = truth(problem)
        shown = run(problem, **options)._replace(dx=grads[0], dw=grads[1])
        check_gradients(shown, wanted, problem)
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[2][0], strict=True))
    for tensor, copy in zip((x, weight, target, *values), kept, strict=True):
        assert torch.equal(tensor.detach(), copy)


def test_c19_backward_twice_without_retain_graph_is_autograds_error() -> None:
    p = make_problem()
    loss = loss_of(*leaves(p), p.target, reduction="sum")
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("which", ["x", "weight", "target"])
@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c19_change_in_place_is_an_error(which: str, memory: str) -> None:
    p = make_problem()
    x, weight = leaves(p)
    target = p.target.clone()
    hidden = x * 1.0
    loss = loss_of(hidden, weight, target, memory=memory, reduction="sum")
    with torch.no_grad():
        {"x": hidden, "weight": weight, "target": target}[which].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c19_double_backward_is_refused(memory: str, dtype: torch.dtype) -> None:
    p = make_problem(20, 16, 100, dtype=dtype)
    x, weight = leaves(p)
    loss = loss_of(x, weight, p.target, memory=memory, reduction="sum")
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="expected one differentiation, got a second one"):
        dx.float().square().sum().backward()


def test_c19_double_backward_with_main_grad_is_refused(dtype: torch.dtype) -> None:
    p = make_problem(20, 16, 100, dtype=dtype)
    x, weight = leaves(p)
    main_grad = torch.zeros(100, 16)
    loss = loss_of(x, weight, p.target, main_grad=main_grad, reduction="sum")
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="one differentiation|no autograd formula"):
        dx.float().square().sum().backward()


@pytest.mark.parametrize("want_x", [True, False])
@pytest.mark.parametrize("want_w", [True, False])
@pytest.mark.parametrize("upstream", ["g", "g h q"])
def test_c20_who_needs_gradients(
    want_x: bool, want_w: bool, upstream: str, dtype: torch.dtype
) -> None:
    p = make_problem(50, 32, 3000, dtype=dtype, spread=2.0, upstream=upstream)
    for memory in ("stash", "recompute", budget(p, TILE)):
        every = run(p, memory=memory)
        some = run(p, want_x=want_x, want_w=want_w, memory=memory)
        for name in ("nll", "lse", "entropy"):
            assert torch.equal(getattr(some, name), getattr(every, name)), name
        assert (some.dx is None) == (not want_x)
        assert (some.dw is None) == (not want_w)
        if some.dx is not None:
            assert torch.equal(some.dx, every.dx)
        if some.dw is not None:
            assert torch.equal(some.dw, every.dw)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_c20_without_autograd(mode: type, dtype: torch.dtype) -> None:
    p = make_problem(50, 32, 900, dtype=dtype)
    plain = run(p)
    x, weight = leaves(p)
    with mode():
        out = logitless.linear_cross_entropy(
            x, weight, p.target, return_entropy=True, return_lse=True
        )
    assert logitless.last_backend() == "cpu"
    assert isinstance(out, logitless.HeadLoss)
    assert not out.loss.requires_grad
    assert torch.equal(out.loss, plain.nll)
    assert torch.equal(out.entropy, plain.entropy)
    assert torch.equal(out.lse, plain.lse)


def test_c20_tensors_made_in_inference_mode(dtype: torch.dtype) -> None:
    p = make_problem(50, 32, 900, dtype=dtype)
    with torch.inference_mode():
        x, weight = p.x * 1, p.weight * 1
        loss = loss_of(x, weight, p.target)
    assert torch.equal(loss, run(p).nll)


def test_c20_non_contiguous_input_that_needs_a_gradient(dtype: torch.dtype) -> None:
    p = make_problem(48, 32, 600, dtype=dtype)
    plain = run(p)
    storage = torch.zeros(48, 64, dtype=dtype)
    storage[:, ::2] = p.x
    storage.requires_grad_()
    by_column = p.weight.t().contiguous().requires_grad_()
    loss = loss_of(storage[:, ::2], by_column.t(), p.target)
    loss.backward(p.g)
    assert storage.grad is not None
    assert by_column.grad is not None
    # Another layout of the weight is another product in float32: a few last bits may differ.
    assert error(storage.grad[:, ::2], plain.dx.double()) <= 1e-6
    assert not storage.grad[:, 1::2].any()
    assert torch.equal(loss.detach(), plain.nll)
    assert torch.equal(by_column.grad, plain.dw.t())


@pytest.mark.parametrize("order", ["first in first out", "last in first out"])
@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_c21_two_calls_in_flight(order: str, memory: str, dtype: torch.dtype) -> None:
    problems = [
        make_problem(40, 32, 900, dtype=dtype, seed=1),
        make_problem(130, 48, 1700, dtype=dtype, seed=2),
    ]
    alone = [run(p, memory=memory) for p in problems]
    calls = []
    for p in problems:
        x, weight = leaves(p)
        calls.append((x, weight, loss_of(x, weight, p.target, memory=memory)))
    with torch.no_grad():  # a reference policy between forward and backward
        loss_of(problems[1].x * 3, problems[1].weight, problems[1].target)
    picked = [0, 1] if order.startswith("first") else [1, 0]
    for i in picked:
        x, weight, loss = calls[i]
        loss.backward(problems[i].g)
        assert torch.equal(x.grad, alone[i].dx)
        assert torch.equal(weight.grad, alone[i].dw)
        assert torch.equal(loss.detach(), alone[i].nll)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_c21_checkpoint_equals_plain(use_reentrant: bool, dtype: torch.dtype) -> None:
    p = make_problem(40, 32, 900, dtype=dtype)

    def head(x: Tensor, weight: Tensor) -> Tensor:
        return loss_of(torch.tanh(x), weight, p.target)

    x, weight = leaves(p)
    head(x, weight).backward(p.g)
    again = leaves(p)
    checkpoint(head, *again, use_reentrant=use_reentrant).backward(p.g)
    assert torch.equal(again[0].grad, x.grad)
    assert torch.equal(again[1].grad, weight.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_inside_autocast(use_reentrant: bool) -> None:
    p = make_problem(40, 32, 900, dtype=FP32)

    def head(x: Tensor, weight: Tensor) -> Tensor:
        return loss_of(torch.tanh(x), weight, p.target)

    results = []
    for wrapped in (False, True):
        x, weight = leaves(p)
        with torch.autocast("cpu", dtype=BF16):
            if wrapped:
                loss = checkpoint(head, x, weight, use_reentrant=use_reentrant)
            else:
                loss = head(x, weight)
        loss.backward(p.g)
        results.append((loss.detach(), x.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert torch.equal(a, b)
        assert a.dtype == FP32


def test_c22_inputs_may_go_right_after_the_call(dtype: torch.dtype) -> None:
    """Autograd owns what backward needs: names and memory may be reused at once."""
    p = make_problem(200, 64, 900, dtype=dtype)
    plain = run(p)
    x, weight = leaves(p)
    hidden = x * 1.0
    target = p.target.clone()
    loss = loss_of(hidden, weight, target)
    del hidden, target
    gc.collect()
    noise = [torch.full((200, 64), torch.nan, dtype=dtype) for _ in range(20)]
    loss.backward(p.g)
    assert torch.equal(x.grad, plain.dx)
    assert len(noise) == 20


def test_c22_calls_from_several_threads(dtype: torch.dtype) -> None:
    problems = [make_problem(60 + 9 * i, 32, 700 + 99 * i, dtype=dtype, seed=i) for i in range(4)]
    alone = [run(p) for p in problems]
    wrong: list[str] = []

    def work(i: int) -> None:
        try:
            p = problems[i]
            for _ in range(5):
                x, weight = leaves(p)
                loss = loss_of(x, weight, p.target)
                loss.backward(p.g)
                if not torch.equal(x.grad, alone[i].dx) or not torch.equal(
                    weight.grad, alone[i].dw
                ):
                    wrong.append(f"{i}: other bits")
        except Exception as problem:
            wrong.append(f"{i}: {problem}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_replacing_the_weights_storage_between_forward_and_backward(dtype: torch.dtype) -> None:
    """A sharded optimizer frees the weight after forward and gathers it again for backward."""
    p = make_problem(40, 32, 900, dtype=dtype)
    plain = run(p)
    for memory in ("stash", "recompute"):
        x, weight = leaves(p)
        loss = loss_of(x, weight, p.target, memory=memory)
        size = weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)
        noise = [torch.full((900, 32), torch.nan, dtype=dtype) for _ in range(4)]
        weight.untyped_storage().resize_(size)
        with torch.no_grad():
            weight.untyped_storage().copy_(p.weight.untyped_storage())
        loss.backward(p.g)
        assert len(noise) == 4
        wanted = truth(p)
        limit = 3e-3 if dtype == BF16 else 2e-5
        assert error(x.grad, wanted.dx) <= limit
        assert torch.equal(loss.detach(), plain.nll)


@pytest.mark.parametrize("kind", [torch.float32, None], ids=["fp32", "like weight"])
@pytest.mark.parametrize("memory", ["stash", "recompute", "bytes"])
def test_main_grad_is_added_to(kind: torch.dtype | None, memory: str, dtype: torch.dtype) -> None:
    p = make_problem(60, 32, 3000, dtype=dtype, ignored=0.2)
    assert p.g is not None
    options = {"memory": budget(p, TILE) if memory == "bytes" else memory}
    wanted = truth(p)
    kind = kind or dtype
    x, weight = leaves(p)
    main_grad = torch.zeros(3000, 32, dtype=kind)
    limit = 1e-5 if (kind, dtype) == (FP32, FP32) else 4e-3
    for times in (1, 2, 3):
        x.grad = None
        loss = loss_of(x, weight, p.target, main_grad=main_grad, **options)
        loss.backward(p.g)
        assert weight.grad is None
        assert x.grad is not None
        assert error(x.grad, wanted.dx) <= (3e-3 if dtype == BF16 else 1e-5)
        assert error(main_grad, times * wanted.dw) <= limit * (1.0 if kind == FP32 else times)
    begun = torch.randn(3000, 32, generator=torch.Generator().manual_seed(8)).to(kind)
    sum_of = begun.clone()
    loss_of(*leaves(p), p.target, main_grad=sum_of, **options).backward(p.g)
    assert error(sum_of, begun.double() + wanted.dw) <= limit


def test_main_grad_in_float32_is_not_rounded(dtype: torch.dtype) -> None:
    """What autograd would have rounded to the weight's dtype equals main_grad rounded to it."""
    p = make_problem(60, 32, 900, dtype=dtype)
    plain = run(p)
    main_grad = torch.zeros(900, 32)
    loss_of(*leaves(p), p.target, main_grad=main_grad).backward(p.g)
    assert torch.equal(main_grad.to(dtype), plain.dw)


def test_main_grad_of_a_frozen_weight_stays(dtype: torch.dtype) -> None:
    p = make_problem(60, 32, 900, dtype=dtype)
    x, _ = leaves(p)
    main_grad = torch.full((900, 32), 3.0)
    loss_of(x, p.weight, p.target, main_grad=main_grad).backward(p.g)
    assert x.grad is not None
    assert torch.equal(main_grad, torch.full((900, 32), 3.0))


def test_main_grad_of_a_frozen_input(dtype: torch.dtype) -> None:
    p = make_problem(60, 32, 900, dtype=dtype)
    _, weight = leaves(p)
    main_grad = torch.zeros(900, 32)
    loss_of(p.x, weight, p.target, main_grad=main_grad).backward(p.g)
    assert error(main_grad, truth(p).dw) <= 3e-3
    assert weight.grad is None


def test_an_attribute_main_grad_is_not_looked_at(dtype: torch.dtype) -> None:
    """The explicit argument decides, not what a framework left on the parameter."""
    p = make_problem(30, 16, 200, dtype=dtype)
    x, weight = leaves(p)
    weight.main_grad = torch.zeros(200, 16)  # type: ignore[attr-defined]
    loss_of(x, weight, p.target).backward(p.g)
    assert weight.grad is not None
    assert not weight.main_grad.any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("factor", [1.0, 1024.0, -0.125])
def test_any_grad_output(factor: float, dtype: torch.dtype) -> None:
    """Scaling by a power of two is exact, whatever the loss is multiplied with."""
    p = make_problem(40, 32, 900, dtype=dtype)
    x, weight = leaves(p)
    (loss_of(x, weight, p.target, reduction="mean") * factor).backward()
    plain = leaves(p)
    loss_of(*plain, p.target, reduction="mean").backward()
    assert torch.equal(x.grad, plain[0].grad * factor)
    assert torch.equal(weight.grad, plain[1].grad * factor)


def test_mean_is_over_the_rows_that_count(dtype: torch.dtype) -> None:
    p = make_problem(60, 32, 900, dtype=dtype, ignored=0.5)
    valid = int((p.target != IGNORE).sum())
    assert 0 < valid < 60
    x, weight = leaves(p)
    loss = loss_of(x, weight, p.target, reduction="mean")
    loss.backward()
    uniform = replace(p, g=torch.full((60,), 1.0 / valid))
    wanted = truth(uniform)
    assert float(loss.detach()) == pytest.approx(float(wanted.nll.sum()) / valid, rel=1e-5)
    result = run(uniform)._replace(dx=x.grad, dw=weight.grad)
    check_gradients(result, wanted, uniform)


def test_a_training_step_through_the_module(dtype: torch.dtype) -> None:
    """Tied weights: the embedding's and the head's gradients are added by autograd."""
    torch.manual_seed(3)
    table = torch.nn.Parameter(torch.randn(300, 24).to(dtype))
    linear = torch.nn.Linear(24, 300, bias=False, dtype=dtype)
    linear.weight = table
    head = logitless.LinearCrossEntropy.from_linear(linear, reduction="sum")
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    hidden = torch.nn.functional.embedding(ids[:, :-1], table)
    loss = head(hidden, ids[:, 1:])
    assert logitless.last_backend() == "cpu"
    loss.backward()
    wide = table.detach().double().requires_grad_()
    logits = torch.nn.functional.embedding(ids[:, :-1], wide) @ wide.T
    torch.nn.functional.cross_entropy(
        logits.reshape(-1, 300), ids[:, 1:].reshape(-1), reduction="sum"
    ).backward()
    assert table.grad is not None
    assert error(table.grad, wide.grad) <= (5e-3 if dtype == BF16 else 1e-5)
    losses = []
    for _ in range(3):
        with torch.no_grad():
            table -= 0.002 * table.grad
        table.grad = None
        loss = head(torch.nn.functional.embedding(ids[:, :-1], table), ids[:, 1:])
        loss.backward()
        losses.append(float(loss.detach()))
    assert all(b < a for a, b in pairwise(losses))
