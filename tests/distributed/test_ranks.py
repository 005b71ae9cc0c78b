# SPDX-License-Identifier: Apache-2.0
"""The pool of processes itself, and how processes that used the library end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from head_cases import Case, call, gradients, leaves, make_case
from ranks import Ranks, RanksFailedError

import logitless

kept: list[Any] = []


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """A pool of two that a test may break."""
    pool = Ranks(2)
    yield pool
    pool.stop(kill=True)


def number(group: dist.ProcessGroup, offset: int) -> int:
    return offset + dist.get_rank(group)


def one_raises(group: dist.ProcessGroup) -> str:
    if dist.get_rank(group) == 1:
        raise KeyError("from rank 1")
    return "fine"


def test_results_and_errors(ranks: Ranks) -> None:
    assert ranks.run(3, number, 10) == [10, 11, 12]
    first, second = ranks.attempt(2, one_raises)
    assert first.value == "fine" and not first.kind
    assert second.kind == "KeyError" and "from rank 1" in second.message
    with pytest.raises(RanksFailedError, match="from rank 1"):
        ranks.run(2, one_raises)
    assert ranks.run(2, number, 0) == [0, 1]


def leave_much_behind(group: dist.ProcessGroup, case: Case) -> bool:
    """Keep a graph, a configured workspace and a context; release nothing."""
    x, weight = leaves(case, dist.get_rank(group))
    logitless.workspace.configure(64, 24, 100, group=group)
    out = call(case, group, x, weight)
    gradients(case, out, x, weight, retain_graph=True)
    kept.extend((out, x, weight, group))
    return logitless.last_backend() == "cpu"


def test_exit_code(pair: Ranks) -> None:
    """The group is destroyed while a graph of it is alive; the processes end with 0."""
    assert all(pair.run(2, leave_much_behind, make_case(20, 24, [100, 50])))
    assert pair.stop() == [0, 0]


def dies_after_forward(group: dist.ProcessGroup, case: Case) -> None:
    rank = dist.get_rank(group)
    x, weight = leaves(case, rank)
    out = call(case, group, x, weight)
    if rank == 1:
        os._exit(7)
    gradients(case, out, x, weight)


def test_rank_that_dies(pair: Ranks) -> None:
    """Its peer gets an error in bounded time, with what it waited for."""
    first, second = pair.attempt(2, dies_after_forward, make_case(20, 24, [100, 50]), timeout=5.0)
    assert second.kind == "ProcessEnded"
    assert first.kind in ("RuntimeError", "TimeoutError")
    assert 'rank 0 of 2: the exchange of "backward"' in first.message
    assert first.seconds < 30


def one_sleeps(group: dist.ProcessGroup) -> None:
    torch.zeros(1)
    if dist.get_rank(group) == 1:
        time.sleep(600)


def test_watchdog(pair: Ranks) -> None:
    """A rank that hangs is killed; the next call has new processes."""
    assert pair.run(2, number, 0) == [0, 1]
    pair.watchdog, usual = 1.0, pair.watchdog
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2: no answer in 1.0 s"):
        pair.run(2, one_sleeps)
    pair.watchdog = usual
    assert pair.run(2, number, 5) == [5, 6]
