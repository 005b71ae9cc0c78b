# SPDX-License-Identifier: Apache-2.0
"""How the function may be called over ranks: views, frozen inputs, calls in flight, the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from exchanges import record
from head_cases import (
    Case,
    Step,
    call,
    check,
    check_on,
    error,
    gradients,
    leaves,
    make_case,
    run_step,
    same_bits,
    shards_of,
    truth_of,
)
from ranks import Ranks
from torch import Tensor

import logitless

DTYPES = [torch.bfloat16, torch.float32]

# --- views ----------------------------------------------------------------------------------------


def odd_offset(values: Tensor) -> Tensor:
    big = torch.full((values.shape[0], values.shape[1] + 8), torch.nan, dtype=values.dtype)
    view = big[:, 1 : values.shape[1] + 1]
    return view.copy_(values)


def transposed(values: Tensor) -> Tensor:
    return values.t().contiguous().t()


def every_third_row(values: Tensor) -> Tensor:
    big = torch.full((3 * values.shape[0], values.shape[1]), torch.nan, dtype=values.dtype)
    return big[1::3].copy_(values)


def every_other_column(values: Tensor) -> Tensor:
    big = torch.full((values.shape[0], 2 * values.shape[1]), torch.nan, dtype=values.dtype)
    return big[:, ::2].copy_(values)


VIEWS = {f.__name__: f for f in (odd_offset, transposed, every_third_row, every_other_column)}


def step_on_views(group: dist.ProcessGroup, case: Case, x_view: str, weight_view: str) -> Step:
    """Do a step on views of the leaves' values; the gradients have to reach the views."""
    x, weight = leaves(case, dist.get_rank(group))
    x = VIEWS[x_view](x.detach()).requires_grad_()
    weight = VIEWS[weight_view](weight.detach()).requires_grad_()
    out = call(case, group, x, weight)
    backend = logitless.last_backend()
    dx, dw = gradients(case, out, x, weight)
    parts = [None if p is None else p.detach() for p in (out.loss, out.entropy, out.lse)]
    return Step(*parts, dx, dw, backend, logitless.last_backend())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x_view", "weight_view"),
    [
        ("odd_offset", "every_third_row"),
        ("transposed", "transposed"),
        ("every_other_column", "every_other_column"),
        ("every_third_row", "odd_offset"),
    ],
)
def test_views(ranks: Ranks, x_view: str, weight_view: str, dtype: torch.dtype) -> None:
    case = make_case(30, 36, [65, 72], dtype=dtype)
    steps = ranks.run(2, step_on_views, case, x_view, weight_view)
    check(case, steps)
    usual = ranks.run(2, run_step, case)
    assert all(torch.equal(a.nll, b.nll) for a, b in zip(steps, usual, strict=True))


def shard_is_a_view(group: dist.ProcessGroup, case: Case) -> tuple[Tensor, Tensor]:
    """Slice the shard out of a whole weight that is the leaf, as after loading a checkpoint."""
    first, last = case.shards[dist.get_rank(group)]
    x, weight = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    out = call(case, group, x, weight[first:last])
    dx, dw = gradients(case, out, x, weight)
    assert dx is not None and dw is not None
    return dx, dw


def test_shard_of_a_whole_weight(ranks: Ranks) -> None:
    """Shards at odd rows of one tensor, with rows of 72·2 bytes; other rows' gradients are 0."""
    case = make_case(30, 72, [65, 64, 7])
    usual = check_on(ranks, case)
    for rank, (dx, dw) in enumerate(ranks.run(3, shard_is_a_view, case)):
        assert torch.equal(dx, usual[rank].dx)
        first, last = case.shards[rank]
        assert torch.equal(dw[first:last], usual[rank].dw)
        assert torch.count_nonzero(dw[:first]) == torch.count_nonzero(dw[last:]) == 0


