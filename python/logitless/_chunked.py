# SPDX-License-Identifier: Apache-2.0
"""The operation in plain PyTorch, a tile of logits at a time: for what has no native path.

    z = x Wᵀ    s = z/τ    lse_i = log Σ_v exp(s_iv)    nll_i = lse_i − s_{i,y_i}
    entropy_i = lse_i − Σ_v p_iv s_iv
    dz_iv = (1/τ_i) [ p_iv (g_i + q_i + (lse_i − entropy_i − s_iv) h_i) − g_i 1(v = y_i) ]

with the vocabulary split over the ranks of a group. Backward projects again from six saved numbers
a token; nothing of size M·V exists at any time, and no autograd runs inside.

float64 inputs are computed in float64, all others accumulate in float32; numbers of size M
(statistics, merges) are float64 on the way. bfloat16 products on GPUs run in bfloat16 with float32
accumulation and round dz to bfloat16; the gradients of float16 inputs are products in float32.

With u = s·log2(e) and an integer anchor k per row, rank r keeps (k_r, S_r, T_r, e_r):
S = Σ 2^(u−k) and T = Σ 2^(u−k)·(u−k) over v ≠ y, and e = u_y − k. The target stays out of the sums,
for 1 − p would drown in them where p is near 1. K = max k_r joins the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ._chunked_inputs import LOG2E, Head, enter
from ._groups import Exchange

__all__ = ["Output", "backward", "forward"]

LN2 = math.log(2.0)

# Two tensors of this size are alive at a time: the logits of a tile and one thing made of them.
_TILE_BYTES = 32 << 20
# A block of the weight, widened, and of its gradient, not yet rounded.
_BLOCK_BYTES = 64 << 20
# 2^x is 0 in float64 from here on down; it keeps 0·(−inf) out of Σ p·log p.
_FLOOR = -1100.0


class Output(NamedTuple):
    """Per token, in float32 (float64 for float64 inputs)."""

    nll: Tensor  # [M] nats
    lse: Tensor  # [M] nats
    entropy: Tensor | None  # [M] nats
    rows: Tensor  # [6, M] for backward: k, K, S_rest, S, T, e; T is NaN without the entropy


class _Tile(NamedTuple):
    """Logits of some tokens over some of the shard's vocabulary."""

    tokens: slice
    z: Tensor  # [m, n] wide; the caller may overwrite it
    column: Tensor  # [m, 1] column of the target, 0 where it is elsewhere
    here: Tensor  # [m, 1] bool: the target is in this tile


class _Merged(NamedTuple):
    """Statistics over the global vocabulary, [M] float64, relative to K."""

    K: Tensor
    S_rest: Tensor  # without the target
    S: Tensor
    T: Tensor
    e: Tensor


# --- tiles of logits ------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Return a·b accumulated in `wide`; narrower operands are those of a mixed product."""
    return a @ b if a.dtype == wide else torch.mm(a, b, out_dtype=wide)


