# SPDX-License-Identifier: Apache-2.0
"""The operation as `torch.library` custom operators: what `torch.compile` sees, and autograd.

Operators take only what a graph can hold: tensors, numbers, and the group by its name. The stash
and the rows are outputs of the forward operator, so that autograd owns them: any number of calls
may be in flight, a backward may be repeated, and everything is freed with the graph.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _chunked, _groups, _library
from ._backends import CPU, set_last_backend
from ._memory import token_pitch

__all__ = ["forward"]


class _Announced:
    """Tells the group of an error that only this rank saw, before the exchange begins.

    Not with assume_uniform: the peers then exchange no header, and one among their data would end
    their processes (Gloo's own thread terminates on a message of another size).
    """

    def __init__(self, group: str, phase: str, assume_uniform: bool) -> None:
        self.group, self.phase, self.silent = group, phase, assume_uniform

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not self.silent:
            exchange = _groups.exchange(_groups.group_of(self.group))
            raise _groups.announced(exchange, self.phase, error) from error


def _unit_stride(weight: Tensor) -> Tensor:
    """Return the weight itself where the native products can walk it, else a contiguous copy."""
    rows, columns = weight.shape
    by_row = weight.stride(1) == 1 and weight.stride(0) >= columns
    by_column = weight.stride(0) == 1 and weight.stride(1) >= rows
    return weight if by_row or by_column else weight.contiguous()


@torch.library.custom_op("logitless::forward", mutates_args=())
def forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature_per_token: Tensor | None,
    temperature: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool,
    assume_uniform: bool,
    return_entropy: bool,
    keep_for_backward: bool,
    columns: int,
    main_grad: Tensor | None,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return nll, lse, entropy ([0] where not asked for), and what backward needs.

    x [M, H], weight [V_r, H], target [M]; `columns` vocabulary rows are stashed. main_grad is not
    touched here: it is where backward adds the weight's gradient.
    """
    members = _groups.group_of(group)
    if backend != CPU:
        tau = temperature if temperature_per_token is None else temperature_per_token
        out = _chunked.forward(
            x,
            weight,
            target,
            tau,
            ignore_index,
            _groups.exchange(members),
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            sequence_parallel=sequence_parallel,
            return_entropy=return_entropy,
        )
        set_last_backend(backend)
        # Operators may not return views of one tensor.
        entropy = (
            x.new_empty(0, dtype=out.nll.dtype) if out.entropy is None else out.entropy.clone()
        )
        rows = out.rows if keep_for_backward else out.rows.new_empty((6, 0))
        return out.nll.clone(), out.lse.clone(), entropy, rows, x.new_empty((0, 0))
    tokens = target.shape[0]
    with _Announced(group, "forward", assume_uniform):
        x, weight, target = x.detach(), _unit_stride(weight.detach()), target.detach()
        nll = x.new_empty(tokens, dtype=torch.float32)
        lse = torch.empty_like(nll)
        entropy = x.new_empty(tokens if return_entropy else 0, dtype=torch.float32)
        rows = x.new_empty((6, tokens if keep_for_backward else 0), dtype=torch.float32)
        stash = x.new_empty((columns, token_pitch(tokens) if columns else 0))
        context = _groups.context(members)
    _library.forward_into(
        x,
        weight,
        target,
        temperature_per_token,
        temperature,
        ignore_index,
        vocab_start,
        vocab_size,
        sequence_parallel,
        assume_uniform,
        nll,
        lse,
        entropy if return_entropy else None,
        rows if keep_for_backward else None,
        stash if columns else None,
        context,
    )
    set_last_backend(backend)
    return nll, lse, entropy, rows, stash


@forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature_per_token: Tensor | None,
    temperature: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool,
    assume_uniform: bool,
    return_entropy: bool,
    keep_for_backward: bool,
    columns: int,
    main_grad: Tensor | None,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens = target.shape[0]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(tokens, dtype=dtype),
        x.new_empty(tokens, dtype=dtype),
        x.new_empty(tokens if return_entropy else 0, dtype=dtype),
        x.new_empty((6, tokens if keep_for_backward else 0), dtype=dtype),
        x.new_empty((columns, token_pitch(tokens) if columns else 0)),
    )


