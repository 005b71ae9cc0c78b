# SPDX-License-Identifier: Apache-2.0
"""What the chunked fallback is to compute: plain autograd in float64 over whole logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from logitless import _chunked, _groups
from logitless._groups import SingleRank

IGNORE = -100

# Half a unit in the last place of the results, with the rounding of the logits on top.
PRECISION = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (3e-6, 2e-6),
    torch.float16: (3e-6, 5e-4),
    torch.bfloat16: (3e-6, 3e-3),
}


class Truth(NamedTuple):
    nll: Tensor
    lse: Tensor
    entropy: Tensor
    dx: Tensor
    dw: Tensor


@dataclass
class Case:
    """A problem, its upstream gradients, and what is to come out, in float64."""

    x: Tensor
    weight: Tensor
    target: Tensor
    temperature: float | Tensor = 1.0
    vocab_size: int = -1
    upstream: dict[str, Tensor] = field(default_factory=dict)  # of "nll", "entropy", "lse"

    def with_upstream(self, names: str = "nll entropy lse", seed: int = 7) -> Case:
        generator = torch.Generator().manual_seed(seed)
        for name in names.split():
            values = torch.randn(self.target.shape, generator=generator, dtype=torch.float64)
            self.upstream[name] = values if self.x.dtype == torch.float64 else values.float()
        return self

    def truth(self) -> Truth:
        live = self.target != IGNORE
        x = self.x.double().clone().requires_grad_()
        weight = self.weight.double().clone().requires_grad_()
        size = self.vocab_size if self.vocab_size >= 0 else weight.shape[0]
        tau = torch.as_tensor(self.temperature, dtype=torch.float64).expand(len(self.target))
        s = (x[live] @ weight[:size].T) / tau[live, None]
        lse = s.logsumexp(1)
        log_p = s - lse[:, None]
        nll = -log_p.gather(1, self.target[live, None].long())[:, 0]
        # A masked id adds nothing: 0·(−inf) = 0.
        entropy = -torch.where(log_p.exp() == 0, 0.0, log_p.exp() * log_p).sum(1)
        results = {"nll": nll, "lse": lse, "entropy": entropy}
        full = {name: torch.zeros(len(live), dtype=torch.float64) for name in results}
        for name, values in results.items():
            full[name][live] = values.detach()
        loss = sum((results[n] * g.double()[live]).sum() for n, g in self.upstream.items())
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
        if isinstance(loss, Tensor):
            dx, dw = torch.autograd.grad(loss, (x, weight))
        return Truth(full["nll"], full["lse"], full["entropy"], dx, dw)


def make_case(
    tokens: int = 37,
    hidden: int = 24,
    vocab: int = 611,
    *,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
    seed: int = 1,
) -> Case:
    """Logits of standard deviation `scale`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    return Case(x.to(dtype), (weight * scale / hidden**0.5).to(dtype), target)


class Result(NamedTuple):
    out: _chunked.Output
    dx: Tensor | None
    dw: Tensor | None


def run(case: Case, exchange: _groups.Exchange | None = None, **options: Any) -> Result:
    exchange = exchange or SingleRank()
    shared: dict[str, Any] = {"vocab_size": case.vocab_size, **options}
    wanted: dict[str, Any] = {
        k: shared.pop(k) for k in list(shared) if k.startswith("want") or k == "main_grad"
    }
    call: Any = (case.x, case.weight, case.target, case.temperature, IGNORE, exchange)
    out = _chunked.forward(*call, return_entropy=True, **shared)
    up = case.upstream
    backward: Any = _chunked.backward
    given = (up.get("nll"), up.get("entropy"), up.get("lse"), *call, out.rows)
    grads: tuple[Tensor | None, Tensor | None] = backward(*given, **shared, **wanted)
    return Result(out, *grads)


def error(got: Tensor, want: Tensor) -> float:
    """The error's norm over that of the truth."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


def check(
    result: Result,
    truth: Truth,
    *,
    values: float,
    gradients: float,
    weight_rows: slice = slice(None),
) -> None:
    for name in ("nll", "lse", "entropy"):
        got, want = getattr(result.out, name), getattr(truth, name)
        torch.testing.assert_close(
            got.double(), want, rtol=values, atol=values, msg=f"{name}: {{}}".format
        )
    if result.dx is not None:
        assert error(result.dx, truth.dx) <= gradients, error(result.dx, truth.dx)
    if result.dw is not None:
        want = truth.dw[weight_rows]
        assert error(result.dw, want) <= gradients, error(result.dw, want)


def shrink_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 256 ids and tiles of 8 tokens of float32: three and five in most tests."""
    monkeypatch.setattr(_chunked, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(_chunked, "_TILE_BYTES", 8 * 256 * 4)
