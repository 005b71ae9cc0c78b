# SPDX-License-Identifier: Apache-2.0
"""Which code runs a call, why, and which ran the last one."""

from __future__ import annotations

import warnings

import torch

from . import _library

__all__ = ["CHUNKED", "CPU", "last_backend", "select_backend", "selected", "set_last_backend"]

CPU = "cpu"
CHUNKED = "chunked-pytorch"

_NATIVE_DTYPES = (torch.bfloat16, torch.float32)
_last: str | None = None
_warned: set[str] = set()


def select_backend(device: torch.device | str, dtype: torch.dtype) -> tuple[str, str]:
    """Return the backend that a call on `device` with x of `dtype` uses, and the reason.

    "cpu" is the native C++ backend; "chunked-pytorch" has the same semantics everywhere else.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        return CHUNKED, f"there are no native kernels for {kind} yet"
    if dtype not in _NATIVE_DTYPES:
        return CHUNKED, f"the native CPU backend takes bfloat16 and float32, not {dtype}"
    available, reason = _library.is_available()
    if not available:
        return CHUNKED, reason
    if "products" not in _library.build_info():
        return CHUNKED, "this build has no CPU backend (oneDNN was not found)"
    return CPU, "native CPU kernels"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def selected(kind: str, dtype: torch.dtype) -> str:
    """Return the backend's name; warn once for every reason to fall back."""
    name, reason = select_backend(kind, dtype)
    if name == CHUNKED and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"logitless: {reason}; using chunked PyTorch", stacklevel=4)
    return name


def set_last_backend(name: str) -> None:
    """Remember what ran."""
    global _last
    _last = name


def last_backend() -> str | None:
    """Return what ran the process's last call, forward or backward; None before the first."""
    return _last
