# SPDX-License-Identifier: Apache-2.0
"""Which code runs a call, why, and which ran the last one.

The environment variable LOGITLESS_BACKEND forces one: "cpu" or "chunked-pytorch"; "auto", like
none, leaves the choice to `select_backend`. All ranks of a group need the same one.
"""

from __future__ import annotations

import os
import warnings

import torch

from . import _library

__all__ = [
    "AUTO",
    "CHUNKED",
    "CPU",
    "VARIABLE",
    "last_backend",
    "select_backend",
    "selected",
    "set_last_backend",
]

AUTO = "auto"
CPU = "cpu"
CHUNKED = "chunked-pytorch"
VARIABLE = "LOGITLESS_BACKEND"

_NATIVE_DTYPES = (torch.bfloat16, torch.float32)
_last: str | None = None
_warned: set[str] = set()


def select_backend(device: torch.device | str, dtype: torch.dtype) -> tuple[str, str]:
    """Return the backend that a call on `device` with x of `dtype` uses, and the reason.

    "cpu" is the native C++ backend; "chunked-pytorch" has the same semantics everywhere else.
    Raises ValueError where LOGITLESS_BACKEND names no backend, or one that cannot run the call.
    """
    forced = os.environ.get(VARIABLE) or AUTO
    if forced not in (AUTO, CPU, CHUNKED):
        raise ValueError(f"{VARIABLE}: expected {AUTO}, {CPU} or {CHUNKED}, got {forced!r}")
    if forced == CHUNKED:
        return CHUNKED, f"{VARIABLE} asks for it"
    obstacle = _obstacle(torch.device(device).type, dtype)
    if obstacle is None:
        return CPU, "native CPU kernels"
    if forced == CPU:
        raise ValueError(f"{VARIABLE}: expected a backend that can run, got {CPU}: {obstacle}")
    return CHUNKED, obstacle


def _obstacle(kind: str, dtype: torch.dtype) -> str | None:
    """Return why the native CPU backend cannot run a call, or None where it can."""
    if kind != "cpu":
        return f"there are no native kernels for {kind} yet"
    if dtype not in _NATIVE_DTYPES:
        return f"the native CPU backend takes bfloat16 and float32, not {dtype}"
    available, reason = _library.is_available()
    if not available:
        return reason
    if "products" not in _library.build_info():
        return "this build has no CPU backend (oneDNN was not found)"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def selected(kind: str, dtype: torch.dtype) -> str:
    """Return the backend's name; warn once for every reason to fall back."""
    name, reason = select_backend(kind, dtype)
    asked = os.environ.get(VARIABLE) == CHUNKED
    if name == CHUNKED and not asked and reason not in _warned:
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
