# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of a job on all of its ranks, in processes that end with it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .job import Job
from .measure import Measured
from .worker import GROUP_TIMEOUT, measured

__all__ = ["cases"]

# Longer than the group's time-out, whose message says more.
_SILENCE_SECONDS = 3 * GROUP_TIMEOUT.total_seconds()
_EXIT_SECONDS = 5.0


def cases(job: Job) -> Iterator[tuple[int, list[Measured]]]:
    """Yield each case of a job with what its ranks found, in order.

    One rank runs in this process, more in processes of their own. A case in which a rank raised or
    died may leave the ranks out of step: those after it run in new processes.
    """
    if job.ranks == 1:
        for record in measured(job, None):
            yield record.index, [record]
        return
    left = job.indices
    while left:
        for index, records in _group(replace(job, indices=left)):
            left = left[1:]
            yield index, records
            if any(record.raised for record in records):
                break


def _group(job: Job) -> Iterator[tuple[int, list[Measured]]]:
    """Run a job in one set of processes; after a case in which one died, stop."""
    with tempfile.TemporaryDirectory(prefix="logitless-") as folder:
        arrived: queue.Queue[tuple[int, Measured | None]] = queue.Queue()
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(job.ranks):
                member = replace(job, rank=rank, folder=folder)
                processes.append(_start(member))
                threading.Thread(
                    target=_listen, args=(rank, processes[rank], arrived), daemon=True
                ).start()
            early: list[list[Measured]] = [[] for _ in processes]
            for index in job.indices:
                records, complaint = _collect(arrived, early)
                if complaint:
                    records += _obituaries(job, index, complaint, processes, Path(folder))
                yield index, records
                if complaint:
                    return
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _start(job: Job) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        # All ranks are on this machine; a host name that does not resolve must not matter.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with _error_file(job.folder, job.rank).open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "logitless.validate.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdin is not None
    process.stdin.write(job.to_json())
    process.stdin.close()
    return process


def _listen(
    rank: int,
    process: subprocess.Popen[str],
    arrived: queue.Queue[tuple[int, Measured | None]],
) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            arrived.put((rank, Measured(**json.loads(line))))
    finally:
        arrived.put((rank, None))


def _collect(
    arrived: queue.Queue[tuple[int, Measured | None]], early: list[list[Measured]]
) -> tuple[list[Measured], str]:
    """Return every rank's record of the next case, or those there are and what is the matter."""
    complaint = ""
    while not complaint and not all(early):
        try:
            rank, record = arrived.get(timeout=_SILENCE_SECONDS)
        except queue.Empty:
            complaint = f"expected a record within {_SILENCE_SECONDS:.0f} s, got none"
            break
        if record is not None:
            early[rank].append(record)
        elif not early[rank]:
            complaint = f"rank {rank} ended"
    return [records.pop(0) for records in early if records], complaint


def _obituaries(
    job: Job,
    index: int,
    complaint: str,
    processes: list[subprocess.Popen[str]],
    folder: Path,
) -> list[Measured]:
    """Return a failure for each process that ended badly; the first to end may not be to blame."""
    sentences = {}
    for rank, process in enumerate(processes):
        try:
            status = process.wait(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if status != 0:
            lines = _error_file(folder, rank).read_text().strip().splitlines()
            last = lines[-1] if lines else "no error output"
            sentences[rank] = f"process: expected exit status 0, got {status}: {last}"
    found = []
    for rank, sentence in (sentences or {0: f"process: {complaint}"}).items():
        dtype = job.dtype_of(index)
        found.append(Measured(index, rank, "", dtype, "", failures=[sentence], raised=True))
    return found


def _error_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"{rank}.log"
