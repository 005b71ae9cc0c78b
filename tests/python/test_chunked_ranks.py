# SPDX-License-Identifier: Apache-2.0
"""The chunked fallback over several ranks, and the exchanges of torch.distributed groups."""

from __future__ import annotations

import atexit
import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunked_truth import (
    IGNORE,
    PRECISION,
    Case,
    Result,
    check,
    error,
    make_case,
    run,
    shrink_tiles,
)
from torch import Tensor

from logitless import _groups, _library
from logitless._library import Agreement, Call


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)


# --- several ranks, as threads --------------------------------------------------------------------


class _Board:
    """Where the ranks of a group of threads put what they exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Any] = [None] * size

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadExchange:
    """A rank of such a group. Its `agree` is written independently of the native library's."""

    def __init__(self, board: _Board, rank: int) -> None:
        self.board, self.rank, self.size = board, rank, board.size

    def all_gather(self, mine: Tensor, what: str) -> Tensor:
        return torch.stack(self.board.swap(self.rank, mine.clone()))

    def all_to_all(self, send: Tensor, what: str) -> Tensor:
        return torch.stack(
            [blocks[self.rank] for blocks in self.board.swap(self.rank, send.clone())]
        )

    def agree(self, call: Call) -> Agreement:
        calls = self.board.swap(self.rank, call)
        for other in calls:
            if isinstance(other, Exception):
                raise RuntimeError(f"a rank cannot: {other}")
        rows = [c.vocab_rows for c in calls]
        starts = [sum(rows[:r]) for r in range(self.size)]
        part = -(-call.tokens // self.size)
        offsets = [min(call.tokens, r * part) for r in range(self.size + 1)]
        if call.sequence_parallel:
            offsets = [sum(c.x_tokens for c in calls[:r]) for r in range(self.size + 1)]
        return Agreement(
            starts[self.rank],
            sum(rows) if call.vocab_size < 0 else call.vocab_size,
            any(c.want_input_grad for c in calls),
            starts,
            rows,
            offsets,
        )

    def announce_failure(self, phase: str, error: Exception) -> None:
        self.board.swap(self.rank, error)


def on_ranks(size: int, body: Callable[[ThreadExchange], Any]) -> list[Any]:
    """Run `body` as every rank; return or raise what it returned or raised."""
    board = _Board(size)
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadExchange(board, rank))
        except Exception as problem:
            results[rank] = problem
            if not isinstance(problem, (ValueError, RuntimeError)):
                board.barrier.abort()

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def shards(total: int, ranks: int) -> list[slice]:
    """Uneven parts: the first is short, and one of five is empty."""
    ends = [0] + [total * (r + 1) * (r + 2) // (ranks * (ranks + 1)) for r in range(ranks)]
    if ranks == 5:
        ends[2] = ends[1]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def split(case: Case, part: slice) -> Case:
    return Case(
        case.x, case.weight[part], case.target, case.temperature, case.vocab_size, case.upstream
    )


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_join_to_the_whole(
    ranks: int, dtype: torch.dtype, sequence_parallel: bool, small_tiles: None
) -> None:
    case = make_case(dtype=dtype, scale=3.0).with_upstream()
    case.target[4] = IGNORE
    case.vocab_size = 590
    case.target[case.target >= 590] = 0
    truth = case.truth()
    vocab, tokens = shards(len(case.weight), ranks), shards(len(case.target), ranks)

    def body(exchange: ThreadExchange) -> Result:
        local = split(case, vocab[exchange.rank])
        if sequence_parallel:
            local.x = local.x[tokens[exchange.rank]]
        return run(local, exchange, sequence_parallel=sequence_parallel)

    results = on_ranks(ranks, body)
    values, gradients = PRECISION[dtype]
    dx: list[Tensor] = []
    for rank, result in enumerate(results):
        assert isinstance(result, Result), result
        assert result.dx is not None
        dx.append(result.dx)
        check(
            result._replace(dx=None),
            truth,
            values=10 * values,
            gradients=gradients,
            weight_rows=vocab[rank],
        )
        for name in ("nll", "lse", "entropy"):
            assert torch.equal(getattr(result.out, name), getattr(results[0].out, name))
    if sequence_parallel:
        assert error(torch.cat(dx), truth.dx) < gradients
    else:
        assert all(torch.equal(other, dx[0]) for other in dx)
        assert error(dx[0], truth.dx) < gradients


def test_one_rank_that_wants_dx_makes_all_compute_it() -> None:
    case = make_case().with_upstream()
    parts = shards(len(case.weight), 3)
    results = on_ranks(3, lambda e: run(split(case, parts[e.rank]), e, want_input_grad=e.rank == 1))
    assert [r.dx is None for r in results] == [True, False, True]
    assert error(results[1].dx, case.truth().dx) < 1e-11


def test_a_bad_argument_on_one_rank_raises_on_all() -> None:
    case = make_case()
    parts = shards(len(case.weight), 2)

    def body(exchange: ThreadExchange) -> Result:
        local = split(case, parts[exchange.rank])
        if exchange.rank == 1:
            local.target = local.target[:-1]
        return run(local, exchange)

    results = on_ranks(2, body)
    assert isinstance(results[1], ValueError)
    assert isinstance(results[0], RuntimeError)
    assert "got 37 and 36" in str(results[0])


# --- process groups -------------------------------------------------------------------------------


def in_processes(
    size: int, body: Callable[[int, _groups.ProcessGroup], None], folder: Path
) -> None:
    """Run `body(rank, world)` in `size` processes of one Gloo group."""
    context: Any = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_join_group, args=(rank, size, body, folder / "store"), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + 160  # before pytest's own time-out: a hang is to name its ranks
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    assert [process.exitcode for process in ranks] == [0] * size


def _join_group(
    rank: int, size: int, body: Callable[[int, _groups.ProcessGroup], None], store: Path
) -> None:
    # Gloo's threads end with the last reference to their group, which a body may leave in a cycle
    # of an exception and its frames. A thread that still waits for the interpreter lock, to drop
    # the tensors of its last exchange, when Python ends is made to exit within a C++ destructor,
    # and that aborts the process: "terminate called without an active exception". So the group
    # goes, and its threads are joined, while Python runs: at exit, when no frame holds it any more.
    atexit.register(gc.collect)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        world = dist.group.WORLD
        assert world is not None
        body(rank, world)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _exchanges(rank: int, world: _groups.ProcessGroup) -> None:
    size = 3
    exchange = _groups.exchange(world)
    assert (exchange.rank, exchange.size) == (rank, size)
    assert _groups.exchange(world) is exchange
    assert _groups.group_of(_groups.group_name(world)) is world
    mine = torch.arange(6, dtype=torch.float64).view(2, 3).t() + 10 * rank  # not contiguous
    gathered = exchange.all_gather(mine, "numbers")
    assert gathered.tolist() == [(mine + 10 * (r - rank)).tolist() for r in range(size)]
    send = torch.tensor([[rank, r] for r in range(size)], dtype=torch.int16)
    assert exchange.all_to_all(send, "pairs").tolist() == [[r, rank] for r in range(size)]
    assert exchange.all_gather(mine[:0], "nothing").shape == (size, 0, 2)

    # Ranks are those of the group: 1 and 2 of the world are 0 and 1 here, and 0 is no member.
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=1))
    assert pair is not None
    if rank == 0:
        with pytest.raises(ValueError, match="a group that this process is a member of"):
            _groups.exchange(pair)
    else:
        part = _groups.exchange(pair)
        assert (part.rank, part.size) == (rank - 1, 2)
        part.all_gather(mine, "numbers")
    if rank == 1:
        with pytest.raises(TimeoutError, match=r'^rank 0 of 2: the exchange of "late".*1000ms'):
            part.all_to_all(send[:2], "late")
    alone = [dist.new_group([r]) for r in range(size)][rank]
    assert alone is not None
    assert _groups.exchange(alone).size == 1
    held = weakref.ref(alone)
    dist.destroy_process_group(alone)
    del alone
    gc.collect()
    assert held() is None