def batched(group: dist.ProcessGroup, case: Case) -> Step:
    """Shape [B, T]: x as a transposed [T, B, H], target as a shifted view, expanded upstream."""
    x, weight = leaves(case, dist.get_rank(group))
    hidden = x.detach().reshape(4, 9, -1).transpose(0, 1).contiguous().requires_grad_()
    labels = torch.zeros(4, 10, dtype=torch.int32)
    labels[:, 1:] = case.target.reshape(4, 9)
    out = logitless.linear_cross_entropy(
        hidden.transpose(0, 1), weight, labels[:, 1:], group=group, return_lse=True
    )
    assert out.loss.shape == out.lse.shape == (4, 9)
    backend = logitless.last_backend()
    out.loss.backward(torch.full((1, 1), 0.5).expand(4, 9))
    dx = hidden.grad.transpose(0, 1).reshape(36, -1)
    nll, lse = out.loss.detach().flatten(), out.lse.detach().flatten()
    return Step(nll, None, lse, dx, weight.grad, backend, logitless.last_backend())


def test_batched_shapes(ranks: Ranks) -> None:
    case = make_case(36, 24, [100, 50], upstream="nll")
    case.upstream["nll"].fill_(0.5)
    check(case, ranks.run(2, batched, case))


# --- repeated backward, calls in flight -----------------------------------------------------------


