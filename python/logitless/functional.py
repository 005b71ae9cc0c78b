# SPDX-License-Identifier: Apache-2.0
"""`linear_cross_entropy`: the loss of a language-model head without its logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _groups, _memory, _ops
from ._backends import CPU, selected

__all__ = ["HeadLoss", "linear_cross_entropy"]

_REDUCTIONS = ("none", "sum", "mean")


class HeadLoss(NamedTuple):
    """What `linear_cross_entropy` returns where more than the loss is asked for."""

    loss: Tensor  # reduced, or target's shape; nats
    entropy: Tensor | None  # target's shape; nats
    lse: Tensor | None  # target's shape; nats


class _Call(NamedTuple):
    """Checked arguments, flattened over tokens."""

    x: Tensor
    weight: Tensor
    target: Tensor
    temperature_per_token: Tensor | None
    temperature: float
    vocab_start: int
    vocab_size: int
    keep_for_backward: bool
    columns: int
    backend: str
    group: str


def _require_tensor(name: str, value: object) -> Tensor:
    kind = type(value).__name__
    if isinstance(value, torch.nn.Module):
        raise TypeError(
            f"{name}: expected a tensor, got the module {kind} (pass its weight; an adapter's "
            "weight has to be merged first, or it would not be trained)"
        )
    if kind == "DTensor":
        raise TypeError(
            f"{name}: expected a plain tensor, got a DTensor (pass to_local() of a DTensor that "
            "is sharded over the vocabulary, full_tensor() of any other)"
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {kind}")
    return value


def _check_shapes(x: Tensor, weight: Tensor, target: Tensor, sequence_parallel: bool) -> None:
    if weight.dim() != 2 or weight.numel() == 0:
        hint = " (a parameter that ZeRO-3 or FSDP has not gathered?)" if weight.numel() == 0 else ""
        raise ValueError(f"weight: expected [V_r, H], got shape {tuple(weight.shape)}{hint}")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "hidden: expected x.shape[-1] == weight.shape[1], got shapes "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if sequence_parallel:
        if x.dim() != 2 or target.dim() != 1:
            raise ValueError(
                "sequence_parallel: expected x [M_r, H] and target [M], got shapes "
                f"{tuple(x.shape)} and {tuple(target.shape)}"
            )
    elif x.shape[:-1] != target.shape:
        raise ValueError(
            "tokens: expected x.shape[:-1] == target.shape, got "
            f"{tuple(x.shape[:-1])} and {tuple(target.shape)}"
        )


def _check_kinds(x: Tensor, weight: Tensor, target: Tensor) -> None:
    if not x.dtype.is_floating_point or x.dtype != weight.dtype:
        raise TypeError(
            "dtype: expected x and weight of one floating-point dtype, got "
            f"{x.dtype} and {weight.dtype}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target: expected int64 or int32, got {target.dtype}")
    for name, tensor in (("weight", weight), ("target", target)):
        if tensor.device != x.device:
            raise TypeError(f"{name}: expected the device of x, {x.device}, got {tensor.device}")


def _temperature(
    temperature: float | Tensor, target: Tensor, device: torch.device
) -> tuple[Tensor | None, float]:
    """Return τ per token [M] float32, or None and one number."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float, Tensor)):
        raise TypeError(
            "temperature: expected a number or a tensor, got " + type(temperature).__name__
        )
    if not isinstance(temperature, Tensor):
        return None, float(temperature)
    if temperature.requires_grad:
        raise ValueError(
            "temperature: expected a tensor without gradient, got one that requires it"
        )
    if temperature.device != device:
        raise TypeError(
            f"temperature: expected the device of x, {device}, got {temperature.device}"
        )
    per_token = temperature.to(torch.float32)
    if temperature.numel() == 1 and temperature.dim() <= 1:
        # No look at its value: that would wait for a GPU.
        return per_token.reshape(1).expand(target.numel()), 1.0
    if temperature.shape != target.shape:
        raise ValueError(
            "temperature: expected one number or target's shape "
            f"{tuple(target.shape)}, got shape {tuple(temperature.shape)}"
        )
    return per_token.reshape(-1), 1.0


