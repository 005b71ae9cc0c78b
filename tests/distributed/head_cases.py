# SPDX-License-Identifier: Apache-2.0
"""Heads that are split over ranks, one training step on them, and what it has to give.

The truth is plain autograd in float64 over whole logits, from the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor

import logitless

IGNORE = -100
NATIVE = "cpu"
OUTPUTS = ("nll", "entropy", "lse")


@dataclass(frozen=True)
class Case:
    """A whole problem, how it is split, and the gradients that come from above."""

    x: Tensor  # [M, H]
    weight: Tensor  # [V, H]
    target: Tensor  # [M]
    shards: list[tuple[int, int]]  # [first, last) rows of weight, of each rank
    upstream: dict[str, Tensor] = field(default_factory=dict)  # [M] float32, of OUTPUTS
    options: dict[str, Any] = field(default_factory=dict)  # of linear_cross_entropy
    tokens: list[int] | None = None  # R + 1 offsets: the token shards of sequence parallelism
    starts: list[int] | None = None  # an explicit vocab_start of each rank
    true_vocab: int | None = None  # what the truth takes for V; default: all rows

    @property
    def size(self) -> int:
        return len(self.shards)

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})


class Step(NamedTuple):
    """What one rank got."""

    nll: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    dx: Tensor | None
    dw: Tensor | None
    backend: str
    backward_backend: str


class Truth(NamedTuple):
    nll: Tensor
    entropy: Tensor
    lse: Tensor
    dx: Tensor
    dw: Tensor
    largest: float  # max |z|


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shards_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Turn the sizes of shards into ranges that follow each other."""
    first, shards = 0, []
    for size in rows:
        shards.append((first, first + size))
        first += size
    return shards


