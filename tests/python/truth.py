# SPDX-License-Identifier: Apache-2.0
"""What the operation is to compute: plain softmax over whole logits in float64, written out.

Nothing of Logitless is used here but the public call that is measured against it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import logitless

IGNORE = -100
NAMES = ("loss", "entropy", "lse")
BF16, FP32 = torch.bfloat16, torch.float32
TILE = 512  # vocabulary columns of the CPU backend's tile
SLICE = 2048  # columns recomputed at a time


class Truth(NamedTuple):
    """All float64: [M], [M], [M], [M, H], [V, H]; `reach` is max |s| over finite s."""

    nll: Tensor
    lse: Tensor
    entropy: Tensor
    dx: Tensor
    dw: Tensor
    reach: float


class Result(NamedTuple):
    """What a call gave; a gradient that was not asked for is None."""

    nll: Tensor
    lse: Tensor
    entropy: Tensor
    dx: Tensor | None
    dw: Tensor | None


@dataclass
class Problem:
    """Inputs [M, H], [V, H], [M], and the upstream gradients [M] float32, absent where None."""

    x: Tensor
    weight: Tensor
    target: Tensor
    temperature: float | Tensor = 1.0
    ignore_index: int = IGNORE
    vocab_size: int | None = None
    g: Tensor | None = None  # of nll
    h: Tensor | None = None  # of entropy
    q: Tensor | None = None  # of lse
    # Computed once for a problem that is run several times: do not change it in between.
    truth: Truth | None = field(default=None, init=False)
    eager: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def upstream(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.g, self.h, self.q

    def with_upstream(self, names: str = "g", seed: int = 7) -> Problem:
        """Return it with signed random upstream gradients of the named outputs."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.target.shape
        return replace(self, **{n: torch.randn(shape, generator=generator) for n in names.split()})


def make_problem(
    tokens: int = 70,
    hidden: int = 64,
    vocab: int = 1100,
    *,
    dtype: torch.dtype = BF16,
    spread: float = 1.0,
    offset: float = 0.0,
    ignored: float = 0.0,
    seed: int = 1,
    upstream: str = "g",
) -> Problem:
    """Return random inputs whose logits have standard deviation `spread` about `offset`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator) * (spread / max(hidden - 1, 1) ** 0.5)
    if offset:
        x[:, 0], weight[:, 0] = 8.0, offset / 8.0
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    return Problem(x.to(dtype), weight.to(dtype), target).with_upstream(upstream, seed + 1)


def exact_problem(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, seed: int) -> Problem:
    """Return inputs whose logits are exact in float32, in any order of addition."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (tokens, hidden), generator=generator) / 2.0
    weight = torch.randint(-4, 5, (vocab, hidden), generator=generator) / 4.0
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    return Problem(x.to(dtype), weight.to(dtype), target).with_upstream("g h q", seed)


def truth(p: Problem) -> Truth:
    """Return what the problem's results are."""
    if p.truth is None:
        p.truth = _truth(p)
    return p.truth


def _truth(p: Problem) -> Truth:
    """Compute the outputs, and the gradients by the formula of the logits' gradient:

    dz_iv = (1/τ_i)·[p_iv·(g_i + q_i + (lse_i − entropy_i − s_iv)·h_i) − g_i·1(v = y_i)]
    """
    tokens, vocab = p.target.numel(), p.weight.shape[0]
    size = vocab if p.vocab_size is None else p.vocab_size
    live = p.target.reshape(-1) != p.ignore_index
    x, weight = p.x.reshape(-1, p.x.shape[-1]).double()[live], p.weight.double()[:size]
    target = p.target.reshape(-1)[live].long()
    tau = torch.as_tensor(p.temperature).double().reshape(-1).expand(tokens)[live, None]
    s = (x @ weight.T) / tau
    row = torch.arange(len(target))
    lse = torch.logsumexp(s, 1)
    prob = (s - lse[:, None]).exp()
    mean = torch.where(prob == 0, 0.0, prob * s).sum(1)
    # 1 − p_y as a sum of the others: a difference would lose the digits of a confident row.
    others = prob.clone()
    others[row, target] = 0.0
    g, h, q = (
        torch.zeros(len(target)).double() if v is None else v.reshape(-1).double()[live]
        for v in p.upstream
    )
    bend = torch.where(prob == 0, 0.0, (mean[:, None] - s) * h[:, None])
    dz = prob * (g + q)[:, None] + prob * bend
    dz[row, target] = (
        -g * others.sum(1) + q * prob[row, target] + prob[row, target] * bend[row, target]
    )
    dz /= tau

    def spread(values: Tensor) -> Tensor:
        full = torch.zeros(tokens, *values.shape[1:], dtype=torch.float64)
        full[live] = values
        return full

    dw = torch.zeros(p.weight.shape, dtype=torch.float64)
    dw[:size] = dz.T @ x
    finite = s[s.isfinite()]
    reach = float(finite.abs().max()) if finite.numel() else 0.0
    nll = lse - s[row, target]
    return Truth(spread(nll), spread(lse), spread(lse - mean), spread(dz @ weight), dw, reach)


def eager_gradients(p: Problem) -> tuple[Tensor, Tensor]:
    """Return the gradients of PyTorch in x's dtype."""
    if p.eager is None:
        p.eager = _eager_gradients(p)
    return p.eager