def _blocks(head: Head) -> Iterator[tuple[slice, Tensor]]:
    """Yield the shard's vocabulary in blocks, which do not depend on M, with their weight rows."""
    live, hidden = head.weight.shape
    size = max(256, _BLOCK_BYTES // (max(hidden, 1) * head.wide.itemsize))
    size = min(size, _TILE_BYTES // (64 * head.wide.itemsize))
    for begin in range(0, live, size):
        block = slice(begin, min(begin + size, live))
        yield block, head.weight[block].to(head.operand)  # widened once for all tokens


def _tiles(head: Head, block: slice, weight: Tensor) -> Iterator[_Tile]:
    """Yield the logits of all tokens over one block of the vocabulary."""
    tokens, columns = head.x.shape[0], weight.shape[0]
    size = max(1, _TILE_BYTES // (columns * head.wide.itemsize))
    for begin in range(0, tokens, size):
        part = slice(begin, min(begin + size, tokens))
        z = _product(head.x[part].to(head.operand), weight.t(), head.wide)
        index = (head.target[part] - (head.start + block.start)).unsqueeze(1)
        here = (index >= 0) & (index < columns)
        yield _Tile(part, z, index.where(here, 0), here)


def _exponents(z: Tensor, tau: Tensor, anchor: Tensor) -> Tensor:
    """Return u − anchor, in place of z: the difference first, so that an offset costs no digits.

    `tau` and `anchor` are [m] float64; z·log2(e)/τ alone would lose the digits that an anchor of
    the same size cancels.
    """
    scale = LOG2E / tau
    anchor = anchor.masked_fill(anchor == -math.inf, 0.0)
    zero = (anchor / scale).to(z.dtype)
    rest = (zero.to(torch.float64) * scale - anchor).to(z.dtype)
    z.sub_(zero.unsqueeze(1)).mul_(scale.to(z.dtype).unsqueeze(1))
    return z.add_(rest.unsqueeze(1))


# --- statistics -----------------------------------------------------------------------------------


def _local_statistics(head: Head, *, entropy: bool) -> Tensor:
    """Return this rank's (k, S, T, e) as [4, M] float64; k = −inf where it has no mass."""
    tokens = head.x.shape[0]
    sums = head.x.new_zeros((3, tokens), dtype=torch.float64)
    sums[0] = -math.inf
    target_logit = torch.full_like(sums[0], -math.inf)
    for block, weight in _blocks(head):
        for tile in _tiles(head, block, weight):
            part = tile.tokens
            found = tile.z.gather(1, tile.column)
            target_logit[part] = torch.where(tile.here, found, target_logit[part].unsqueeze(1))[
                :, 0
            ]
            sums[:, part] = _merge(
                torch.stack((sums[:, part], _tile_statistics(tile, head.tau[part], entropy)))
            )
    k, S, T = sums
    e = target_logit * (LOG2E / head.tau) - k.masked_fill(k == -math.inf, 0.0)
    return torch.stack((k, S, T, e))


def _tile_statistics(tile: _Tile, tau: Tensor, entropy: bool) -> Tensor:
    """Return (k, S, T) of one tile as [3, m] float64. Overwrites the tile."""
    z = tile.z
    # The target counts for the anchor, which keeps 2^e finite, but not for the sums.
    top = z.amax(1).to(torch.float64)
    z.scatter_(1, tile.column, z.gather(1, tile.column).masked_fill(tile.here, -math.inf))
    # An anchor that float32 holds; its rounding is in e and in the exponents too.
    k = (top * (LOG2E / tau)).ceil().to(torch.float32).to(torch.float64)
    d = _exponents(z, tau, k)
    if not entropy:
        S = d.exp2_().sum(1).to(torch.float64)
        return torch.stack((k, S, torch.full_like(S, math.nan)))
    E = d.exp2()
    T = d.clamp_(min=_FLOOR).mul_(E).sum(1)
    return torch.stack((k, E.sum(1).to(torch.float64), T.to(torch.float64)))


def _tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add in the order of a balanced binary tree over the index: neighbours first."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + list(parts[len(parts) & ~1 :])
    return parts[0]


def _merge(parts: Tensor) -> Tensor:
    """Join (k, S, T) of disjoint parts of the vocabulary: [n, 3, M] → [3, M]."""
    k, S, T = parts.unbind(1)
    K = k.amax(0)
    weight, shift = _weights(k, K)
    return torch.stack(
        (K, _tree_sum((weight * S).unbind()), _tree_sum((weight * (T + shift * S)).unbind()))
    )


def _weights(k: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^(k − K) and k − K, kept finite: without mass it multiplies zeros only."""
    shift = torch.where(k == K, 0.0, k - K).clamp(min=_FLOOR)
    return shift.exp2(), shift


def _merge_ranks(statistics: Tensor) -> _Merged:
    """Join the ranks' (k, S, T, e): [R, 4, M] → statistics over the global vocabulary.

    Rows without any mass become NaN.
    """
    statistics = statistics.to(torch.float64)
    K, S_rest, T = _merge(statistics[:, :3])
    K = K.masked_fill(K.isneginf(), math.nan)
    k, e = statistics[:, 0], statistics[:, 3]
    # −inf on every rank but the target's owner; so is the owner's where p_y = 0.
    e = (e + torch.where(k == -math.inf, 0.0, k - K)).amax(0)
    at_target = e.exp2()
    S = S_rest + at_target
    return _Merged(K, S_rest, S, T + at_target * e.clamp(min=_FLOOR), e)


def _outcome(merged: _Merged) -> tuple[Tensor, Tensor, Tensor]:
    """Return nll, lse and entropy [M] float64, nats; none from another's rounded value."""
    K, S_rest, S, T, e = merged
    log2_S = S.log2()
    # Right to the last digits of S_rest for confident rows; the other form where 2^e is small.
    near = (S_rest / e.exp2()).log1p()
    nll = torch.where(e >= -20.0, near, LN2 * (log2_S - e))
    return nll, LN2 * (K + log2_S), (LN2 * (log2_S - T / S)).clamp(min=0.0)


def forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    exchange: Exchange,
    *,
    vocab_start: int = -1,
    vocab_size: int = -1,
    sequence_parallel: bool = False,
    return_entropy: bool = False,
) -> Output:
    """Compute the loss. Collective over the group of `exchange`.

    x [M, H] and weight [V_r, H] of one floating-point dtype; target [M] int64 or int32, global ids
    or ignore_index; temperature a number or [M]. sequence_parallel: x is this rank's shard of the
    tokens, target and temperature are whole. −1 leaves vocab_start and vocab_size to the group.
    The ranks' header is always exchanged, which waits for the GPU where there is one.

    Raises ValueError, TypeError, the exchange's TimeoutError and RuntimeError; for bad shapes and
    disagreements on every rank of the group. A target out of range or a bad τ in a tensor is an
    error that names the first position on a host; on a GPU that row's results are NaN instead, and
    its gradients 0.
    """
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        head, _ = enter(
            "forward",
            x,
            weight,
            target,
            temperature,
            ignore_index,
            exchange,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            sequence_parallel=sequence_parallel,
            entropy=return_entropy,
            want_input_grad=False,
        )
        statistics = _local_statistics(head, entropy=return_entropy).to(head.wide)
        merged = _merge_ranks(exchange.all_gather(statistics, "statistics"))
        results = torch.stack(_outcome(merged)).masked_fill(head.dead, 0.0)
        if head.invalid is not None:
            results = results.masked_fill(head.invalid, math.nan)
        nll, lse, entropy = results.to(head.wide)
        rows = torch.stack((statistics[0].to(torch.float64), *merged)).masked_fill(head.dead, 0.0)
        return Output(nll, lse, entropy if return_entropy else None, rows.to(head.wide))


# --- gradients ------------------------------------------------------------------------------------


class _Slopes(NamedTuple):
    """dz_iv = p_iv·(a_i + b_i·(mean_i − (u_iv − K_i))) for v ≠ y, [M]; dz_iy = at_target_i."""

    a: Tensor | None  # (g + q)/τ
    b: Tensor | None  # ln2·h/τ
    mean: Tensor  # T/S
    inverse: Tensor  # 1/S
    at_target: Tensor


def _slopes(
    head: Head, rows: _Merged, g: Tensor | None, h: Tensor | None, q: Tensor | None
) -> _Slopes | None:
    """Return the rows' coefficients [M] float64, None where all are zero. Dead rows may be NaN."""
    if g is None and h is None and q is None:
        return None
    g, h, q = (None if v is None else v.to(torch.float64) for v in (g, h, q))
    _, S_rest, S, T, e = rows
    p, mean = e.exp2() / S, T / S
    a = g if q is None else q if g is None else g + q
    at_target = torch.zeros_like(S)
    if g is not None:
        at_target -= g * (S_rest / S)  # 1 − p itself has no digits left where p is near 1
    if q is not None:
        at_target += q * p
    if h is not None:
        at_target += h * p * LN2 * (mean - e.clamp(min=_FLOOR))
    return _Slopes(
        a=None if a is None else a / head.tau,
        b=None if h is None else LN2 * h / head.tau,
        mean=mean,
        inverse=1.0 / S,
        at_target=at_target / head.tau,
    )


def _tile_gradient(tile: _Tile, head: Head, K: Tensor, slopes: _Slopes) -> Tensor:
    """Return dz [m, n] of one tile, exactly 0 in dead rows. Overwrites the tile."""
    part = tile.tokens

    def column(values: Tensor) -> Tensor:
        return values[part].to(head.wide).unsqueeze(1)

    d = _exponents(tile.z, head.tau[part], K[part])
    slope = None if slopes.a is None else column(slopes.a)
    if slopes.b is not None:
        bend = d.clamp(min=_FLOOR).sub_(column(slopes.mean)).mul_(-column(slopes.b))
        slope = bend if slope is None else bend.add_(slope)
    dz = d.exp2_().mul_(column(slopes.inverse))
    if slope is not None:
        dz.mul_(slope)
    target = torch.where(tile.here, column(slopes.at_target), dz.gather(1, tile.column))
    dz.scatter_(1, tile.column, target)
    # By select: 0·NaN of a padded token must not reach anything.
    return dz.masked_fill_(head.dead[part].unsqueeze(1), 0.0)


def _local_gradients(
    head: Head,
    rows: _Merged,
    slopes: _Slopes,
    dx: Tensor | None,
    dw: Tensor | None,
    *,
    accumulate: bool,
) -> None:
    """Add this rank's part of dX to `dx` [M, H] wide; write or add dW to `dw` [live, H]."""
    for block, weight in _blocks(head):
        total: Tensor | None = None
        for tile in _tiles(head, block, weight):
            dz = _tile_gradient(tile, head, rows.K, slopes).to(head.operand)
            if dx is not None:
                dx[tile.tokens] += _product(dz, weight, head.wide)
            if dw is not None:
                x = head.x[tile.tokens].masked_fill(head.dead[tile.tokens].unsqueeze(1), 0.0)
                part = _product(dz.t(), x.to(head.operand), head.wide)
                total = part if total is None else total.add_(part)
        if dw is None or total is None:
            continue
        if accumulate:
            dw[block] += total
        else:
            dw[block] = total  # the one rounding of dW


def _join_input_grad(
    partial: Tensor,
    offsets: Sequence[int],
    dtype: torch.dtype,
    exchange: Exchange,
    *,
    keep_shard: bool,
) -> Tensor:
    """Sum the ranks' [M, H] in the order of a tree and round once: equal bits on every rank.

    Rank r sums the tokens from offsets[r] to offsets[r + 1] and keeps them, or all are gathered.
    Collective.
    """
    if exchange.size == 1:
        return partial.to(dtype)
    sizes = [end - begin for begin, end in pairwise(offsets)]
    send = partial.new_zeros((exchange.size, max(sizes), partial.shape[1]))
    for rank, size in enumerate(sizes):
        send[rank, :size] = partial[offsets[rank] : offsets[rank] + size]
    received = exchange.all_to_all(send, "input gradient")
    owned = _tree_sum(received.unbind()).to(dtype)
    if keep_shard:
        return owned[: sizes[exchange.rank]].contiguous()
    blocks = exchange.all_gather(owned, "rounded input gradient")
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def backward(
    grad_nll: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    exchange: Exchange,
    rows: Tensor,
    *,
    vocab_start: int = -1,
    vocab_size: int = -1,
    sequence_parallel: bool = False,
    want_input_grad: bool = True,
    want_weight_grad: bool = True,
    main_grad: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and weight from forward's `rows`. Collective.

    Upstream gradients [M], equal on all ranks; an absent one is zero and costs nothing. The
    gradient of the entropy needs rows of a forward with return_entropy. dx is like x, summed over
    the ranks; it is computed if any rank wants it. dw is like weight and 0 beyond the vocabulary;
    with `main_grad` [V_r, H] it is added to that instead, and None. Raises what forward raises.
    """
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        head, agreed = enter(
            "backward",
            x,
            weight,
            target,
            temperature,
            ignore_index,
            exchange,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            sequence_parallel=sequence_parallel,
            entropy=grad_entropy is not None,
            want_input_grad=want_input_grad,
        )
        partial = dx = dw = None
        if agreed.any_want_input_grad:
            partial = torch.zeros(head.x.shape, dtype=head.wide, device=x.device)
        if want_weight_grad:
            dw = torch.zeros_like(weight) if main_grad is None else main_grad
        merged = _Merged(*rows.to(torch.float64)[1:])
        slopes = _slopes(head, merged, grad_nll, grad_entropy, grad_lse)
        if slopes is not None and not (partial is None and dw is None):
            live = None if dw is None else dw[: head.weight.shape[0]]
            _local_gradients(head, merged, slopes, partial, live, accumulate=main_grad is not None)
        if partial is not None:
            partial.masked_fill_(head.dead.unsqueeze(1), 0.0)
            dx = _join_input_grad(
                partial, agreed.token_offsets, x.dtype, exchange, keep_shard=sequence_parallel
            )
        return dx if want_input_grad else None, dw if main_grad is None else None
