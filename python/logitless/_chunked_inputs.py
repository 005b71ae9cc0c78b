# SPDX-License-Identifier: Apache-2.0
"""What a chunked call does before it computes: check, agree with the group, gather its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from ._groups import Exchange, announced
from ._library import Agreement, Call

__all__ = ["LOG2E", "Head", "enter", "has_mixed_product"]

LOG2E = 1.0 / math.log(2.0)


class Head(NamedTuple):
    """One rank's part of a call, checked and agreed on."""

    x: Tensor  # [M, H], of the whole group
    weight: Tensor  # [live, H]: rows beyond the vocabulary are cut off
    target: Tensor  # [M] int64; −1 where `dead`
    dead: Tensor  # [M] bool: ignored, or invalid
    invalid: Tensor | None  # [M] bool: a bad target or temperature, found on a GPU
    tau: Tensor  # [M] float64
    start: int  # global id of weight[0]
    wide: torch.dtype  # in which is accumulated
    operand: torch.dtype  # to which the operands of the products are widened


@lru_cache
def has_mixed_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether this PyTorch multiplies `dtype` with a float32 result on `device`."""
    if device.type == "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return False
    probe = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return True


def _check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float | Tensor,
    *,
    sequence_parallel: bool,
) -> None:
    """Raise ValueError or TypeError for what this rank can see alone."""
    if x.dim() != 2 or weight.dim() != 2 or target.dim() != 1:
        raise ValueError(
            "shapes: expected x [M, H], weight [V, H] and target [M], "
            f"got {list(x.shape)}, {list(weight.shape)} and {list(target.shape)}"
        )
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden: expected x.shape[1] == weight.shape[1], got {x.shape[1]} and "
            f"{weight.shape[1]}"
        )
    if not sequence_parallel and x.shape[0] != target.shape[0]:
        raise ValueError(
            f"tokens: expected x.shape[0] == target.shape[0], got {x.shape[0]} and "
            f"{target.shape[0]}"
        )
    if not x.is_floating_point() or x.dtype != weight.dtype:
        raise TypeError(
            f"dtype: expected x and weight of one floating-point dtype, got {x.dtype} and "
            f"{weight.dtype}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target: expected int64 or int32, got {target.dtype}")
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(
                f"temperature: expected a number or shape {list(target.shape)}, "
                f"got {list(temperature.shape)}"
            )
    elif not _usable(temperature):
        raise ValueError(
            f"temperature: expected a positive number with finite log2(e)/τ, got {temperature}"
        )
    for name, tensor in (("weight", weight), ("target", target), ("temperature", temperature)):
        if isinstance(tensor, Tensor) and tensor.device != x.device:
            raise TypeError(f"device: expected {name} on {x.device}, got {tensor.device}")


def _usable(temperature: float) -> bool:
    # In float32, in which logits are scaled.
    return 0.0 < temperature < math.inf and LOG2E / temperature <= torch.finfo(torch.float32).max


def _fingerprint(weight: Tensor) -> int:
    """Return a number by which the group notices that all ranks got the same weight, else 0.

    Of the first, middle and last rows; 0 where they say nothing: no rows, or one value throughout.
    """
    if weight.numel() == 0:
        return 0
    sample = torch.stack([weight[row] for row in (0, weight.shape[0] // 2, -1)]).cpu()
    if (sample == sample[0, 0]).all():
        return 0
    return 1 + crc32(bytes(sample.view(torch.uint8).flatten().tolist()))


def enter(
    step: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    exchange: Exchange,
    *,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool,
    entropy: bool,
    want_input_grad: bool,
) -> tuple[Head, Agreement]:
    """Check, agree with the group, and gather what is sharded. Collective.

    `step` is "forward" or "backward". A rank that finds its own arguments wrong says so to the
    others, which then raise too.
    """
    # Ranks that compute by different backends exchange different things: they must not start.
    phase = f"chunk {step}"
    try:
        _check(x, weight, target, temperature, sequence_parallel=sequence_parallel)
    except (TypeError, ValueError) as error:
        raise announced(exchange, phase, error) from error
    agreed = exchange.agree(
        Call(
            phase=phase,
            tokens=target.shape[0],
            x_tokens=x.shape[0],
            hidden=x.shape[1],
            vocab_rows=weight.shape[0],
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            dtype=str(x.dtype).removeprefix("torch."),
            entropy=entropy,
            per_token_temperature=isinstance(temperature, Tensor),
            temperature=1.0 if isinstance(temperature, Tensor) else temperature,
            ignore_index=ignore_index,
            sequence_parallel=sequence_parallel,
            fingerprint=0 if exchange.size == 1 else _fingerprint(weight),
            want_input_grad=want_input_grad,
        )
    )
    ids, dead, invalid = _targets(target, ignore_index, agreed.vocab_size)
    tau, bad_tau = _temperatures(temperature, ids, dead)
    if bad_tau is not None:
        dead = dead | bad_tau
        invalid = bad_tau if invalid is None else invalid | bad_tau
    if sequence_parallel:
        x = _gather_tokens(x, agreed.token_offsets, exchange)
    live = min(max(agreed.vocab_size - agreed.vocab_start, 0), weight.shape[0])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # The gradient of the logits has entries far below float16's smallest, but not bfloat16's.
    narrow = step == "forward" or x.dtype == torch.bfloat16
    operand = x.dtype if narrow and has_mixed_product(x.device, x.dtype) else wide
    ids = ids.masked_fill(dead, -1)
    head = Head(x, weight[:live], ids, dead, invalid, tau, agreed.vocab_start, wide, operand)
    return head, agreed


def _targets(
    target: Tensor, ignore_index: int, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the targets as int64, which are dead, and (on a GPU) which are out of range.

    A host raises ValueError for the first of those; a GPU is not waited for, and makes their
    results NaN and their gradients 0.
    """
    ids = target.to(torch.int64)
    ignored = ids == ignore_index
    outside = ((ids < 0) | (ids >= vocab_size)) & ~ignored
    if not target.is_cpu:
        return ids, ignored | outside, outside
    if outside.any():
        first = int(outside.nonzero()[0])
        raise ValueError(
            f"target: expected ids in [0, {vocab_size}) or ignore_index {ignore_index}, "
            f"got {int(ids[first])} at position {first}"
        )
    return ids, ignored, None


def _temperatures(
    temperature: float | Tensor, ids: Tensor, dead: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return τ [M] float64, 1 where dead or bad, and (on a GPU) where it is bad."""
    if not isinstance(temperature, Tensor):
        return torch.full(ids.shape, temperature, dtype=torch.float64, device=ids.device), None
    tau = temperature.to(torch.float64)
    limit = torch.finfo(torch.float32).max
    bad = ~((tau > 0) & (tau < math.inf) & (LOG2E / tau <= limit)) & ~dead
    if temperature.is_cpu and bad.any():
        first = int(bad.nonzero()[0])
        raise ValueError(
            "temperature: expected positive numbers with finite log2(e)/τ, "
            f"got {float(tau[first])} at position {first}"
        )
    return tau.masked_fill(dead | bad, 1.0), None if temperature.is_cpu else bad


def _gather_tokens(shard: Tensor, offsets: Sequence[int], exchange: Exchange) -> Tensor:
    """Return [M, H] from the ranks' token shards, which may differ in size. Collective."""
    sizes = [end - begin for begin, end in pairwise(offsets)]
    padded = shard.new_zeros((max(sizes), shard.shape[1]))
    padded[: shard.shape[0]] = shard
    blocks = exchange.all_gather(padded, "x")
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
