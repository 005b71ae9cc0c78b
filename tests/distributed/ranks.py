# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: a pool that is started once and then handed one function after the other.

Starting a process costs seconds (the import of torch), a call of the pool milliseconds. Each call
gets process groups of its own, so that a test may break its group (a time-out ends a Gloo group for
good) without a consequence for the next one. A watchdog bounds every call: ranks that do not answer
are killed, and the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

WATCHDOG_SECONDS = 60.0


class Outcome(NamedTuple):
    """What became of a call on one rank: a value, or an error's class, text and traceback."""

    value: Any
    kind: str  # "" where there was no error
    message: str
    trace: str
    seconds: float  # of the function alone


class RanksFailedError(AssertionError):
    """At least one rank raised; the text has all of their tracebacks."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [f"rank {r}:\n{o.trace}" for r, o in enumerate(outcomes) if o.kind]
        super().__init__("\n".join(failed))


class _Job(NamedTuple):
    groups: list[list[int]]  # of workers; made on every worker, in this order
    timeout: float  # of the groups' exchanges, in seconds
    body: Callable[..., Any]
    args: tuple[Any, ...]


def _outcome(job: _Job, groups: list[Any]) -> Outcome:
    begin = time.monotonic()
    try:
        value, kind, message, trace = job.body(*groups, *job.args), "", "", ""
    except BaseException as error:
        value, kind, message = None, type(error).__name__, str(error)
        trace = traceback.format_exc(limit=-8)
    return Outcome(value, kind, message, trace, time.monotonic() - begin)


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """Be a worker: answer every job with this rank's outcome, until the pipe is closed."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WATCHDOG_SECONDS),
    )
    while True:
        try:
            job = _Job(*pickle.loads(pipe.recv_bytes()))
        except EOFError:
            break
        members = [
            dist.new_group(workers, timeout=timedelta(seconds=job.timeout))
            for workers in job.groups
        ]
        mine = [g for g in members if g is not dist.GroupMember.NON_GROUP_MEMBER]
        outcome = _outcome(job, mine) if mine else Outcome(None, "", "", "", 0.0)
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            answer = pickle.dumps(Outcome(None, type(error).__name__, str(error), "pickling", 0.0))
        for group in mine:
            with contextlib.suppress(ValueError):  # a test may have destroyed it
                dist.destroy_process_group(group)
        pipe.send_bytes(answer)
    dist.destroy_process_group()


class Ranks:
    """A pool of `size` workers. Worker r is rank r of every group of the first R workers."""

    def __init__(self, size: int, watchdog: float = WATCHDOG_SECONDS) -> None:
        self.size, self.watchdog = size, watchdog
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder = ""

    def run(self, size: int, body: Callable[..., Any], *args: Any, timeout: float = 20.0) -> Any:
        """Return [body(group, *args) of each rank of a new group of `size`]; no rank may raise."""
        outcomes = self.attempt(size, body, *args, timeout=timeout)
        if any(outcome.kind for outcome in outcomes):
            raise RanksFailedError(outcomes)
        return [outcome.value for outcome in outcomes]

    def attempt(
        self, size: int, body: Callable[..., Any], *args: Any, timeout: float = 20.0
    ) -> list[Outcome]:
        """Return the outcome of each rank, whether it raised or not."""
        return self.attempt_groups([list(range(size))], body, *args, timeout=timeout)[:size]

    def attempt_groups(
        self, groups: list[list[int]], body: Callable[..., Any], *args: Any, timeout: float = 20.0
    ) -> list[Outcome]:
        """Call body(*its groups, *args) on every worker that is in one; return all outcomes."""
        self._start()
        job = pickle.dumps(tuple(_Job(groups, timeout, body, args)))
        for _, pipe in self._workers:
            pipe.send_bytes(job)
        return self._answers()

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=_serve,
                args=(rank, self.size, os.path.join(self._folder, "store"), there),
                daemon=True,
            )
            process.start()
            there.close()
            self._workers.append((process, here))

    def _answers(self) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + self.watchdog
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        ended = False
        while len(outcomes) < self.size:
            ready = wait(
                [pipe for pipe, rank in pipes.items() if rank not in outcomes],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                silent = [rank for rank in range(self.size) if rank not in outcomes]
                errors = "\n".join(o.trace for o in outcomes.values() if o.kind)
                self.stop(kill=True)
                raise TimeoutError(
                    f"ranks {silent} of {self.size}: no answer in {self.watchdog} s\n{errors}"
                )
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    ended = True
                    text = f"the process of rank {rank} ended"
                    outcomes[rank] = Outcome(None, "ProcessEnded", text, text, 0.0)
        if ended:
            self.stop(kill=True)
        return [outcomes[rank] for rank in range(self.size)]

    def stop(self, *, kill: bool = False) -> list[int | None]:
        """End the workers; return their exit codes."""
        for _, pipe in self._workers:
            pipe.close()
        if not kill:
            for process, _ in self._workers:
                process.join(10)
        for process, _ in self._workers:
            if process.is_alive():
                process.kill()
            process.join(10)
        codes = [process.exitcode for process, _ in self._workers]
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)
        return codes
