# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` without a graph break, and what `torch.library` checks of an operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from truth import BF16, FP32, Problem, make_problem, run

import logitless


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(
    x: Tensor, weight: Tensor, target: Tensor, g: Tensor, h: Tensor, memory: str | int = "auto"
) -> Tensor:
    out = logitless.linear_cross_entropy(
        x * 2, weight, target, return_entropy=True, memory=memory, temperature=0.7
    )
    assert isinstance(out, logitless.HeadLoss)
    assert out.entropy is not None
    return (out.loss * g).sum() + (out.entropy * h).sum()


def gradients(function: object, p: Problem, *options: object) -> tuple[Tensor, ...]:
    x, weight = p.x.clone().requires_grad_(), p.weight.clone().requires_grad_()
    value = function(x, weight, p.target, p.g, p.h, *options)  # type: ignore[operator]
    value.backward()
    assert logitless.last_backend() == "cpu"
    assert x.grad is not None
    assert weight.grad is not None
    return value.detach(), x.grad, weight.grad


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    # The caller's own sums may be compiled into another order.
    torch.testing.assert_close(a[0], b[0], rtol=1e-4, atol=1e-3)
    for u, v in zip(a[1:], b[1:], strict=True):
        assert torch.equal(u, v)


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_fullgraph_equals_eager(memory: str, dtype: torch.dtype) -> None:
    p = make_problem(40, 32, 900, dtype=dtype, upstream="g h", ignored=0.25)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    equal(gradients(compiled, p, memory), gradients(step, p, memory))


@pytest.mark.parametrize("kind", [BF16, FP32], ids=["bf16", "fp32"])
def test_c11_inductor_with_ignored_targets(kind: torch.dtype) -> None:
    p = make_problem(256, 32, 4096, dtype=kind, upstream="g h", ignored=0.25)
    compiled = torch.compile(step, fullgraph=True)
    equal(gradients(compiled, p), gradients(step, p))


def test_dynamic_shapes_compile_once(dtype: torch.dtype) -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (40, 41, 96, 7):
        p = make_problem(tokens, 32, 900, dtype=dtype, upstream="g h")
        equal(gradients(compiled, p), gradients(step, p))
    counters = torch._dynamo.utils.counters["stats"]
    assert counters["unique_graphs"] <= 2, dict(counters)


def test_dynamic_shapes_with_a_bound_in_bytes() -> None:
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (40, 64, 96):
        p = make_problem(tokens, 16, 3000, upstream="g h")
        equal(gradients(compiled, p, 2**20), gradients(step, p, 2**20))


def test_compiled_without_gradients(dtype: torch.dtype) -> None:
    p = make_problem(40, 32, 900, dtype=dtype)
    plain = run(p)
    with torch.no_grad():
        compiled = torch.compile(
            logitless.linear_cross_entropy, fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(p.x, p.weight, p.target), plain.nll)


def test_compiled_main_grad(dtype: torch.dtype) -> None:
    p = make_problem(40, 32, 900, dtype=dtype)

    def accumulate(x: Tensor, weight: Tensor, target: Tensor, main_grad: Tensor) -> Tensor:
        loss = logitless.linear_cross_entropy(x, weight, target, main_grad=main_grad)
        assert isinstance(loss, Tensor)
        return loss

    results = []
    for function in (accumulate, torch.compile(accumulate, fullgraph=True, backend="aot_eager")):
        x, weight = p.x.clone().requires_grad_(), p.weight.clone().requires_grad_()
        main_grad = torch.ones(900, 32)
        for _ in range(2):
            function(x, weight, p.target, main_grad).backward(p.g)
        assert weight.grad is None
        results.append((x.grad, main_grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_compiled_module(dtype: torch.dtype) -> None:
    p = make_problem(40, 32, 300, dtype=dtype)
    head = logitless.LinearCrossEntropy(32, 300, dtype=dtype)
    x = p.x.clone().requires_grad_()
    plain = head(x, p.target)
    plain.backward()
    wanted = x.grad, head.weight.grad
    x.grad = head.weight.grad = None
    loss = torch.compile(head, fullgraph=True, backend="aot_eager")(x, p.target)
    loss.backward()
    assert torch.equal(loss, plain)
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(head.weight.grad, wanted[1])


def forward_arguments(p: Problem, columns: int, entropy: bool = True) -> tuple[object, ...]:
    options = (0.9, -100, -1, -1, False, False, entropy, True, columns, None, "cpu", "")
    return (p.x.requires_grad_(), p.weight.requires_grad_(), p.target, None, *options)


@pytest.mark.parametrize("columns", [0, 512, 900])
def test_opcheck_of_forward(columns: int, dtype: torch.dtype) -> None:
    p = make_problem(20, 16, 900, dtype=dtype, upstream="g h q")
    operator = torch.ops.logitless.forward.default
    torch.library.opcheck(operator, forward_arguments(p, columns))
    arguments = forward_arguments(p, columns)
    torch.library.opcheck(operator, (*arguments[:3], torch.full((20,), 0.5), *arguments[4:]))
    # Without the entropy its moments in `rows` are NaN, which compare as different.
    torch.library.opcheck(
        operator,
        forward_arguments(p, columns, entropy=False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("columns", [0, 900])
def test_opcheck_of_backward(columns: int, dtype: torch.dtype) -> None:
    p = make_problem(20, 16, 900, dtype=dtype, upstream="g h q")
    arguments = forward_arguments(p, columns)
    with torch.no_grad():
        *_, rows, stash = torch.ops.logitless.forward.default(*arguments)
    x, weight, target = p.x.detach(), p.weight.detach(), p.target
    shared = (p.g, p.h, None, x, weight, target, None, *arguments[4:10], rows, stash)
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.logitless.backward.default, (*shared, *wanted, "cpu", ""))
    main_grad = torch.zeros(900, 16)
    torch.library.opcheck(
        torch.ops.logitless.backward_accumulate.default,
        (*shared, True, main_grad, "cpu", ""),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled_autograd_of_a_checkpoint(dtype: torch.dtype) -> None:
    p = make_problem(30, 16, 300, dtype=dtype, upstream="g h")

    def wrapped(x: Tensor, weight: Tensor, target: Tensor, g: Tensor, h: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(step, x, weight, target, g, h, use_reentrant=False)

    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
    equal(gradients(compiled, p), gradients(step, p))
    assert replace(p).truth is None
