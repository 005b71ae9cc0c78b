# SPDX-License-Identifier: Apache-2.0
"""A record of what a rank exchanges, taken between the native library and its process group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from logitless import _groups


class Exchanged(NamedTuple):
    """One exchange of this rank."""

    kind: str  # "all_gather" or "all_to_all"
    what: str
    sent: Tensor  # uint8, a copy


def record(group: dist.ProcessGroup) -> list[Exchanged]:
    """Return a list that grows with every native exchange on `group` from now on.

    Has to come before the group's first call: the native library then gets the recording functions.
    """
    exchange: Any = _groups.exchange(group)
    found: list[Exchanged] = []

    def wrap(kind: str) -> None:
        original = getattr(exchange, f"native_{kind}")

        def recording(send: Any, out: Any, what: str) -> None:
            found.append(Exchanged(kind, str(what), torch.from_dlpack(send).clone()))
            original(send, out, what)

        setattr(exchange, f"native_{kind}", recording)

    wrap("all_gather")
    wrap("all_to_all")
    return found
