# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a job, follows their events, and ends them all when one fails."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logitless.demo.job import Job

# Longer than the group's own time-out, whose message says more.
_SILENCE_SECONDS = 300.0
_EXIT_SECONDS = 60.0
_CULPRIT_SECONDS = 5.0


def events(members: list[Job]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Runs one process per member and yields (rank, event) as they come.

    Raises RuntimeError, with the last line of the error output of each process that failed, or
    where none says anything for five minutes.
    """
    arrived: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    processes = [_start(job) for job in members]
    try:
        for job, process in zip(members, processes, strict=True):
            threading.Thread(target=_listen, args=(job.rank, process, arrived), daemon=True).start()
        running = len(members)
        while running:
            try:
                rank, event = arrived.get(timeout=_SILENCE_SECONDS)
            except queue.Empty:
                raise RuntimeError(
                    f"{_name(members[0])}: expected an event within {_SILENCE_SECONDS:.0f} s, "
                    f"got none from {running} of {len(members)} processes"
                ) from None
            if event is not None:
                yield rank, event
                continue
            running -= 1
            if processes[rank].wait(timeout=_EXIT_SECONDS) != 0:
                raise RuntimeError(_failures(members, processes))
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
    with _error_file(job).open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "logitless.demo.worker"],
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
    arrived: queue.Queue[tuple[int, dict[str, Any] | None]],
) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            arrived.put((rank, json.loads(line)))
    finally:
        arrived.put((rank, None))


def _failures(members: list[Job], processes: list[subprocess.Popen[str]]) -> str:
    """One sentence for each process that failed; the first to exit is often not the culprit."""
    sentences = []
    for job, process in zip(members, processes, strict=True):
        try:
            code = process.wait(timeout=_CULPRIT_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if code != 0:
            sentences.append(f"{_name(job)}: expected exit status 0, got {code}: {_last_line(job)}")
    return "\n".join(sentences)


def _name(job: Job) -> str:
    return f"{job.task}, {job.head} head, rank {job.rank} of {job.ranks}"


def _error_file(job: Job) -> Path:
    return Path(job.folder) / f"{job.task}-{job.head}-{job.rank}.log"


def _last_line(job: Job) -> str:
    lines = [line for line in _error_file(job).read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "no error output"