def make_case(
    tokens: int,
    hidden: int,
    rows: Sequence[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 2.0,
    seed: int = 1,
    upstream: str = "nll entropy lse",
    ignored: bool = True,
    **options: Any,
) -> Case:
    """Return random logits of standard deviation `scale`, with shards of `rows` vocabulary rows.

    A sixth of the targets is ignored; upstream gradients are random and signed.
    """
    g = generator(seed)
    vocab = sum(rows)
    x = torch.randn(tokens, hidden, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, hidden, generator=g, dtype=torch.float64) * scale / hidden**0.5
    target = torch.randint(0, vocab, (tokens,), generator=g)
    if ignored:
        target[torch.rand(tokens, generator=g) < 1 / 6] = IGNORE
    return Case(
        x,
        weight.to(dtype),
        target,
        shards_of(rows),
        {name: torch.randn(tokens, generator=g) for name in upstream.split()},
        options,
    )


def expected_backend(dtype: torch.dtype) -> str:
    return NATIVE if dtype in (torch.bfloat16, torch.float32) else "chunked-pytorch"


def run_step(group: dist.ProcessGroup, case: Case) -> Step:
    """Do one forward and backward as a rank of `group`: the body of most tests."""
    rank = dist.get_rank(group)
    x, weight = leaves(case, rank)
    out = call(case, group, x, weight)
    backend = logitless.last_backend()
    dx, dw = gradients(case, out, x, weight)
    parts = (out.loss, out.entropy, out.lse)
    return Step(
        *(None if part is None else part.detach() for part in parts),
        dx,
        dw,
        backend,
        logitless.last_backend(),
    )


def leaves(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's x and weight, as leaves that require a gradient."""
    x = case.x
    if case.tokens is not None:
        x = x[case.tokens[rank] : case.tokens[rank + 1]]
    first, last = case.shards[rank]
    return x.clone().requires_grad_(), case.weight[first:last].clone().requires_grad_()


def call(
    case: Case, group: dist.ProcessGroup | None, x: Tensor, weight: Tensor, **changed: Any
) -> logitless.HeadLoss:
    """Call the function with the case's options; always a HeadLoss."""
    options = {
        "return_entropy": "entropy" in case.upstream,
        "return_lse": True,
        "sequence_parallel": case.tokens is not None,
        **case.options,
        **changed,
    }
    if case.starts is not None and group is not None:
        options["vocab_start"] = case.starts[dist.get_rank(group)]
    out = logitless.linear_cross_entropy(x, weight, case.target, group=group, **options)
    assert logitless.last_backend() == expected_backend(x.dtype)
    return out if isinstance(out, logitless.HeadLoss) else logitless.HeadLoss(out, None, None)


def gradients(
    case: Case, out: logitless.HeadLoss, x: Tensor, weight: Tensor, **options: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of Σ upstream·output for those of x and weight that require one."""
    if not case.upstream:
        return None, None
    outputs = dict(zip(OUTPUTS, (out.loss, out.entropy, out.lse), strict=True))
    loss = sum((outputs[n] * g.to(outputs[n].dtype)).sum() for n, g in case.upstream.items())
    wanted = [t for t in (x, weight) if t.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, **options))
    assert logitless.last_backend() == expected_backend(x.dtype)
    return tuple(next(found) if t.requires_grad else None for t in (x, weight))  # type: ignore


def truth_of(case: Case) -> Truth:
    """Compute the case in float64 with whole logits."""
    vocab = case.weight.shape[0] if case.true_vocab is None else case.true_vocab
    ignore = case.options.get("ignore_index", IGNORE)
    live = case.target != ignore
    tau = torch.as_tensor(case.options.get("temperature", 1.0), dtype=torch.float64)
    tau = tau.expand(len(live))[live, None]
    x = case.x.double().requires_grad_()
    weight = case.weight[:vocab].double().requires_grad_()
    s = x[live] @ weight.T / tau
    lse = s.logsumexp(1)
    log_p = s - lse[:, None]
    p = log_p.exp()
    values = {
        "nll": -log_p.gather(1, case.target[live, None].long())[:, 0],
        # A class without probability adds nothing: 0·(−inf) = 0.
        "entropy": -(p * log_p.masked_fill(p == 0, 0.0)).sum(1),
        "lse": lse,
    }
    full = {}
    for name, value in values.items():
        full[name] = torch.zeros(len(live), dtype=torch.float64)
        full[name][live] = value.detach()
    dx, dw = torch.zeros_like(x), torch.zeros_like(case.weight, dtype=torch.float64)
    if case.upstream and bool(live.any()):
        loss = sum((values[n] * g.double()[live]).sum() for n, g in case.upstream.items())
        dx, dw[:vocab] = torch.autograd.grad(loss, (x, weight))
    largest = float(s.detach().abs().max()) if s.numel() else 0.0
    return Truth(**full, dx=dx, dw=dw, largest=largest)


def error(got: Tensor, want: Tensor) -> float:
    """Return the norm of the error over the norm of the truth, 0 where both are 0."""
    distance = float((got.double() - want).norm())
    return distance / float(want.norm()) if float(want.norm()) > 0.0 else distance


def _eager_errors(case: Case, truth: Truth) -> tuple[float, float]:
    """Return the errors of dX and dW of ordinary PyTorch in the case's own dtype."""
    vocab = case.weight.shape[0] if case.true_vocab is None else case.true_vocab
    live = case.target != case.options.get("ignore_index", IGNORE)
    tau = torch.as_tensor(case.options.get("temperature", 1.0), dtype=torch.float32)
    x, weight = case.x.clone().requires_grad_(), case.weight[:vocab].clone().requires_grad_()
    s = (x @ weight.T)[live].float() / tau.expand(len(live))[live, None]
    lse = s.logsumexp(1)
    log_p = s - lse[:, None]
    values = {
        "nll": -log_p.gather(1, case.target[live, None].long())[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(1),
        "lse": lse,
    }
    loss = sum((values[n] * g[live]).sum() for n, g in case.upstream.items())
    dx, dw = torch.autograd.grad(loss, (x, weight))
    return error(dx, truth.dx), error(dw, truth.dw[:vocab])


def check(case: Case, steps: Sequence[Step], truth: Truth | None = None) -> None:
    """Compare every rank with the truth, within the limits of docs/numerics.md."""
    truth = truth_of(case) if truth is None else truth
    dtype = case.x.dtype
    backend = expected_backend(dtype)
    values = 1e-5 * max(3.0 if dtype == torch.bfloat16 else 1.0, truth.largest)
    limits = (values, values)
    if dtype == torch.float64:
        values, limits = 1e-11 * max(1.0, truth.largest), (1e-11, 1e-11)
    elif dtype == torch.bfloat16 and case.upstream:
        limits = tuple(max(1.5 * e, 3e-3) for e in _eager_errors(case, truth))  # type: ignore
    dw = []
    for rank, step in enumerate(steps):
        assert (step.backend, step.backward_backend) == (backend, backend), rank
        for name in OUTPUTS:
            got = getattr(step, name)
            if got is None:
                assert name == "entropy" and "entropy" not in case.upstream
                continue
            assert torch.equal(got, getattr(steps[0], name)), f"{name} differs on rank {rank}"
            worst = float((got.double() - getattr(truth, name)).abs().max()) if len(got) else 0.0
            assert worst <= values, f"{name} of rank {rank}: {worst} > {values}"
        if step.dx is not None and case.tokens is None:
            assert torch.equal(step.dx, steps[0].dx), f"dX differs on rank {rank}"
        if step.dw is not None:
            dw.append((step.dw, case.shards[rank]))
    dx = steps[0].dx
    if dx is not None:
        if case.tokens is not None:
            dx = torch.cat([step.dx for step in steps])  # type: ignore[misc]
        assert dx.dtype == dtype
        assert error(dx, truth.dx) <= limits[0], f"dX: {error(dx, truth.dx)} > {limits[0]}"
    got = torch.zeros_like(truth.dw)
    for part, (first, last) in dw:
        assert part.dtype == dtype and part.shape[0] == last - first
        got[first:last] = part.double()
    if len(dw) == len(steps):
        assert error(got, truth.dw) <= limits[1], f"dW: {error(got, truth.dw)} > {limits[1]}"


def check_on(ranks: Ranks, case: Case) -> list[Step]:
    """Run the case on its ranks, check it, and return the steps."""
    steps = ranks.run(case.size, run_step, case)
    check(case, steps)
    return steps  # type: ignore[no-any-return]


def same_bits(a: Step, b: Step) -> bool:
    """Whether two steps have the same bits throughout."""
    return all(
        torch.equal(p, q) if isinstance(p, Tensor) and isinstance(q, Tensor) else p == q
        for p, q in zip(a, b, strict=True)
    )
