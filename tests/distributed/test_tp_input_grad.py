# SPDX-License-Identifier: Apache-2.0
"""dX over ranks, bit by bit: the fp32 sum of the ranks' own parts in tree order, rounded once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from exchanges import record
from head_cases import (
    Case,
    Step,
    call,
    check,
    error,
    gradients,
    leaves,
    make_case,
    run_step,
    truth_of,
)
from ranks import Ranks
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]


class Recorded(NamedTuple):
    step: Step
    part: Tensor  # [R, block, H] float32: what this rank sent of its own part of dX
    exchanges: list[tuple[str, str, int]]  # kind, what, bytes sent


def recorded_step(group: dist.ProcessGroup, case: Case) -> Recorded:
    exchanges = record(group)
    step = run_step(group, case)
    sent = [e for e in exchanges if e.what == "dX parts"]
    assert [e.kind for e in sent] == ["all_to_all"], "dX is summed in exactly one exchange"
    part = sent[0].sent.view(torch.float32).reshape(case.size, -1, case.x.shape[1])
    return Recorded(step, part, [(e.kind, e.what, e.sent.numel()) for e in exchanges])


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Split at the largest power of two below the count: ((0+1)+(2+3))+4."""
    if len(parts) == 1:
        return parts[0]
    left = 1
    while 2 * left < len(parts):
        left *= 2
    return tree_sum(parts[:left]) + tree_sum(parts[left:])