def test_gloo_exchanges(tmp_path: Path) -> None:
    in_processes(3, _exchanges, tmp_path)


needs_library = pytest.mark.skipif(
    not _library.is_available()[0], reason=_library.is_available()[1]
)


def _agreeing(rank: int, world: _groups.ProcessGroup) -> None:
    exchange = _groups.exchange(world)
    case = make_case(scale=2.0).with_upstream()
    truth, part = case.truth(), shards(len(case.weight), 2)[rank]
    local = split(case, part)
    check(run(local, exchange), truth, values=1e-11, gradients=1e-11, weight_rows=part)
    local.x = case.x[:20] if rank == 0 else case.x[20:]
    truth = truth._replace(dx=truth.dx[:20] if rank == 0 else truth.dx[20:])
    result = run(local, exchange, sequence_parallel=True)
    check(result, truth, values=1e-11, gradients=1e-11, weight_rows=part)

    # One sentence, on every rank; and the group works on afterwards.
    local = split(case, part)
    local.vocab_size = 600 + rank
    with pytest.raises(ValueError, match="vocab_size: expected the same on every rank, got 600"):
        run(local, exchange)
    local = split(case, part)
    local.temperature = 1.0 - rank
    with pytest.raises(ValueError, match="^rank 1: temperature: expected a positive number"):
        run(local, exchange)
    whole = split(case, slice(0, 300))
    whole.target = whole.target % 300
    with pytest.raises(ValueError, match="weight: expected a different shard on each of 2 ranks"):
        run(whole, exchange)
    call = make_case(dtype=torch.float32, vocab=600)
    mine = call.weight[300 * rank : 300 * (rank + 1)]
    options = (None, 1.0, IGNORE, -1, -1, False, False, True, True, -1, _groups.context(world))
    if rank == 0:
        with pytest.raises(RuntimeError, match="call: expected the same on every rank"):
            _library.forward(call.x, mine, call.target, *options)
    else:
        with pytest.raises(RuntimeError, match="call: expected the same on every rank"):
            run(split(call, slice(300, 600)), exchange)
    native = _library.forward(call.x, mine, call.target, *options)
    torch.testing.assert_close(native.nll.double(), call.truth().nll, rtol=1e-5, atol=1e-5)


