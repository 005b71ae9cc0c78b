# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: `torch.distributed` process groups as the native library's two exchanges.

Everything is relative to the group that is passed: ranks are ranks of that group, and several
groups of one process, disjoint or not, do not know of each other. Nothing here is collective but
the exchanges themselves and `agree`; above all, nothing that a destructor or finalizer runs is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from . import _library
from ._library import Agreement, Call

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Exchange",
    "ProcessGroup",
    "SingleRank",
    "TorchExchange",
    "announced",
    "context",
    "exchange",
    "group_name",
    "group_of",
    "release",
]

# PyTorch builds without torch.distributed exist; they have groups of one rank only.
if TYPE_CHECKING or dist.is_available():
    ProcessGroup: TypeAlias = dist.ProcessGroup
else:

    class ProcessGroup:
        """Stands for a class that this PyTorch does not have."""


class Exchange(Protocol):
    """What the chunked fallback needs of a group; also what a test can make up."""

    rank: int
    size: int

    def all_gather(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        """Return [size, *mine.shape]: `mine` of every rank, in rank order."""

    def all_to_all(self, send: torch.Tensor, what: str) -> torch.Tensor:
        """Return a tensor like `send` [size, ...] whose block r is this rank's block of rank r."""

    def agree(self, call: Call) -> Agreement:
        """Exchange what the ranks say of their calls; a disagreement raises on every rank."""

    def announce_failure(self, phase: str, error: Exception) -> None:
        """Be the counterpart of `agree` on a rank that cannot make its call."""


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_gather(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        """Return `mine` as the one block there is."""
        del what
        return mine.unsqueeze(0)

    def all_to_all(self, send: torch.Tensor, what: str) -> torch.Tensor:
        """Return `send`."""
        del what
        return send

    def agree(self, call: Call) -> Agreement:
        """Resolve what the call left open. Raises ValueError where the shard is not all of it."""
        if call.x_tokens != call.tokens:
            raise ValueError(
                "tokens: expected x.shape[0] == target.shape[0], "
                f"got {call.x_tokens} and {call.tokens}"
            )
        if call.vocab_start > 0:
            raise ValueError(
                f"vocab_start: expected 0 in a group of one rank, got {call.vocab_start}"
            )
        size = call.vocab_rows if call.vocab_size < 0 else call.vocab_size
        if size > call.vocab_rows:
            raise ValueError(
                "vocab_size: expected at most weight.shape[0] in a group of one rank, "
                f"got {size} and {call.vocab_rows}"
            )
        return Agreement(0, size, call.want_input_grad, [0], [call.vocab_rows], [0, call.tokens])

    def announce_failure(self, phase: str, error: Exception) -> None:
        """Do nothing: nobody waits."""


def _devices_of(group: ProcessGroup) -> dict[str, str]:
    """Return the group's backend for each type of device: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (item.split(":", 1) for item in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}


def _all_gather(out: torch.Tensor, mine: torch.Tensor, group: ProcessGroup) -> None:
    # Renamed in PyTorch 2.13; the old name warns there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, mine, group=group)


def _all_to_all(out: torch.Tensor, send: torch.Tensor, group: ProcessGroup) -> None:
    dist.all_to_all_single(out, send, group=group)


class TorchExchange:
    """The exchanges of one process group.

    Holds the group weakly: a context of the native library holds this object, and must not keep a
    group alive that its owner has dropped.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = weakref.ref(group)
        self._devices = _devices_of(group)

    def group(self) -> ProcessGroup:
        """Return the process group. Raises RuntimeError where it is gone."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"group: expected a live process group, rank {self.rank} of {self.size} "
                "was destroyed"
            )
        return group

    def _carrier(self, device: torch.device) -> torch.device:
        """Return the device through which a tensor of `device` is exchanged."""
        backend = self._devices.get(device.type)
        # Gloo takes some tensors of GPUs in some of its exchanges; through the host it takes all.
        if backend is not None and (device.type == "cpu" or backend != "gloo"):
            return device
        if "cpu" in self._devices:
            return torch.device("cpu")
        bound = self.group().bound_device_id
        if bound is not None:
            return bound
        kind = next(iter(self._devices))
        return torch.device(kind, torch.accelerator.current_device_index())

    def _exchange(
        self,
        collective: Callable[[torch.Tensor, torch.Tensor, ProcessGroup], None],
        send: torch.Tensor,
        out: torch.Tensor,
        what: str,
    ) -> None:
        """Run `collective` on flat uint8 tensors, filling `out` in place."""
        if send.numel() == 0:
            return  # equal on every rank, so nobody waits
        group = self.group()
        carrier = self._carrier(send.device)
        try:
            if carrier == send.device:
                collective(out, send, group)
            else:
                staged = torch.empty_like(out, device=carrier)
                collective(staged, send.to(carrier), group)
                out.copy_(staged)
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            where = f'rank {self.rank} of {self.size}: the exchange of "{what}"'
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise TimeoutError(f"{where} timed out: {text}") from error
            raise RuntimeError(f"{where} failed: {text}") from error

    def all_gather(self, mine: torch.Tensor, what: str) -> torch.Tensor:
        """Return [size, *mine.shape]: `mine` of every rank. Raises TimeoutError, RuntimeError."""
        out = mine.new_empty((self.size, *mine.shape))
        self._exchange(_all_gather, _bytes(mine.contiguous()), _bytes(out), what)
        return out

    def all_to_all(self, send: torch.Tensor, what: str) -> torch.Tensor:
        """Return the blocks that the ranks sent to this one. Raises TimeoutError, RuntimeError."""
        out = torch.empty_like(send, memory_format=torch.contiguous_format)
        self._exchange(_all_to_all, _bytes(send.contiguous()), _bytes(out), what)
        return out

    def agree(self, call: Call) -> Agreement:
        """Exchange the calls' headers through the native library: one format for all backends."""
        return _library.agree(context(self.group()), call)

    def announce_failure(self, phase: str, error: Exception) -> None:
        """Be the counterpart of `agree` on a rank that cannot make its call."""
        kind = type(error).__name__
        _library.announce_failure(context(self.group()), phase, kind, str(error))

    # What the native library calls, on the thread that called it. The tensors are views of its
    # memory: flat uint8, to be filled before the call returns.

    def native_all_gather(self, mine: Any, out: Any, what: str) -> None:
        """Fill `out` [size · bytes] with every rank's `mine` [bytes]."""
        self._native(_all_gather, mine, out, what)

    def native_all_to_all(self, send: Any, out: Any, what: str) -> None:
        """Fill `out` [size · bytes] with the blocks that the ranks send to this one."""
        self._native(_all_to_all, send, out, what)

    def native_abort(self, reason: str) -> None:
        """Do nothing: a process group cannot carry a reason, so peers run into its time-out."""

    def _native(
        self,
        collective: Callable[[torch.Tensor, torch.Tensor, ProcessGroup], None],
        send: Any,
        out: Any,
        what: str,
    ) -> None:
        try:
            views = from_dlpack(send), from_dlpack(out)
            self._exchange(collective, *views, str(what))
        except Exception:
            raise
        except BaseException as reason:
            # KeyboardInterrupt and its like cannot cross the library themselves.
            _library.interrupted(reason)
            raise RuntimeError(
                f'rank {self.rank} of {self.size}: the exchange of "{what}" was interrupted by '
                f"{type(reason).__name__}"
            ) from reason


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flat uint8 view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


class _Member:
    """What is kept for one group: its exchange and a context for each number of threads."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.contexts: dict[int, int] = {}
        self.process = os.getpid()

    def destroy(self) -> None:
        """Destroy the contexts. Exchanges nothing, so a finalizer may run it."""
        # After a fork the child has the numbers, but not the threads to be joined.
        if os.getpid() == self.process:
            for number in self.contexts.values():
                _library.context_destroy(number)
        self.contexts.clear()


_lock = threading.RLock()  # re-entered where a garbage collection finalizes a group
_alone = _Member(SingleRank())
_members: weakref.WeakKeyDictionary[ProcessGroup, _Member] = weakref.WeakKeyDictionary()
_default_context_threads: int | None = None  # those of the library's context 0; −1: unusable


def _forget() -> None:
    """Start anew in a forked child: no thread of the parent's contexts exists there."""
    global _lock, _alone, _members, _default_context_threads
    _lock = threading.RLock()
    _alone = _Member(SingleRank())
    _members = weakref.WeakKeyDictionary()
    _default_context_threads = -1


os.register_at_fork(after_in_child=_forget)


def _require_group(group: ProcessGroup | None) -> None:
    given: object = group
    if given is None or isinstance(given, ProcessGroup):
        return
    if isinstance(given, int):  # what torch gives to ranks outside of a new group
        raise ValueError("group: expected a group that this process is a member of, got none")
    raise TypeError(
        f"group: expected a torch.distributed.ProcessGroup or None, got {type(given).__name__}"
    )


def _member(group: ProcessGroup | None) -> _Member:
    """Return the record of a group, made at its first use. Raises TypeError, ValueError."""
    _require_group(group)
    if group is None:
        return _alone
    with _lock:
        member = _members.get(group)
        if member is None:
            member = _members[group] = _Member(TorchExchange(group))
            # Not at exit: the process's end frees everything, and a thread may still be calling.
            weakref.finalize(group, member.destroy).atexit = False
        return member


def exchange(group: ProcessGroup | None) -> Exchange:
    """Return the exchanges of a group; None is a group of one rank."""
    member = _member(group)
    return _alone.exchange if member.exchange.size == 1 else member.exchange


def context(group: ProcessGroup | None, threads: int | None = None) -> int:
    """Return the native context of a group and a number of threads, created at its first use.

    `threads` defaults to `torch.get_num_threads()`. Exchanges nothing. Raises RuntimeError where
    the native library is not available.
    """
    member = _member(group)
    threads = torch.get_num_threads() if threads is None else threads
    with _lock:
        number = member.contexts.get(threads)
        if number is None:
            number = _create(member.exchange, threads, shared=group is None)
            if number != 0:
                member.contexts[threads] = number
        return number


def _create(exchange: Exchange, threads: int, *, shared: bool) -> int:
    """Return a new context, or 0 where the library's own serves."""
    global _default_context_threads
    if shared:
        if _default_context_threads is None:
            _default_context_threads = int(_library.build_info().get("threads", -1))
        if threads == _default_context_threads:
            return 0
    if not isinstance(exchange, TorchExchange) or exchange.size == 1:
        return _library.context_create(0, 1, None, None, None, threads)
    return _library.context_create(
        exchange.rank,
        exchange.size,
        exchange.native_all_gather,
        exchange.native_all_to_all,
        exchange.native_abort,
        threads,
    )


def announced(exchange: Exchange, phase: str, error: Exception) -> Exception:
    """Tell the group that this rank cannot make its call; return the error as all ranks see it."""
    # Whatever becomes of the announcement, the caller is to see its own mistake.
    with contextlib.suppress(Exception):
        exchange.announce_failure(phase, error)
    if exchange.size == 1 or type(error) not in (ValueError, TypeError, RuntimeError, MemoryError):
        return error
    return type(error)(f"rank {exchange.rank}: {error}")


def release(group: ProcessGroup | None) -> None:
    """Destroy the contexts of a group and their workspaces; the next call makes new ones.

    Local, exchanges nothing. No call on the group may be running.
    """
    with _lock:
        member = _alone if group is None else _members.get(group)
        if member is not None:
            member.destroy()


def group_name(group: ProcessGroup | None) -> str:
    """Return the name under which `group_of` finds the group again; "" is None's.

    Operators of torch.library take names, not groups. Takes no lock: torch.compile traces this.
    """
    _require_group(group)
    return "" if group is None else cast("str", group.group_name)


def group_of(name: str) -> ProcessGroup | None:
    """Return the group with a name that `group_name` gave. Raises RuntimeError where it is gone."""
    if not name:
        return None
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return cast("ProcessGroup", resolve(name))
