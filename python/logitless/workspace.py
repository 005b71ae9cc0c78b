# SPDX-License-Identifier: Apache-2.0
"""The workspace of a group: what a call needs while it runs, reserved ahead or sized by itself."""

from __future__ import annotations

import torch

from . import _groups, _library, _memory
from ._library import Plan

__all__ = ["Plan", "configure", "plan", "query", "release"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plan(
    tokens: int,
    hidden: int,
    vocab_rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    ranks: int = 1,
    entropy: bool = False,
    input_grad: bool = True,
    weight_grad: bool = True,
    memory: str | int = "auto",
    threads: int | None = None,
) -> Plan:
    """Return every byte of a call on one rank, before anything is allocated; `text` prints it.

    Raises ValueError for a memory bound that is too small, naming the least.
    """
    return _library.plan(
        tokens,
        hidden,
        vocab_rows,
        -1 if vocab_start is None else vocab_start,
        -1 if vocab_size is None else vocab_size,
        _name(dtype),
        ranks,
        entropy,
        input_grad,
        weight_grad,
        _memory.encode(memory),
        torch.get_num_threads() if threads is None else threads,
    )


def query(
    tokens: int,
    hidden: int,
    vocab_rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group: _groups.ProcessGroup | None = None,
) -> int:
    """Return the exact workspace bytes of a configuration; allocates nothing.

    Raises RuntimeError that prints both where the group is configured for anything else.
    """
    return _library.workspace_query(
        _groups.context(group), tokens, hidden, vocab_rows, _name(dtype)
    )


def configure(
    tokens: int,
    hidden: int,
    vocab_rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group: _groups.ProcessGroup | None = None,
) -> None:
    """Reserve the workspace for calls of up to this size. Collective over the group.

    Immutable until `release`: another configuration, and a larger call, are RuntimeErrors that
    print both sizes. A smaller call works.
    """
    _library.workspace_configure(_groups.context(group), tokens, hidden, vocab_rows, _name(dtype))


def release(*, group: _groups.ProcessGroup | None = None) -> None:
    """Free the workspace; the next call sizes its own. Exchanges nothing."""
    _library.workspace_release(_groups.context(group))
