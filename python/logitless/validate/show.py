# SPDX-License-Identifier: Apache-2.0
"""Runs the cases under a progress bar and shows what came out."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import logitless
from logitless._backends import AUTO, CPU, VARIABLE

from .job import DTYPES, Job
from .processes import cases
from .report import Verdict, table, verdict

__all__ = ["validate"]

_PLAIN_WIDTH = 100  # columns where the output is no terminal


def validate(
    *,
    ranks: int,
    number: int,
    seed: int,
    only: int | None,
    backend: str,
    dtype: str,
    device: str,
    threads: int,
    report: Path | None,
) -> int:
    """Run cases 0 … number − 1 of a seed, or only one; print a table; return 0 or 1.

    Raises ValueError for a backend that cannot run what is asked for.
    """
    before = os.environ.get(VARIABLE)
    # The ranks inherit it.
    os.environ[VARIABLE] = backend
    try:
        backends = _backends(backend, dtype, device)
        job = Job(
            seed=seed,
            indices=tuple(range(number)) if only is None else (only,),
            ranks=ranks,
            dtypes=tuple(backends),
            device=device,
            backends=backends,
            threads=threads,
        )
        return _run(job, _repeat(job, backend, dtype), report)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _backends(backend: str, dtype: str, device: str) -> dict[str, str]:
    """Return each dtype that is to run and the backend that has to run it."""
    names = list(DTYPES) if dtype == "all" else [dtype]
    if backend == CPU and dtype == "all":
        names.remove("fp64")
    try:
        return {name: logitless.select_backend(device, DTYPES[name])[0] for name in names}
    except ValueError as error:
        raise ValueError(str(error).replace(VARIABLE, "--backend")) from None


def _repeat(job: Job, backend: str, dtype: str) -> str:
    """Return the command that repeats a case of this run, up to the case's number."""
    words = ["logitless validate", f"--seed {job.seed}"]
    if job.ranks > 1:
        words.append(f"--ranks {job.ranks}")
    if backend != AUTO:
        words.append(f"--backend {backend}")
    if dtype != "all":
        words.append(f"--dtype {dtype}")
    if job.device != "cpu":
        words.append(f"--device {job.device}")
    if job.threads != 1:
        words.append(f"--threads {job.threads}")
    return " ".join([*words, "--case"])


def _run(job: Job, repeat: str, report: Path | None) -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    started = time.perf_counter()
    verdicts = _verdicts(job, console)
    seconds = time.perf_counter() - started
    failed = [one for one in verdicts if one.failures]
    console.print(table(verdicts))
    for one in failed:
        console.print(f"\n[bold red]case {one.index}[/]  repeat: {repeat} {one.index}")
        for failure in one.failures:
            console.print(f"  {escape(failure)}", highlight=False)
    console.print(_summary(job, verdicts, seconds), highlight=False)
    if report is not None:
        report.write_text(json.dumps(_figures(job, verdicts, seconds, repeat), indent=1) + "\n")
    return 1 if failed else 0


def _verdicts(job: Job, console: Console) -> list[Verdict]:
    found: list[Verdict] = []
    with Progress(
        TextColumn("cases"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=len(job.indices), failed="")
        for index, records in cases(job):
            found.append(verdict(index, records))
            failed = sum(bool(one.failures) for one in found)
            note = f"[red]{failed} failed[/]" if failed else ""
            progress.update(task, advance=1, failed=note)
    return found


def _summary(job: Job, verdicts: list[Verdict], seconds: float) -> str:
    passed = sum(not one.failures for one in verdicts)
    ran: dict[str, int] = {}
    for one in verdicts:
        ran[one.backend or "none"] = ran.get(one.backend or "none", 0) + 1
    backends = ", ".join(f"{name} {count}" for name, count in sorted(ran.items()))
    style = "green" if passed == len(verdicts) else "bold red"
    ranks = "1 rank" if job.ranks == 1 else f"{job.ranks} ranks"
    return (
        f"[{style}]{passed} of {len(verdicts)} cases passed[/] on {ranks}, seed {job.seed}, "
        f"{job.device}, backends: {backends}; {seconds:.1f} s"
    )


def _figures(job: Job, verdicts: list[Verdict], seconds: float, repeat: str) -> dict[str, object]:
    return {
        "logitless": logitless.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "seed": job.seed,
        "ranks": job.ranks,
        "device": job.device,
        "threads": job.threads,
        "backends": job.backends,
        "repeat": repeat,
        "seconds": seconds,
        "passed": all(not one.failures for one in verdicts),
        "cases": [one.to_json() for one in verdicts],
    }