def _eager_gradients(p: Problem) -> tuple[Tensor, Tensor]:
    """Return dx and dw of what PyTorch users write: logits in x's dtype, softmax in float32."""
    x, weight = p.x.detach().clone().requires_grad_(), p.weight.detach().clone().requires_grad_()
    logits = F.linear(x, weight)[:, : p.vocab_size].float()
    tau = torch.as_tensor(p.temperature).float().reshape(-1)
    log_p = (logits / tau[:, None]).log_softmax(1)
    live = p.target != p.ignore_index
    nll = -log_p.gather(1, p.target.long().where(live, 0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    lse = (logits / tau[:, None]).logsumexp(1)
    parts = zip((nll, entropy, lse), p.upstream, strict=True)
    loss = sum((v * live * u).sum() for v, u in parts if u is not None)
    return torch.autograd.grad(loss, (x, weight))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that memory nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def budget(p: Problem, stashed: int) -> int:
    """Return the bytes with which exactly `stashed` columns (a multiple of 512) are kept."""
    tokens = p.target.numel()
    column = (tokens + 15) // 16 * 16 * p.x.element_size()
    return 24 * tokens + (min(p.weight.shape[0], SLICE) + stashed) * column


def policies(p: Problem) -> tuple[str | int, ...]:
    """Return all of memory's kinds; the bytes keep one tile and recompute the rest."""
    return "auto", "stash", "recompute", budget(p, TILE)


def run(
    p: Problem,
    *,
    want_x: bool = True,
    want_w: bool = True,
    backend: str = "cpu",
    **options: Any,
) -> Result:
    """Call Logitless on poisoned memory and differentiate; asserts what ran."""
    x, weight = p.x.detach().requires_grad_(want_x), p.weight.detach().requires_grad_(want_w)
    with poisoned():
        out = logitless.linear_cross_entropy(
            x,
            weight,
            p.target,
            temperature=p.temperature,
            ignore_index=p.ignore_index,
            vocab_size=p.vocab_size,
            return_entropy=True,
            return_lse=True,
            **options,
        )
        assert isinstance(out, logitless.HeadLoss)
        assert logitless.last_backend() == backend
        used = [
            (getattr(out, n), u) for n, u in zip(NAMES, p.upstream, strict=True) if u is not None
        ]
        dx = dw = None
        if used and (want_x or want_w):
            inputs = [t for t, want in ((x, want_x), (weight, want_w)) if want]
            values, upstream = zip(*used, strict=True)
            grads = list(torch.autograd.grad(values, inputs, upstream))
            assert logitless.last_backend() == backend
            dx = grads.pop(0) if want_x else None
            dw = grads.pop(0) if want_w else None
    assert out.entropy is not None
    assert out.lse is not None
    return Result(out.loss.detach(), out.lse.detach(), out.entropy.detach(), dx, dw)


def error(got: Tensor, want: Tensor) -> float:
    """Return the error's norm over that of the truth."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300))


def row_error(got: Tensor, want: Tensor) -> float:
    """Return the 99th percentile of the rows' relative errors; rows of zeros must be zeros."""
    size = want.norm(dim=1)
    assert bool((got[size == 0] == 0).all()), "a gradient that is zero was not written as zero"
    # bfloat16 itself loses digits below its smallest normal number.
    clear = size > 1e-36
    if not bool(clear.any()):
        return 0.0
    errors = (got.double() - want).norm(dim=1)[clear] / size[clear]
    return float(errors.quantile(0.99))


def check_values(r: Result, t: Truth, hidden: int) -> None:
    """Hold nll, lse and entropy to the limits; all of them are at least 0 but lse."""
    limit = 1e-5 * max(1.0, hidden / 4096) * max(3.0, t.reach)
    for name, factor in (("nll", 1.0), ("lse", 1.0), ("entropy", 3.0)):
        got, want = getattr(r, name), getattr(t, name)
        assert got.dtype == FP32, name
        assert bool(got.isfinite().all()), name
        worst = float((got.double().reshape(-1) - want).abs().max()) if got.numel() else 0.0
        assert worst <= factor * limit, (name, worst, factor * limit)
    assert bool((r.nll >= 0).all())
    assert bool((r.entropy >= 0).all())


def check_gradients(r: Result, t: Truth, p: Problem, *, only: str = "dx dw") -> None:
    """Hold the gradients to the limits of their dtype."""
    eager: dict[str, Tensor] = {}
    if p.x.dtype == BF16:
        eager = dict(zip(("dx", "dw"), eager_gradients(p), strict=True))
    for name in only.split():
        got, want = getattr(r, name), getattr(t, name)
        if got is None:
            continue
        assert got.dtype == p.x.dtype, name
        assert bool(got.isfinite().all()), name
        if p.x.dtype == BF16:
            live = (p.target != p.ignore_index)[:, None] if name == "dx" else torch.tensor(True)
            plain = eager[name].where(live, 0)
            limits = max(1.5 * error(plain, want), 3e-3), max(1.5 * row_error(plain, want), 5e-3)
            found = error(got, want), row_error(got, want)
            assert found[0] <= limits[0] and found[1] <= limits[1], (name, found, limits)
        else:
            limit = 1e-5 * max(1.0, t.reach)
            assert error(got, want) <= limit, (name, error(got, want), limit)


def check(p: Problem, **options: Any) -> Result:
    """Run the problem and hold everything to the limits."""
    result, wanted = run(p, **options), truth(p)
    check_values(result, wanted, p.x.shape[-1])
    check_gradients(result, wanted, p)
    return result


def same(a: Result, b: Result) -> bool:
    """Say whether two results are equal bit for bit."""
    pairs = zip(a, b, strict=True)
    return all(
        (u is None and v is None)
        or (u is not None and v is not None and u.dtype == v.dtype and torch.equal(u, v))
        for u, v in pairs
    )
