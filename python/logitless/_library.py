# SPDX-License-Identifier: Apache-2.0
"""The native library, loaded at first use: one thin, typed function for each that it exports.

Importing this module loads nothing, starts no thread and touches no GPU.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = [
    "Agreement",
    "Backward",
    "Call",
    "Forward",
    "Operands",
    "Plan",
    "agree",
    "announce_failure",
    "backward",
    "backward_into",
    "build_info",
    "context_create",
    "context_destroy",
    "forward",
    "forward_into",
    "interrupted",
    "is_available",
    "last_backend",
    "plan",
    "workspace_configure",
    "workspace_query",
    "workspace_release",
]

_FILE = "liblogitless_ffi.so"

_lock = threading.Lock()
_module: Any = None
_unavailable: str | None = None
_functions: dict[str, Callable[..., Any]] = {}
_interrupt = threading.local()


class Operands(NamedTuple):
    """What every call of the operation takes, in the order of the library's exports."""

    x: torch.Tensor  # [M, H] (sequence parallel: [M_r, H])
    weight: torch.Tensor  # [V_r, H]
    target: torch.Tensor  # [M]
    temperature_per_token: torch.Tensor | None  # [M] float32
    temperature: float
    ignore_index: int
    vocab_start: int  # −1: not given
    vocab_size: int  # −1: not given
    sequence_parallel: bool
    assume_uniform: bool


class Forward(NamedTuple):
    """What a forward call returns; `entropy`, `rows` and `stash` are None where not asked for."""

    nll: torch.Tensor  # [M] float32, nats
    lse: torch.Tensor  # [M] float32, nats
    entropy: torch.Tensor | None  # [M] float32, nats
    rows: torch.Tensor | None  # [6, M] float32: k, K, S_rest, S, T, e
    stash: torch.Tensor | None  # [stash_columns, token_pitch] of x's dtype


class Backward(NamedTuple):
    """The gradients of x and of the weight, in their dtypes; None where not asked for."""

    dx: torch.Tensor | None  # [M, H] (sequence parallel: [M_r, H])
    dw: torch.Tensor | None  # [V_r, H]


class Plan(NamedTuple):
    """The bytes of a call on one rank."""

    stash_columns: int
    token_pitch: int
    rows_bytes: int
    stash_bytes: int
    workspace_bytes: int
    text: str


class Call(NamedTuple):
    """What one rank says of its call before any data travels; see `agree`."""

    phase: str  # at most 15 letters; equal where calls belong together
    tokens: int  # M, the length of target
    x_tokens: int  # rows of this rank's x
    hidden: int
    vocab_rows: int
    vocab_start: int  # −1: from the sizes of the shards, in rank order
    vocab_size: int  # −1: the sum of the shards
    dtype: str
    entropy: bool
    per_token_temperature: bool
    temperature: float
    ignore_index: int
    sequence_parallel: bool
    fingerprint: int  # of a few weight rows, 0 where they say nothing
    want_input_grad: bool


class Agreement(NamedTuple):
    """What the group agreed on; equal on every rank but for `vocab_start`."""

    vocab_start: int  # of this rank
    vocab_size: int
    any_want_input_grad: bool
    starts: list[int]  # first vocabulary id of each rank
    rows: list[int]  # weight rows of each rank
    token_offsets: list[int]  # R + 1: the first token of each rank's part, then M


def _candidates() -> list[Path]:
    """Where the library may be: an editable install has the package in two folders."""
    override = os.environ.get("LOGITLESS_LIBRARY")
    if override:
        return [Path(override)]
    package = sys.modules[__name__.rpartition(".")[0]]
    return [Path(folder) / "_native" / _FILE for folder in package.__path__]


def _load() -> Any:
    """Return the loaded module, or None with `_unavailable` set. The outcome is final."""
    global _module, _unavailable
    with _lock:
        if _module is not None or _unavailable is not None:
            return _module
        candidates = _candidates()
        path = next((p for p in candidates if p.is_file()), None)
        if path is None:
            _unavailable = f"the native library is not in {' or '.join(map(str, candidates))}"
            return None
        try:
            import tvm_ffi  # slow to import, and needed only from here on

            # Not among the kinds that TVM FFI knows by itself; without it a time-out that crosses
            # the boundary, in either direction, would be a RuntimeError.
            tvm_ffi.register_error("TimeoutError", TimeoutError)
            _module = tvm_ffi.load_module(str(path))
        except Exception as error:
            # A wrong ABI, a missing dependency, a foreign architecture: all mean the same to users.
            _unavailable = f"{path} cannot be loaded: {error}"
        return _module


def is_available() -> tuple[bool, str]:
    """Say whether the native library can be used, and why or why not. Loads it."""
    if _load() is None:
        return False, _unavailable or ""
    return True, "the native library is loaded"