def _gradients(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature_per_token: Tensor | None,
    temperature: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool,
    assume_uniform: bool,
    rows: Tensor,
    stash: Tensor,
    want_input_grad: bool,
    want_weight_grad: bool,
    main_grad: Tensor | None,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return dx and dw, each [0] where not wanted; with main_grad dw is added there instead."""
    members = _groups.group_of(group)
    nothing = x.new_empty(0)
    if backend != CPU:
        tau = temperature if temperature_per_token is None else temperature_per_token
        dx, dw = _chunked.backward(
            *grads,
            x,
            weight,
            target,
            tau,
            ignore_index,
            _groups.exchange(members),
            rows,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            sequence_parallel=sequence_parallel,
            want_input_grad=want_input_grad,
            want_weight_grad=want_weight_grad,
            main_grad=main_grad if want_weight_grad else None,
        )
        set_last_backend(backend)
        return nothing if dx is None else dx, nothing if dw is None else dw
    with _Announced(group, "backward", assume_uniform):
        g, h, q = (None if u is None else u.detach().to(torch.float32) for u in grads)
        walkable = _unit_stride(weight.detach())
        dx = x.new_empty(x.shape) if want_input_grad else None
        dw = None
        if want_weight_grad:
            dw = weight.new_empty(weight.shape) if main_grad is None else main_grad
        context = _groups.context(members)
    _library.backward_into(
        g,
        h,
        q,
        x.detach(),
        walkable,
        target.detach(),
        temperature_per_token,
        temperature,
        ignore_index,
        vocab_start,
        vocab_size,
        sequence_parallel,
        assume_uniform,
        rows.detach(),
        stash.detach() if stash.shape[0] else None,
        dx,
        dw,
        main_grad is not None,
        context,
    )
    set_last_backend(backend)
    fresh = dw is not None and main_grad is None
    return nothing if dx is None else dx, dw if fresh else nothing.clone()  # type: ignore[return-value]


@torch.library.custom_op("logitless::backward", mutates_args=())
def backward(
    grad_nll: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature_per_token: Tensor | None,
    temperature: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool,
    assume_uniform: bool,
    rows: Tensor,
    stash: Tensor,
    want_input_grad: bool,
    want_weight_grad: bool,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return dx [M, H] and dw [V_r, H], each [0] where not wanted."""
    return _gradients(
        (grad_nll, grad_entropy, grad_lse),
        x,
        weight,
        target,
        temperature_per_token,
        temperature,
        ignore_index,
        vocab_start,
        vocab_size,
        sequence_parallel,
        assume_uniform,
        rows,
        stash,
        want_input_grad,
        want_weight_grad,
        None,
        backend,
        group,
    )


@backward.register_fake
def _(
    grad_nll: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    want_input_grad, want_weight_grad = rest[-4], rest[-3]
    dx = x.new_empty(x.shape) if want_input_grad else x.new_empty(0)
    dw = weight.new_empty(weight.shape) if want_weight_grad else x.new_empty(0)
    return dx, dw


@torch.library.custom_op("logitless::backward_accumulate", mutates_args=("main_grad",))
def backward_accumulate(
    grad_nll: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature_per_token: Tensor | None,
    temperature: float,
    ignore_index: int,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool,
    assume_uniform: bool,
    rows: Tensor,
    stash: Tensor,
    want_input_grad: bool,
    main_grad: Tensor,
    backend: str,
    group: str,
) -> Tensor:
    """Return dx, or [0] where not wanted; add the weight's gradient to main_grad [V_r, H]."""
    return _gradients(
        (grad_nll, grad_entropy, grad_lse),
        x,
        weight,
        target,
        temperature_per_token,
        temperature,
        ignore_index,
        vocab_start,
        vocab_size,
        sequence_parallel,
        assume_uniform,
        rows,
        stash,
        want_input_grad,
        True,
        main_grad,
        backend,
        group,
    )[0]


@backward_accumulate.register_fake
def _(
    grad_nll: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    x: Tensor,
    *rest: Any,
) -> Tensor:
    return x.new_empty(x.shape) if rest[-4] else x.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, target, temperature_per_token = inputs[:4]
    *_, rows, stash = output
    ctx.set_materialize_grads(False)  # an absent gradient costs nothing
    ctx.mark_non_differentiable(rows, stash)
    ctx.save_for_backward(x, weight, target, temperature_per_token, rows, stash)
    ctx.options = inputs[4:10]  # temperature … assume_uniform
    ctx.entropy = inputs[10]
    ctx.main_grad, ctx.backend, ctx.group = inputs[-3:]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_nll, grad_lse = grads[:2]
    grad_entropy = grads[2] if ctx.entropy else None  # [0] where there is no entropy
    none: tuple[None, ...] = (None,) * 16
    if grad_nll is None and grad_lse is None and grad_entropy is None:
        return none
    x, weight, target, temperature_per_token, rows, stash = ctx.saved_tensors
    want_input_grad, want_weight_grad = ctx.needs_input_grad[:2]
    call = (
        grad_nll,
        grad_entropy,
        grad_lse,
        x,
        weight,
        target,
        temperature_per_token,
        *ctx.options,
        rows,
        stash,
        want_input_grad,
    )
    if ctx.main_grad is not None and want_weight_grad:
        dx = backward_accumulate(*call, ctx.main_grad, ctx.backend, ctx.group)
        dw = None
    else:
        dx, dw = backward(*call, want_weight_grad, ctx.backend, ctx.group)
    return (dx if want_input_grad else None, dw if want_weight_grad else None, *none[2:])


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(
        "linear_cross_entropy: expected one differentiation, got a second one "
        "(the gradients' own gradients are not implemented)"
    )


torch.library.register_autograd("logitless::forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("logitless::backward", _refuse)