def twice_backward(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    x, weight = leaves(case, dist.get_rank(group))
    kept = x.detach().clone(), weight.detach().clone(), case.target.clone()
    out = call(case, group, x, weight)
    loss = out.loss.detach().clone()
    first = gradients(case, out, x, weight, retain_graph=True)
    copies = [g.clone() for g in first]
    other = replace(case, upstream={n: -3 * g.flip(0) for n, g in case.upstream.items()})
    second = gradients(other, out, x, weight, retain_graph=True)
    third = gradients(case, out, x, weight)
    return {
        "first": copies,
        "second": second,
        "repeated": all(map(torch.equal, first, third)),
        "kept": all(map(torch.equal, first, copies)),
        "untouched": all(map(torch.equal, kept, (x, weight, case.target)))
        and torch.equal(loss, out.loss),
    }


@pytest.mark.parametrize("memory", ["stash", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_second_backward(ranks: Ranks, dtype: torch.dtype, memory: str) -> None:
    case = make_case(40, 24, [100, 50], dtype=dtype, memory=memory)
    other = replace(case, upstream={n: -3 * g.flip(0) for n, g in case.upstream.items()})
    limit = 5e-3 if dtype == torch.bfloat16 else 1e-4
    for rank, found in enumerate(ranks.run(2, twice_backward, case)):
        assert found["repeated"] and found["kept"] and found["untouched"]
        first, last = case.shards[rank]
        for got, problem in ((found["first"], case), (found["second"], other)):
            truth = truth_of(problem)
            assert error(got[0], truth.dx) <= limit
            assert error(got[1], truth.dw[first:last]) <= limit


def changed_between(group: dist.ProcessGroup, case: Case) -> None:
    x, weight = leaves(case, dist.get_rank(group))
    out = call(case, group, x, weight)
    with torch.no_grad():
        x.mul_(2)
    gradients(case, out, x, weight)


def test_input_changed_before_backward(ranks: Ranks) -> None:
    """Autograd's version check, on every rank, rather than wrong numbers."""
    for outcome in ranks.attempt(2, changed_between, make_case(10, 8, [20, 20])):
        assert outcome.kind == "RuntimeError"
        assert "modified by an inplace operation" in outcome.message


def in_flight(group: dist.ProcessGroup, cases: list[Case], order: list[int]) -> list[Step]:
    """Run all forwards, a call without gradient, then the backwards in `order`."""
    rank = dist.get_rank(group)
    inputs = [leaves(case, rank) for case in cases]
    outs = [call(case, group, *i) for case, i in zip(cases, inputs, strict=True)]
    with torch.no_grad():
        call(cases[0], group, *leaves(cases[0], rank))
    found: dict[int, Any] = {}
    for i in order:
        found[i] = gradients(cases[i], outs[i], *inputs[i])
    return [
        Step(
            *(None if p is None else p.detach() for p in (out.loss, out.entropy, out.lse)),
            *found[i],
            "cpu",
            logitless.last_backend(),
        )
        for i, out in enumerate(outs)
    ]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_calls_in_flight(ranks: Ranks, order: list[int]) -> None:
    """Different M, H, V and dtypes: nothing that backward needs is in the shared workspace."""
    cases = [
        make_case(50, 24, [100, 50], seed=1),
        make_case(7, 40, [30, 30], seed=2, memory="recompute"),
        make_case(80, 16, [520, 300], seed=3, dtype=torch.float32),
    ]
    for i, steps in enumerate(zip(*ranks.run(2, in_flight, cases, order), strict=True)):
        alone = ranks.run(2, run_step, cases[i])
        assert all(same_bits(a, b) for a, b in zip(steps, alone, strict=True))
        check(cases[i], alone)


def checkpointed(group: dist.ProcessGroup, case: Case) -> tuple[Tensor | None, Tensor | None]:
    x, weight = leaves(case, dist.get_rank(group))

    def body(hidden: Tensor) -> tuple[Tensor, ...]:
        out = call(case, group, hidden, weight)
        return out.loss, out.entropy, out.lse

    out = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
    return gradients(case, logitless.HeadLoss(*out), x, weight)


def test_gradient_checkpoint(ranks: Ranks) -> None:
    case = make_case(40, 24, [100, 50])
    usual = check_on(ranks, case)
    for (dx, dw), step in zip(ranks.run(2, checkpointed, case), usual, strict=True):
        assert torch.equal(dx, step.dx) and torch.equal(dw, step.dw)


# --- what requires a gradient ---------------------------------------------------------------------


def frozen(
    group: dist.ProcessGroup, case: Case, x_on: list[bool], weight_on: list[bool]
) -> tuple[Step, list[str]]:
    rank = dist.get_rank(group)
    names = record(group)
    x, weight = leaves(case, rank)
    x.requires_grad_(x_on[rank])
    weight.requires_grad_(weight_on[rank])
    out = call(case, group, x, weight)
    wanted = x_on[rank] or weight_on[rank]
    assert out.loss.requires_grad == wanted
    backend = logitless.last_backend()
    dx, dw = gradients(case, out, x, weight) if wanted else (None, None)
    parts = [None if p is None else p.detach() for p in (out.loss, out.entropy, out.lse)]
    return Step(*parts, dx, dw, backend, logitless.last_backend()), [e.what for e in names]


@pytest.mark.parametrize("memory", ["stash", "recompute"])
@pytest.mark.parametrize(
    ("x_on", "weight_on"),
    [
        ([True, True], [False, False]),
        ([False, False], [True, True]),
        ([False, False], [False, False]),
        ([True, True], [True, False]),  # weight frozen on rank 1 only
        ([True, False], [True, True]),  # x frozen on rank 1 only
        ([True, False], [False, True]),
    ],
)
def test_frozen(ranks: Ranks, x_on: list[bool], weight_on: list[bool], memory: str) -> None:
    """Gradients where they are wanted, bit for bit as if nothing were frozen; None elsewhere."""
    case = make_case(40, 24, [100, 50], memory=memory)
    usual = check_on(ranks, case)
    found = ranks.run(2, frozen, case, x_on, weight_on)
    for rank, (step, names) in enumerate(found):
        assert torch.equal(step.nll, usual[rank].nll)
        for got, want, on in (
            (step.dx, usual[rank].dx, x_on),
            (step.dw, usual[rank].dw, weight_on),
        ):
            assert (got is not None) == on[rank]
            assert got is None or torch.equal(got, want)
        # The exchange of dX takes place where any rank wants it, and then on every rank.
        assert ("dX parts" in names) == any(x_on)


def without_gradient(group: dist.ProcessGroup, case: Case) -> list[Tensor]:
    x, weight = leaves(case, dist.get_rank(group))
    found = [call(case, group, x, weight).loss.detach()]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = call(case, group, x, weight).loss
            assert not loss.requires_grad
            found.append(loss.clone())
    found.append(call(case, group, x.detach(), weight.detach()).loss)
    assert logitless.last_backend() == "cpu"
    return found


def test_without_gradient(ranks: Ranks) -> None:
    for first, *others in ranks.run(2, without_gradient, make_case(40, 24, [100, 50])):
        assert all(torch.equal(first, other) for other in others)


# --- options --------------------------------------------------------------------------------------


def accumulated(group: dist.ProcessGroup, case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    x, weight = leaves(case, dist.get_rank(group))
    main_grad = torch.ones(weight.shape)
    for _ in range(2):
        out = call(case, group, x, weight, main_grad=main_grad)
        loss = sum((o * case.upstream[n]).sum() for n, o in (("nll", out.loss), ("lse", out.lse)))
        loss.backward()
    return main_grad, weight.grad, x.grad


@pytest.mark.parametrize("memory", ["stash", "recompute"])
def test_main_grad(ranks: Ranks, memory: str) -> None:
    """The shard's fp32 gradient is added twice to ones; weight.grad is not touched."""
    case = make_case(40, 24, [100, 50], upstream="nll lse", memory=memory)
    truth = truth_of(case)
    for rank, (main_grad, weight_grad, dx) in enumerate(ranks.run(2, accumulated, case)):
        first, last = case.shards[rank]
        assert weight_grad is None
        assert error(main_grad - 1, 2 * truth.dw[first:last]) <= 3e-3
        assert error(dx, 2 * truth.dx) <= 5e-3


def own_memory(group: dist.ProcessGroup, case: Case, policies: list[str]) -> Step:
    return run_step(group, case.with_options(memory=policies[dist.get_rank(group)]))


def test_memory_is_a_matter_of_the_rank(ranks: Ranks) -> None:
    """One rank keeps its exponentials, another projects again: each weight gradient is as usual."""
    case = make_case(40, 24, [100, 50, 60], upstream="nll lse")
    mixed = ranks.run(3, own_memory, case, ["stash", "recompute", "auto"])
    check(case, mixed)
    stash = ranks.run(3, run_step, case.with_options(memory="stash"))
    recompute = ranks.run(3, run_step, case.with_options(memory="recompute"))
    for got, want in zip(mixed, (stash[0], recompute[1], stash[2]), strict=True):
        assert torch.equal(got.dw, want.dw)


def reduced(group: dist.ProcessGroup, case: Case, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = leaves(case, dist.get_rank(group))
    loss = logitless.linear_cross_entropy(x, weight, case.target, group=group, reduction=reduction)
    loss.backward()
    assert logitless.last_backend() == "cpu"
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions(ranks: Ranks, reduction: str) -> None:
    case = make_case(40, 24, [100, 50], upstream="nll", dtype=torch.float32)
    live = int((case.target >= 0).sum())
    weight = 1.0 if reduction == "sum" else 1.0 / live
    case.upstream["nll"].fill_(weight)
    truth = truth_of(case)
    for rank, (loss, dx, dw) in enumerate(ranks.run(2, reduced, case, reduction)):
        first, last = case.shards[rank]
        assert float(loss) == pytest.approx(float(truth.nll.sum()) * weight, rel=1e-5)
        assert error(dx, truth.dx) <= 1e-4 and error(dw, truth.dw[first:last]) <= 1e-4
    nothing = replace(case, target=torch.full_like(case.target, -100))
    for loss, dx, dw in ranks.run(2, reduced, nothing, reduction):
        assert float(loss) == 0.0
        assert torch.count_nonzero(dx) == torch.count_nonzero(dw) == 0


def uniform(group: dist.ProcessGroup, cases: list[Case]) -> tuple[list[Step], list[str]]:
    names = record(group)
    steps = [run_step(group, case) for case in cases]
    return steps, [e.what for e in names]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_assume_uniform(ranks: Ranks, sequence_parallel: bool) -> None:
    """The same bits; after the first call no header travels, until a shape changes."""
    case = make_case(40, 24, [100, 50])
    if sequence_parallel:
        case = replace(case, tokens=[0, 25, 40])
    usual = check_on(ranks, case)
    trusted = case.with_options(assume_uniform=True)
    smaller = make_case(9, 24, [100, 50], assume_uniform=True)
    for rank, (steps, names) in enumerate(ranks.run(2, uniform, [trusted] * 3 + [smaller] * 2)):
        assert all(same_bits(step, usual[rank]) for step in steps[:3])
        assert names.count("forward") == 2, names
        assert names.count("backward") <= 2, names
        assert names.count("statistics") == 5
    check(smaller, ranks.run(2, run_step, smaller))


def module_step(group: dist.ProcessGroup, case: Case) -> tuple[Step, str]:
    rank = dist.get_rank(group)
    first, last = case.shards[rank]
    linear = torch.nn.Linear(case.x.shape[1], last - first, bias=False, dtype=case.x.dtype)
    with torch.no_grad():
        linear.weight.copy_(case.weight[first:last])
    head = logitless.LinearCrossEntropy.from_linear(
        linear, group=group, reduction="none", return_entropy=True, return_lse=True
    )
    assert head.weight is linear.weight
    x, _ = leaves(case, rank)
    out = head(x, case.target)
    backend = logitless.last_backend()
    dx, dw = gradients(case, out, x, head.weight)
    parts = [p.detach() for p in (out.loss, out.entropy, out.lse)]
    return Step(*parts, dx, dw, backend, logitless.last_backend()), str(head)


def test_module(ranks: Ranks) -> None:
    case = make_case(40, 24, [100, 50, 31])
    usual = check_on(ranks, case)
    for (step, text), want in zip(ranks.run(3, module_step, case), usual, strict=True):
        assert same_bits(step, want)
        assert text.startswith("LinearCrossEntropy(hidden=24, vocab_rows=")


# --- compilation, and the fallback ----------------------------------------------------------------


def compiled(group: dist.ProcessGroup, case: Case, backend: str) -> Step:
    """Compile the call and its surroundings into one graph; run it forward and backward, twice."""
    x, weight = leaves(case, dist.get_rank(group))

    def body(hidden: Tensor, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = logitless.linear_cross_entropy(
            hidden * 1.0, rows, target, group=group, return_entropy=True, return_lse=True
        )
        return out.loss, out.entropy, out.lse

    torch._dynamo.reset()
    run: Callable[..., Any] = torch.compile(body, fullgraph=True, backend=backend)
    run(x, weight, case.target)
    out = logitless.HeadLoss(*run(x, weight, case.target))
    backend = logitless.last_backend()
    dx, dw = gradients(case, out, x, weight)
    parts = [p.detach() for p in (out.loss, out.entropy, out.lse)]
    return Step(*parts, dx, dw, backend, logitless.last_backend())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(ranks: Ranks, backend: str) -> None:
    """fullgraph: an error where the graph would break. The bits are those of the eager call."""
    case = make_case(40, 24, [100, 50])
    usual = check_on(ranks, case)
    steps = ranks.run(2, compiled, case, backend)
    check(case, steps)
    assert all(same_bits(a, b) for a, b in zip(steps, usual, strict=True))


@pytest.mark.filterwarnings("ignore:logitless:UserWarning")
def test_chunked_agrees_with_one_rank(ranks: Ranks) -> None:
    """float64 has no native path: the chunked fallback, over ranks and alone."""
    case = make_case(40, 24, [300, 50, 250], dtype=torch.float64)
    both = check_on(ranks, case)
    whole = check_on(ranks, replace(case, shards=shards_of([600])))[0]
    for step, (first, last) in zip(both, case.shards, strict=True):
        torch.testing.assert_close(step.nll, whole.nll, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step.dx, whole.dx, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(step.dw, whole.dw[first:last], rtol=1e-10, atol=1e-12)
    check_on(ranks, replace(case, tokens=[0, 30, 30, 40]))
