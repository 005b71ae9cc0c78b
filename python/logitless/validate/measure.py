# SPDX-License-Identifier: Apache-2.0
"""One case on one rank: the call, its errors against float64, and their limits."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import logitless

from .cases import Case, draw
from .job import DTYPES, Job
from .truth import Expected, expected

__all__ = ["QUANTITIES", "Measured", "measure", "ratio"]

QUANTITIES = ("nll", "lse", "entropy", "dX", "dW")

# A gradient may be this much worse than PyTorch's own in the same dtype, or within the floor.
_MARGIN = 1.5
_BF16_NORM, _BF16_ROWS = 3e-3, 5e-3
# A norm of few elements is a few roundings, of which three (E, X', the result) may meet in each.
_FEW_ELEMENTS, _BF16_FEW = 512, 6e-3
# The 99th percentile of rows says something from here on; rows this far below the largest do not.
_LEAST_ROWS = 100
_LEAST_ROW = 1e-6


@dataclass
class Measured:
    """What one rank found in one case."""

    index: int
    rank: int
    shape: str
    dtype: str
    options: str
    backend: str = ""
    seconds: float = 0.0  # forward and backward of the call
    errors: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # error, limit
    digests: dict[str, str] = field(default_factory=dict)  # of what all ranks must have
    failures: list[str] = field(default_factory=list)
    raised: bool = False  # the call ended with an exception, which is in `failures`


@dataclass
class _Result:
    """What a call gave on this rank, on the CPU."""

    nll: Tensor
    lse: Tensor | None
    entropy: Tensor | None
    dx: Tensor | None
    dw: Tensor | None
    backends: set[str]


def measure(job: Job, index: int, group: dist.ProcessGroup | None) -> Measured:
    """Run a case on this rank. Collective; what goes wrong is in the record."""
    dtype = job.dtype_of(index)
    case = draw(job.seed, index, DTYPES[dtype], job.ranks)
    found = Measured(index, job.rank, case.shape(), dtype, case.options())
    started = time.perf_counter()
    try:
        result = _call(case, job, group)
    except Exception as error:
        found.raised = True
        found.failures.append(f"{type(error).__name__}: {error}")
        return found
    found.seconds = time.perf_counter() - started
    found.backend = ", ".join(sorted(result.backends))
    if result.backends != {job.backends[dtype]}:
        found.failures.append(f"backend: expected {job.backends[dtype]}, got {found.backend}")
    _compare(case, job, result, found)
    return found


def _call(case: Case, job: Job, group: dist.ProcessGroup | None) -> _Result:
    """Make the call, and one backward from the upstream gradients."""
    device = job.device
    if device == "cuda":
        device = f"cuda:{job.rank % torch.cuda.device_count()}"
    x = case.x[case.tokens(job.rank)].to(device, copy=True).requires_grad_(case.want_input_grad)
    weight = case.weight[case.shard(job.rank)].to(device, copy=True)
    weight.requires_grad_(case.want_weight_grad)
    main_grad = case.main_grad
    if main_grad is not None:
        main_grad = main_grad[case.shard(job.rank)].to(device, copy=True)
    tau = case.temperature
    out = logitless.linear_cross_entropy(
        x,
        weight,
        case.target.to(device),
        group=group,
        temperature=tau.to(device) if isinstance(tau, Tensor) else tau,
        reduction=case.reduction,
        return_entropy=case.return_entropy,
        return_lse=case.return_lse,
        memory=case.memory,
        sequence_parallel=case.token_ends is not None,
        vocab_size=case.vocab_size if case.name_vocab_size else None,
        vocab_start=case.vocab_ends[job.rank] if case.name_vocab_start else None,
        main_grad=main_grad,
    )
    backends = {logitless.last_backend() or "none"}
    outputs: dict[str, Any]
    if isinstance(out, Tensor):
        outputs = {"loss": out}
    else:
        outputs = {"loss": out.loss, "entropy": out.entropy, "lse": out.lse}
    torch.autograd.backward(
        [outputs[name] for name in case.upstream],
        [grad.to(device, outputs[name].dtype) for name, grad in case.upstream.items()],
    )
    backends.add(logitless.last_backend() or "none")
    dw = weight.grad
    if main_grad is not None and case.main_grad is not None:
        dw = main_grad.double() - case.main_grad[case.shard(job.rank)].to(device).double()
    return _Result(
        nll=outputs["loss"].detach().cpu(),
        lse=None if outputs.get("lse") is None else outputs["lse"].detach().cpu(),
        entropy=None if outputs.get("entropy") is None else outputs["entropy"].detach().cpu(),
        dx=None if x.grad is None else x.grad.cpu(),
        dw=None if dw is None else dw.cpu(),
        backends=backends,
    )


def _compare(case: Case, job: Job, result: _Result, found: Measured) -> None:
    """Fill in errors, limits, digests and failures."""
    truth = expected(case, torch.float64)
    eager = expected(case, case.x.dtype, job.device)
    limit = _value_limit(case, truth)
    asked = {"lse": case.return_lse, "entropy": case.return_entropy}
    values = {"nll": (result.nll, truth.loss)}
    for name, got, want in (
        ("lse", result.lse, truth.lse),
        ("entropy", result.entropy, truth.entropy),
    ):
        if (got is not None) != asked[name]:
            found.failures.append(f"{name}: expected it {'' if asked[name] else 'not '}to be given")
        elif got is not None:
            values[name] = got, want
    for name, (got, want) in values.items():
        summed = name == "nll" and case.reduction == "sum"
        most = limit * max(1, int(case.live.sum())) if summed else limit
        if got.shape != want.shape:
            found.failures.append(f"{name}: expected shape {want.shape}, got {got.shape}")
            continue
        found.errors[name] = [(_largest(got.double() - want), most)]
        found.digests[name] = _digest(got)
        if got.dim() and got[~case.live].any():
            found.failures.append(f"{name}: expected 0 for ignored tokens, got something else")
    mine, rows = case.tokens(job.rank), case.shard(job.rank)
    gradients = {
        "dX": (case.want_input_grad, result.dx, truth.dx[mine], eager.dx[mine]),
        "dW": (case.want_weight_grad, result.dw, truth.dw[rows], eager.dw[rows]),
    }
    slopes = {"dX": limit * truth.dx_slope[mine], "dW": limit * truth.dw_slope[rows]}
    for name, (wanted, got, want, ordinary) in gradients.items():
        if (got is not None) != wanted:
            found.failures.append(f"{name}: expected it {'' if wanted else 'not '}to be given")
        elif got is not None:
            start = case.main_grad[rows] if name == "dW" and case.main_grad is not None else None
            floors = _floors(case.x.dtype, truth)
            found.errors[name] = _gradient_errors(got, want, ordinary, slopes[name], floors, start)
            if got[(want == 0).all(1)].any():
                found.failures.append(
                    f"{name}: expected 0 for ignored tokens and padding, got something else"
                )
    if result.dx is not None and case.token_ends is None:
        found.digests["dX"] = _digest(result.dx)
    for name, pairs in found.errors.items():
        for error, most in pairs:
            if not error <= most:
                found.failures.append(
                    f"{name}: expected an error of at most {most:.2e}, got {error:.2e}"
                )


def _value_limit(case: Case, truth: Expected) -> float:
    """Return the limit of nll, lse and entropy, in nats."""
    if case.x.dtype == torch.float64:
        return 1e-11 * max(1.0, truth.largest)
    if case.x.dtype == torch.float32:
        return 1e-5 * max(1.0, truth.largest)
    return 1e-5 * max(1.0, case.x.shape[1] / 4096) * max(3.0, truth.largest)


def _floors(dtype: torch.dtype, truth: Expected) -> tuple[float, float]:
    """Return the errors that a gradient may have whatever PyTorch's: in norm, and of a row."""
    if dtype == torch.bfloat16:
        return _BF16_NORM, _BF16_ROWS
    unit = 1e-11 if dtype == torch.float64 else 1e-5
    return unit * max(1.0, truth.largest), unit * max(1.0, truth.largest)