@needs_library
def test_ranks_agree_through_the_native_library(tmp_path: Path) -> None:
    in_processes(2, _agreeing, tmp_path)


def _contexts(rank: int, world: _groups.ProcessGroup) -> None:
    del rank
    first = _groups.context(world, threads=1)
    assert first == _groups.context(world, threads=1) != 0
    assert _groups.context(world, threads=2) not in (0, first)
    assert _groups.context(None, threads=1) not in (first, None)
    _groups.release(world)
    assert _groups.context(world, threads=1) > first
    with pytest.raises(RuntimeError, match="context: expected one that was created"):
        _library.workspace_query(first, 8, 16, 32, "float32")

    # A context must not outlive its group, nor keep it alive.
    other = dist.new_group()
    assert other is not None
    number = _groups.context(other)
    dist.barrier()  # a slower rank may still be connecting, and would find the connection closed
    dist.destroy_process_group(other)
    del other
    gc.collect()
    with pytest.raises(RuntimeError, match="context: expected one that was created"):
        _library.workspace_query(number, 8, 16, 32, "float32")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("by hand")

    exchange = _groups.exchange(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_groups, "_all_gather", interrupt)
        with pytest.raises(KeyboardInterrupt, match="by hand"):
            run(make_case(), exchange)
    exchange.all_gather(torch.ones(1), "one")


@needs_library
def test_contexts_of_groups(tmp_path: Path) -> None:
    in_processes(2, _contexts, tmp_path)


def test_groups_that_are_none() -> None:
    assert _groups.exchange(None).size == 1
    assert _groups.group_of(_groups.group_name(None)) is None
    given: Any = "tensor-parallel"
    with pytest.raises(TypeError, match="group: expected .*ProcessGroup or None, got str"):
        _groups.exchange(given)


@needs_library
def test_contexts_without_a_group() -> None:
    own = int(_library.build_info()["threads"])
    assert _groups.context(None, threads=own) == 0
    assert _groups.context(None, threads=own + 1) == _groups.context(None, threads=own + 1) > 0
    _groups.release(None)


def test_import_loads_nothing() -> None:
    code = (
        "import sys, threading, logitless._chunked, torch\n"
        "assert 'tvm_ffi' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_library_says_where_it_was_sought() -> None:
    code = (
        "from logitless import _library\n"
        "print(*_library.is_available())\n"
        "try: _library.build_info()\n"
        "except RuntimeError as error: print(error)\n"
    )
    environment = {**os.environ, "LOGITLESS_LIBRARY": "/nowhere/liblogitless_ffi.so"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, timeout=120
    )
    reason = "the native library is not in /nowhere/liblogitless_ffi.so"
    assert ran.stdout.decode().splitlines() == [f"False {reason}", f"library: {reason}"]
