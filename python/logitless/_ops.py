# SPDX-License-Identifier: Apache-2.0
"""The operation as `torch.library` custom operators: what `torch.compile` sees, and autograd.

Operators take only what a graph can hold: tensors, numbers, and the group by its name. The stash
and the rows are outputs of the forward operator, so that autograd owns them: any number of calls
may be in flight, a backward may be repeated, and everything is freed with the graph.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from . import _chunked, _groups, _library
from ._backends import CPU, set_last_backend
from ._library import Operands
from ._memory import token_pitch

__all__ = ["forward"]

_Grads: TypeAlias = tuple["Tensor | None", "Tensor | None", "Tensor | None"]

# Every operator begins like Operands; the gradients come first where there are any.
_OPERANDS = (
    "Tensor x, Tensor weight, Tensor target, Tensor? temperature_per_token, float temperature, "
    "SymInt ignore_index, SymInt vocab_start, SymInt vocab_size, bool sequence_parallel, "
    "bool assume_uniform"
)
_GRADS = "Tensor? grad_nll, Tensor? grad_entropy, Tensor? grad_lse"
_BACKEND = "str backend, str group"
_COUNT = len(Operands._fields)


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


def _native(operands: Operands) -> Operands:
    """Return the operands as the native products can walk them: a copy of the weight if need be."""
    weight = operands.weight.detach()
    rows, columns = weight.shape
    by_row = weight.stride(1) == 1 and weight.stride(0) >= columns
    by_column = weight.stride(0) == 1 and weight.stride(1) >= rows
    return operands._replace(
        x=operands.x.detach(),
        weight=weight if by_row or by_column else weight.contiguous(),
        target=operands.target.detach(),
    )


def _chunked_arguments(operands: Operands, group: str) -> tuple[list[Any], dict[str, Any]]:
    """Return what the chunked fallback takes of the operands, by position and by name."""
    per_token = operands.temperature_per_token
    places = [
        operands.x,
        operands.weight,
        operands.target,
        operands.temperature if per_token is None else per_token,
        operands.ignore_index,
        _groups.exchange(_groups.group_of(group)),
    ]
    names = {
        "vocab_start": operands.vocab_start,
        "vocab_size": operands.vocab_size,
        "sequence_parallel": operands.sequence_parallel,
    }
    return places, names


# --- forward --------------------------------------------------------------------------------------


def _empty_outputs(
    operands: Operands, return_entropy: bool, keep_for_backward: bool, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, tokens = operands.x, operands.target.shape[0]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(tokens, dtype=dtype),
        x.new_empty(tokens, dtype=dtype),
        x.new_empty(tokens if return_entropy else 0, dtype=dtype),
        x.new_empty((6, tokens if keep_for_backward else 0), dtype=dtype),
        x.new_empty((columns, token_pitch(tokens) if columns else 0)),
    )


@torch.library.custom_op(
    "logitless::forward",
    mutates_args=(),
    schema=f"({_OPERANDS}, bool return_entropy, bool keep_for_backward, SymInt columns, "
    f"Tensor? main_grad, {_BACKEND}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return nll, lse, entropy ([0] where not asked for), and what backward needs.

    x [M, H], weight [V_r, H], target [M]; `columns` vocabulary rows are stashed. main_grad is not
    touched here: it is where backward adds the weight's gradient.
    """
    operands = Operands(*arguments[:_COUNT])
    return_entropy, keep_for_backward, columns, _, backend, group = arguments[_COUNT:]
    if backend != CPU:
        outputs = _forward_chunked(operands, return_entropy, keep_for_backward, group)
        set_last_backend(backend)
        return outputs
    with _Announced(group, "forward", operands.assume_uniform):
        native = _native(operands)
        outputs = _empty_outputs(operands, return_entropy, keep_for_backward, columns)
        context = _groups.context(_groups.group_of(group))
    nll, lse, entropy, rows, stash = outputs
    _library.forward_into(
        *native,
        nll,
        lse,
        entropy if return_entropy else None,
        rows if keep_for_backward else None,
        stash if columns else None,
        context,
    )
    set_last_backend(backend)
    return outputs


@forward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return_entropy, keep_for_backward, columns = arguments[_COUNT : _COUNT + 3]
    operands = Operands(*arguments[:_COUNT])
    return _empty_outputs(operands, return_entropy, keep_for_backward, columns)