def _gradient_errors(
    got: Tensor,
    want: Tensor,
    ordinary: Tensor,
    slope: Tensor,
    floors: tuple[float, float],
    start: Tensor | None,
) -> list[tuple[float, float]]:
    """Return (error, limit) in norm and, with rows enough, at the 99th percentile of rows.

    `slope` is what an error of entropy within its limit may add to each row; `start` is what the
    gradient was added to, whose rounding it has.
    """
    off, plain = got.double() - want, ordinary.double() - want
    norm = float(want.norm())
    if norm == 0.0:
        # All ignored, or all upstream gradients 0: exactly 0.
        return [(_largest(off), 0.0)]
    spare = float(slope.norm())
    if start is not None:
        spare += torch.finfo(start.dtype).eps * float(start.double().norm())
    floor = floors[0]
    if floor == _BF16_NORM and want.numel() < _FEW_ELEMENTS:
        floor = _BF16_FEW
    most = max(_MARGIN * float(plain.norm()) / norm, floor) + spare / norm
    pairs = [(float(off.norm()) / norm, most)]
    sizes = want.norm(dim=1)
    telling = sizes > _LEAST_ROW * float(sizes.max())
    if start is None and int(telling.sum()) >= _LEAST_ROWS:
        sizes, slope = sizes[telling], slope[telling]
        rows = ((off[telling].norm(dim=1) - slope) / sizes).clamp(min=0.0)
        ordinary_rows = plain[telling].norm(dim=1) / sizes
        pairs.append((_percentile(rows), max(_MARGIN * _percentile(ordinary_rows), floors[1])))
    return pairs


def _percentile(values: Tensor) -> float:
    return float(values.quantile(0.99))


def _largest(values: Tensor) -> float:
    """Return the largest magnitude; NaN where there is one."""
    return float(values.abs().max()) if values.numel() else 0.0


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(
        bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
    ).hexdigest()


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the largest error over its limit."""
    ratios = [
        0.0 if error == 0.0 else error / limit if limit else math.inf for error, limit in pairs
    ]
    return math.nan if any(map(math.isnan, ratios)) else max(ratios)