def _checked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    group: _groups.ProcessGroup | None,
    temperature: float | Tensor,
    memory: str | int,
    sequence_parallel: bool,
    vocab_size: int | None,
    vocab_start: int | None,
    main_grad: Tensor | None,
    reduction: str,
) -> _Call:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: expected one of {_REDUCTIONS}, got {reduction!r}")
    x = _require_tensor("x", x)
    weight = _require_tensor("weight", weight)
    target = _require_tensor("target", target)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    _check_shapes(x, weight, target, sequence_parallel)
    _check_kinds(x, weight, target)
    per_token, tau = _temperature(temperature, target, x.device)
    if main_grad is not None:
        if main_grad.shape != weight.shape:
            raise ValueError(
                f"main_grad: expected weight's shape {tuple(weight.shape)}, "
                f"got {tuple(main_grad.shape)}"
            )
        if main_grad.dtype not in (torch.float32, weight.dtype):
            raise TypeError(f"main_grad: expected float32 or {weight.dtype}, got {main_grad.dtype}")
    for name, value, least in (("vocab_size", vocab_size, 1), ("vocab_start", vocab_start, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    encoded = _memory.encode(memory)
    backend = selected(x.device.type, x.dtype)
    keep = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    columns = 0
    if keep and backend == CPU:
        live = weight.shape[0]
        if vocab_size is not None and (vocab_start is not None or group is None):
            live = max(0, min(live, vocab_size - (vocab_start or 0)))
        columns = _memory.stash_columns(target.numel(), live, x.element_size(), encoded)
    return _Call(
        x=x.reshape(-1, x.shape[-1]),
        weight=weight,
        target=target.reshape(-1),
        temperature_per_token=per_token,
        temperature=tau,
        vocab_start=-1 if vocab_start is None else vocab_start,
        vocab_size=-1 if vocab_size is None else vocab_size,
        keep_for_backward=keep,
        columns=columns,
        backend=backend,
        group=_groups.group_name(group),
    )


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: _groups.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    reduction: str = "none",
    return_entropy: bool = False,
    return_lse: bool = False,
    memory: str | int = "auto",
    sequence_parallel: bool = False,
    vocab_size: int | None = None,
    vocab_start: int | None = None,
    main_grad: Tensor | None = None,
    assume_uniform: bool = False,
) -> Tensor | HeadLoss:
    """Return the cross entropy of the head `x Wᵀ/τ` against `target`, without the logits.

        s = x Wᵀ/τ    lse_i = log Σ_v exp(s_iv)    nll_i = lse_i − s_{i,y_i}
        entropy_i = lse_i − Σ_v p_iv s_iv, p = exp(s − lse)

    over the global vocabulary, whose rows may be split over the ranks of `group` (docs/design.md,
    section 1). Differentiable once with respect to x and weight.

    Args:
        x: [..., H] bfloat16 or float32 (others, and GPUs today, by chunked PyTorch), equal on all
            ranks; with sequence_parallel [M_r, H], this rank's contiguous shard of the tokens.
        weight: [V_r, H] of x's dtype and device: this rank's rows of the global weight.
        target: [...] int64 or int32 global ids, equal on all ranks: x's shape without H (with
            sequence_parallel [M], all tokens). It is never shifted.
        group: the tensor-parallel torch.distributed group; None is one rank. Every rank of it has
            to make the same calls, forward and backward, in the same order.
        temperature: τ, a positive number, or a float tensor of one element or of target's shape
            (no gradient).
        ignore_index: tokens with this target have loss, lse and entropy 0 and no gradient.
        reduction: "none" (target's shape), "sum", or "mean" over the tokens that are not ignored
            (0, with zero gradients, where there are none).
        return_entropy: also the entropy in nats, per token; it costs nothing when not asked for.
        return_lse: also the logarithm of the partition function in nats, per token.
        memory: what backward may find kept from forward: "auto", "stash" (exponentials of the
            logits: three matrix products a step), "recompute" (none: four), or a bound in bytes.
        sequence_parallel: x is gathered where it is used, and its gradient stays scattered.
        vocab_size: ids from here on are padding and masked. Default: all rows of the group.
        vocab_start: first global id of `weight`. Default: agreed by the group, in rank order.
        main_grad: [V_r, H] float32 or weight's dtype: the weight's gradient is added here, and
            weight.grad stays as it is.
        assume_uniform: the ranks vouch that their calls agree; saves the exchange of a header.

    Returns:
        The loss [...] or [] in float32 (float64 for float64 x), or, with return_entropy or
        return_lse, a HeadLoss of loss, entropy and lse, None for what was not asked for.

    Raises:
        ValueError, TypeError: bad or disagreeing arguments, on every rank of the group.
        TimeoutError: a rank of the group did not come in the group's time.
        RuntimeError: a workspace that is configured too small; a second differentiation.
    """
    try:
        call = _checked(
            x,
            weight,
            target,
            group,
            temperature,
            memory,
            sequence_parallel,
            vocab_size,
            vocab_start,
            main_grad,
            reduction,
        )
    except (TypeError, ValueError) as error:
        # Peers that vouch for this call exchange no header that an announcement could meet.
        if assume_uniform or not isinstance(group, _groups.ProcessGroup):
            raise
        raise _groups.announced(_groups.exchange(group), "forward", error) from error
    nll, lse, entropy, _, _ = _ops.forward(
        call.x,
        call.weight,
        call.target,
        call.temperature_per_token,
        call.temperature,
        ignore_index,
        call.vocab_start,
        call.vocab_size,
        sequence_parallel,
        assume_uniform,
        return_entropy,
        call.keep_for_backward,
        call.columns,
        main_grad,
        call.backend,
        call.group,
    )
    loss: Tensor = nll.reshape(target.shape)
    if reduction != "none":
        loss = nll.sum()
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum().clamp(min=1)
    if not (return_entropy or return_lse):
        return loss
    return HeadLoss(
        loss,
        entropy.reshape(target.shape) if return_entropy else None,
        lse.reshape(target.shape) if return_lse else None,
    )