def _forward_chunked(
    operands: Operands, return_entropy: bool, keep_for_backward: bool, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    places, names = _chunked_arguments(operands, group)
    out = _chunked.forward(*places, **names, return_entropy=return_entropy)
    # Operators may not return views of one tensor.
    entropy = out.nll.new_empty(0) if out.entropy is None else out.entropy.clone()
    rows = out.rows if keep_for_backward else out.rows.new_empty((6, 0))
    return out.nll.clone(), out.lse.clone(), entropy, rows, operands.x.new_empty((0, 0))


# --- backward -------------------------------------------------------------------------------------


def _gradients(
    grads: _Grads,
    operands: Operands,
    rows: Tensor,
    stash: Tensor,
    wanted: tuple[bool, bool],
    main_grad: Tensor | None,
    backend: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return dx and dw, each [0] where not wanted; with main_grad dw is added there instead."""
    want_input_grad, want_weight_grad = wanted
    if backend != CPU:
        places, names = _chunked_arguments(operands, group)
        dx, dw = _chunked.backward(
            *[*grads, *places, rows],
            **names,
            want_input_grad=want_input_grad,
            want_weight_grad=want_weight_grad,
            main_grad=main_grad if want_weight_grad else None,
        )
    else:
        with _Announced(group, "backward", operands.assume_uniform):
            native = _native(operands)
            upstream = [None if g is None else g.detach().to(torch.float32) for g in grads]
            dx = native.x.new_empty(native.x.shape) if want_input_grad else None
            dw = main_grad
            if want_weight_grad and main_grad is None:
                dw = native.weight.new_empty(native.weight.shape)
            context = _groups.context(_groups.group_of(group))
        _library.backward_into(
            *upstream,
            *native,
            rows.detach(),
            stash.detach() if stash.shape[0] else None,
            dx,
            dw,
            main_grad is not None,
            context,
        )
    set_last_backend(backend)
    if dx is None:
        dx = operands.x.new_empty(0)
    if dw is None or dw is main_grad:
        dw = operands.x.new_empty(0)
    return dx, dw


@torch.library.custom_op(
    "logitless::backward",
    mutates_args=(),
    schema=f"({_GRADS}, {_OPERANDS}, Tensor rows, Tensor stash, bool want_input_grad, "
    f"bool want_weight_grad, {_BACKEND}) -> (Tensor, Tensor)",
)
def backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return dx [M, H] and dw [V_r, H], each [0] where not wanted."""
    operands = Operands(*arguments[3 : 3 + _COUNT])
    rows, stash, want_input_grad, want_weight_grad, backend, group = arguments[3 + _COUNT :]
    wanted = (want_input_grad, want_weight_grad)
    return _gradients(arguments[:3], operands, rows, stash, wanted, None, backend, group)


@backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    x, weight = arguments[3:5]
    want_input_grad, want_weight_grad = arguments[-4:-2]
    dx = x.new_empty(x.shape if want_input_grad else 0)
    return dx, weight.new_empty(weight.shape if want_weight_grad else 0)


@torch.library.custom_op(
    "logitless::backward_accumulate",
    mutates_args=("main_grad",),
    schema=f"({_GRADS}, {_OPERANDS}, Tensor rows, Tensor stash, bool want_input_grad, "
    f"Tensor(a!) main_grad, {_BACKEND}) -> Tensor",
)
def backward_accumulate(*arguments: Any) -> Tensor:
    """Return dx, or [0] where not wanted; add the weight's gradient to main_grad [V_r, H]."""
    operands = Operands(*arguments[3 : 3 + _COUNT])
    rows, stash, want_input_grad, main_grad, backend, group = arguments[3 + _COUNT :]
    wanted = (want_input_grad, True)
    return _gradients(arguments[:3], operands, rows, stash, wanted, main_grad, backend, group)[0]


@backward_accumulate.register_fake
def _(*arguments: Any) -> Tensor:
    x, want_input_grad = arguments[3], arguments[-4]
    return x.new_empty(x.shape if want_input_grad else 0)  # type: ignore[no-any-return]


# --- autograd -------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, target, temperature_per_token = inputs[:4]
    *_, rows, stash = output
    ctx.set_materialize_grads(False)  # an absent gradient costs nothing
    ctx.mark_non_differentiable(rows, stash)
    ctx.save_for_backward(x, weight, target, temperature_per_token, rows, stash)
    ctx.options = inputs[4:_COUNT]  # temperature … assume_uniform
    ctx.entropy = inputs[_COUNT]
    ctx.main_grad, ctx.backend, ctx.group = inputs[-3:]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_nll, grad_lse = grads[:2]
    grad_entropy = grads[2] if ctx.entropy else None  # [0] where there is no entropy
    none: tuple[None, ...] = (None,) * (_COUNT + 6)
    if grad_nll is None and grad_lse is None and grad_entropy is None:
        return none
    *tensors, rows, stash = ctx.saved_tensors
    want_input_grad, want_weight_grad = ctx.needs_input_grad[:2]
    call = (
        grad_nll,
        grad_entropy,
        grad_lse,
        *tensors,
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