def interrupted(reason: BaseException) -> None:
    """Keep what is no ordinary error (KeyboardInterrupt) while it crosses the native library.

    The boundary carries the class and the text of ordinary errors only. A callback that was
    interrupted leaves the exception here, and the call that it belongs to raises it again.
    """
    # Its traceback would keep views of the library's memory beyond the call.
    _interrupt.reason = reason.with_traceback(None)


def _call(name: str, *args: Any) -> Any:
    function = _functions.get(name)
    if function is None:
        module = _load()
        if module is None:
            raise RuntimeError(f"library: {_unavailable}")
        function = _functions[name] = module[name]
    _interrupt.reason = None
    try:
        return function(*args)
    except Exception:
        reason: BaseException | None = _interrupt.reason
        if reason is not None:
            _interrupt.reason = None
            raise reason from None
        raise


def forward(*arguments: Any) -> Forward:
    """Compute the loss into new tensors. Collective over the context's group.

    Takes (*Operands, return_entropy, keep_for_backward, memory, context).
    """
    return Forward(*_call("fused_linear_scaled_cross_entropy_forward", *arguments))


def forward_into(*arguments: Any) -> None:
    """Compute the loss into the caller's tensors; as many columns are stashed as `stash` has.

    Takes (*Operands, nll, lse, entropy | None, rows | None, stash | None, context).
    """
    _call("fused_linear_scaled_cross_entropy_forward_into", *arguments)


def backward(*arguments: Any) -> Backward:
    """Compute the gradients into new tensors. Collective over the context's group.

    Takes (grad_nll | None, grad_entropy | None, grad_lse | None, *Operands, rows, stash | None,
    want_input_grad, want_weight_grad, context).
    """
    return Backward(*_call("fused_linear_scaled_cross_entropy_backward", *arguments))


def backward_into(*arguments: Any) -> None:
    """Compute the gradients into the caller's tensors; dW may be added to one (main_grad).

    Takes (grad_nll | None, grad_entropy | None, grad_lse | None, *Operands, rows, stash | None,
    dx | None, dw | None, accumulate_weight, context).
    """
    _call("fused_linear_scaled_cross_entropy_backward_into", *arguments)


def plan(
    tokens: int,
    hidden: int,
    vocab_rows: int,
    vocab_start: int,
    vocab_size: int,
    dtype: str,
    ranks: int,
    entropy: bool,
    input_grad: bool,
    weight_grad: bool,
    memory: int,
    threads: int,
) -> Plan:
    """Return every byte of a call before anything is allocated."""
    found = _call(
        "plan",
        tokens,
        hidden,
        vocab_rows,
        vocab_start,
        vocab_size,
        dtype,
        ranks,
        entropy,
        input_grad,
        weight_grad,
        memory,
        threads,
    )
    columns, pitch, rows_bytes, stash_bytes, workspace_bytes, text = found
    return Plan(columns, pitch, rows_bytes, stash_bytes, workspace_bytes, str(text))


def context_create(
    rank: int,
    size: int,
    all_gather: Callable[..., None] | None,
    all_to_all: Callable[..., None] | None,
    abort: Callable[..., None] | None,
    threads: int,
) -> int:
    """Create a context and return its number. Exchanges nothing."""
    return int(_call("context_create", rank, size, all_gather, all_to_all, abort, threads))


def context_destroy(context: int) -> None:
    """Destroy a context and its workspace. Exchanges nothing."""
    _call("context_destroy", context)


def workspace_query(context: int, tokens: int, hidden: int, vocab_rows: int, dtype: str) -> int:
    """Return the exact workspace bytes of a configuration; allocates nothing."""
    return int(_call("workspace_query", context, tokens, hidden, vocab_rows, dtype))


def workspace_configure(
    context: int, tokens: int, hidden: int, vocab_rows: int, dtype: str
) -> None:
    """Reserve the workspace until it is released. Collective over the context's group."""
    _call("workspace_configure", context, tokens, hidden, vocab_rows, dtype)


def workspace_release(context: int) -> None:
    """Free the workspace; the next call sizes its own."""
    _call("workspace_release", context)


def announce_failure(context: int, phase: str, kind: str, message: str) -> None:
    """Tell the group that this rank cannot make the call `phase`. Collective: its counterpart."""
    _call("announce_failure", context, phase, kind, message)


def agree(context: int, call: Call) -> Agreement:
    """Exchange what the ranks say of their calls. Collective; a disagreement raises on all."""
    start, size, wanted, starts, rows, offsets = _call("agree", context, *call)
    return Agreement(
        int(start),
        int(size),
        bool(wanted),
        [int(v) for v in starts],
        [int(v) for v in rows],
        [int(v) for v in offsets],
    )


def build_info() -> dict[str, Any]:
    """Return the library's version, its oneDNN, whether bf16 is native, and its threads."""
    return {str(key): value for key, value in _call("build_info").items()}


def last_backend() -> str:
    """Return the name of what ran the last native call of this thread."""
    return str(_call("last_backend"))
