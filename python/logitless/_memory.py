# SPDX-License-Identifier: Apache-2.0
"""What backward may find kept from forward: the closed form of the C++ core's `stash_columns`.

It is evaluated here too because it sizes tensors while `torch.compile` traces with symbolic sizes;
a test holds both to the same answers.
"""

from __future__ import annotations

__all__ = ["encode", "stash_columns", "token_pitch"]

AUTO, STASH, RECOMPUTE = -1, -2, -3
_NAMES = {"auto": AUTO, "stash": STASH, "recompute": RECOMPUTE}

_PITCH = 16  # tokens of a stash row are padded to whole vectors
_TILE = 512  # columns are stashed in whole tiles
_SLICE = 2048  # columns that are recomputed at a time
_ROW_BYTES = 24  # k, K, S_rest, S, T, e in float32
_AUTO_BYTES = 1 << 30


def encode(memory: str | int) -> int:
    """Return the policy as the native library takes it. Raises ValueError, TypeError."""
    if isinstance(memory, bool) or not isinstance(memory, (str, int)):
        raise TypeError(
            f"memory: expected 'auto', 'stash', 'recompute' or bytes, got {type(memory).__name__}"
        )
    if isinstance(memory, str):
        if memory not in _NAMES:
            raise ValueError(
                f"memory: expected 'auto', 'stash', 'recompute' or bytes, got {memory!r}"
            )
        return _NAMES[memory]
    if memory < 0:
        raise ValueError(f"memory: expected at least 0 bytes, got {memory}")
    return memory


def token_pitch(tokens: int) -> int:
    """Return the row length of the stash, in tokens."""
    return (tokens + _PITCH - 1) // _PITCH * _PITCH


def stash_columns(tokens: int, columns: int, element: int, memory: int) -> int:
    """Return how many of `columns` vocabulary rows are stashed under an encoded policy.

    `element` is the size of x's dtype in bytes. Raises ValueError naming the least bytes.
    """
    column = token_pitch(tokens) * element
    if memory == RECOMPUTE:
        return 0
    if memory == STASH:
        return columns
    if memory == AUTO:
        if columns * column <= _AUTO_BYTES:
            return columns
        return _AUTO_BYTES // column // _TILE * _TILE
    rows = _ROW_BYTES * tokens
    least = rows + min(columns, _SLICE) * column
    if memory < least:
        raise ValueError(
            f"memory: expected at least {least} bytes for {tokens} tokens, got {memory}"
        )
    if rows + columns * column <= memory:
        return columns
    return (memory - least) // column // _TILE * _TILE