def token_offsets(case: Case) -> list[int]:
    if case.tokens is not None:
        return case.tokens
    tokens, size = case.x.shape[0], case.size
    return [min(tokens, r * -(-tokens // size)) for r in range(size + 1)]


def whole_parts(case: Case, recorded: list[Recorded]) -> list[Tensor]:
    """Return each rank's own part [M, H], without the padding of the exchange."""
    offsets = token_offsets(case)
    sizes = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    return [
        torch.cat([block[:size] for block, size in zip(r.part, sizes, strict=True)])
        for r in recorded
    ]


def true_parts(case: Case) -> list[Tensor]:
    """Return dz_r·W_r of each rank in float64: the gradient that reaches x through its rows."""
    x = case.x.double()
    logits = (x @ case.weight.double().T).requires_grad_()
    live = case.target >= 0
    log_p = logits[live].log_softmax(1)
    nll = -log_p.gather(1, case.target[live, None])[:, 0]
    values = {
        "nll": nll,
        "entropy": -(log_p.exp() * log_p).sum(1),
        "lse": logits[live].logsumexp(1),
    }
    loss = sum((values[n] * g.double()[live]).sum() for n, g in case.upstream.items())
    (dz,) = torch.autograd.grad(loss, logits)
    return [dz[:, a:b] @ case.weight[a:b].double() for a, b in case.shards]


def check_parts(case: Case, recorded: list[Recorded]) -> Tensor:
    """Check dX against the sum of the parts, and the parts against the truth; return dX."""
    parts = whole_parts(case, recorded)
    scale = sum(float(p.norm()) for p in true_parts(case))
    limit = 1e-4 if case.x.dtype == torch.float32 else 5e-3
    for part, true in zip(parts, true_parts(case), strict=True):
        assert part.dtype == torch.float32
        assert float((part.double() - true).norm()) <= limit * scale
    want = tree_sum(parts).to(case.x.dtype)
    steps = [r.step for r in recorded]
    if case.tokens is None:
        for step in steps:
            assert torch.equal(step.dx, want)
        return want
    offsets = token_offsets(case)
    for rank, step in enumerate(steps):
        assert torch.equal(step.dx, want[offsets[rank] : offsets[rank + 1]])
    return want


ROWS = {2: [130, 70], 3: [100, 60, 40], 5: [50, 30, 41, 9, 70]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("memory", ["stash", "recompute"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 37, 150])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sum_of_the_parts(
    ranks: Ranks, size: int, tokens: int, memory: str, dtype: torch.dtype
) -> None:
    """Fewer tokens than ranks, and numbers of tokens that nothing divides."""
    case = make_case(tokens, 24, ROWS[size], dtype=dtype, memory=memory, ignored=tokens > 4)
    recorded = ranks.run(size, recorded_step, case)
    check_parts(case, recorded)
    check(case, [r.step for r in recorded])


def test_order_of_the_sum_matters_here() -> None:
    """With five parts, other orders have other bits: the test above can tell them apart."""
    parts = list(torch.randn(5, 200, generator=torch.Generator().manual_seed(1)))
    other = ((parts[0] + parts[1]) + parts[2]) + (parts[3] + parts[4])
    assert not torch.equal(tree_sum(parts), other)
    assert not torch.equal(tree_sum(parts), sum(parts[1:], parts[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "offsets"),
    [
        ([130, 70], [0, 30, 37]),
        ([130, 70], [0, 0, 37]),
        ([100, 60, 40], [0, 20, 20, 37]),
        ([100, 60, 40], [0, 1, 36, 37]),
        ([50, 30, 41, 9, 70], [0, 0, 5, 5, 36, 37]),
    ],
)
def test_sequence_parallel(
    ranks: Ranks, rows: list[int], offsets: list[int], dtype: torch.dtype
) -> None:
    """Uneven token shards, also empty ones: the rows of the dX that all ranks would get."""
    case = make_case(37, 24, rows, dtype=dtype)
    whole = ranks.run(len(rows), recorded_step, case)
    dx = check_parts(case, whole)
    split = replace(case, tokens=offsets)
    recorded = ranks.run(len(rows), recorded_step, split)
    assert torch.equal(check_parts(split, recorded), dx)
    check(split, [r.step for r in recorded])
    for a, b in zip(whole, recorded, strict=True):
        for name in ("nll", "entropy", "lse", "dw"):
            assert torch.equal(getattr(a.step, name), getattr(b.step, name)), name
    # x is gathered where it is used, twice; dX is not gathered at all.
    kinds = [(kind, what) for kind, what, _ in recorded[0].exchanges]
    assert kinds.count(("all_gather", "token shards")) == 2
    assert ("all_gather", "dX") not in kinds


def test_nothing_as_large_as_the_logits_travels(ranks: Ranks) -> None:
    """Bytes per rank: headers, 16 per token of statistics, and dX in fp32 and once rounded."""
    tokens, hidden = 64, 24
    case = make_case(tokens, hidden, [400, 400])
    recorded = ranks.run(2, recorded_step, case)
    for r in recorded:
        names = [(kind, what) for kind, what, _ in r.exchanges]
        assert names == [
            ("all_gather", "forward"),
            ("all_gather", "statistics"),
            ("all_gather", "backward"),
            ("all_to_all", "dX parts"),
            ("all_gather", "dX"),
        ]
        sizes = {what: size for _, what, size in r.exchanges}
        assert sizes["statistics"] == 16 * tokens
        assert sizes["dX parts"] == 4 * tokens * hidden
        assert sizes["dX"] == 2 * tokens * hidden // 2
        assert sizes["forward"] == sizes["backward"] <= 4096


@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_without_targets(ranks: Ranks, dtype: torch.dtype) -> None:
    """All targets are on rank 0; rank 1 still has its share of dX. Upstream is not contiguous."""
    case = make_case(64, 24, [100, 100], dtype=dtype, upstream="nll")
    case.target.clamp_(max=99)
    case.upstream["nll"] = torch.randn(64, 7, generator=torch.Generator().manual_seed(3))[:, 3]
    recorded = ranks.run(2, recorded_step, case)
    check_parts(case, recorded)
    check(case, [r.step for r in recorded])
    assert float(recorded[1].part.norm()) > 0.0


def reduced_again(group: dist.ProcessGroup, case: Case) -> Tensor:
    x, weight = leaves(case, dist.get_rank(group))
    dx, _ = gradients(case, call(case, group, x, weight), x, weight)
    assert dx is not None
    dist.all_reduce(dx, group=group)
    return dx


def test_dx_is_already_the_sum(ranks: Ranks) -> None:
    """An all-reduce of the caller's own, which is not needed, would double dX: it is complete."""
    case = make_case(20, 24, [100, 100], dtype=torch.float32)
    truth = truth_of(case)
    for doubled in ranks.run(2, reduced_again, case):
        assert error(doubled / 2, truth.dx) <= 1e-4
