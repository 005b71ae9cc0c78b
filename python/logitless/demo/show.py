# SPDX-License-Identifier: Apache-2.0
"""The demo from text to table, in the order in which a reader sees it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from logitless.demo import report
from logitless.demo.checks import HeadResult, RankResult, failures
from logitless.demo.job import RANKS, HeadName, Job
from logitless.demo.processes import events
from logitless.demo.text import encode, standard_library_texts, train_tokenizer

_LABELS: dict[HeadName, str] = {
    "ordinary": "ordinary logits, 1 process",
    "logitless": f"Logitless, {RANKS} processes",
}


def show(*, steps: int, vocab: int, tokens: int, hidden: int, seed: int, out: Path) -> int:
    """See `logitless.demo.run`. Raises OSError, RuntimeError or ValueError with one sentence."""
    started = time.perf_counter()
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="logitless-demo-") as folder:
        job = Job(steps, vocab, tokens, hidden, seed, folder)
        job = prepare_text(console, job)
        ordinary = HeadResult([RankResult()])
        logitless = HeadResult([RankResult() for _ in range(RANKS)])
        train_both(console, job, ordinary, logitless)
        with console.status("measuring the memory of each head alone"):
            measure("ordinary", job, ordinary)
            measure("logitless", job, logitless)

    failed = failures(ordinary, logitless)
    seconds = time.perf_counter() - started
    report.draw(out / "curves.png", job, ordinary, logitless)
    report.write_json(out / "report.json", job, ordinary, logitless, failed, seconds)
    console.print(report.table(job, ordinary, logitless))
    console.print(f"{seconds:.0f} s; {out / 'curves.png'} and {out / 'report.json'} are written")
    for sentence in failed:
        console.print(f"[bold red]FAILED[/] {escape(sentence)}", highlight=False)
    return 1 if failed else 0


def prepare_text(console: Console, job: Job) -> Job:
    """Writes the token ids for the processes; returns the job with the vocabulary's real size."""
    with console.status("reading the standard library and training a tokenizer on it"):
        texts = standard_library_texts()
        tokenizer = train_tokenizer(texts, job.vocab)
        ids = encode(tokenizer, texts)
        torch.save(ids, job.token_file)
    job = replace(job, vocab=tokenizer.get_vocab_size())
    console.print(
        f"text: {len(texts)} files of the Python standard library, "
        f"{sum(map(len, texts)) / 1e6:.1f} million characters, {len(ids) / 1e6:.2f} million tokens "
        f"of a vocabulary of {job.vocab}",
        highlight=False,
        soft_wrap=True,
    )
    return job


def train_both(console: Console, job: Job, ordinary: HeadResult, logitless: HeadResult) -> None:
    """Trains one model after the other, so that neither takes the other's cores."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        results: dict[HeadName, HeadResult] = {"ordinary": ordinary, "logitless": logitless}
        bars = {
            head: progress.add_task(_LABELS[head], total=job.steps, loss="-", start=False)
            for head in results
        }
        for head, result in results.items():
            progress.start_task(bars[head])
            for loss in train(head, job, result):
                progress.update(bars[head], advance=1, loss=f"{loss:.3f}")


def train(head: HeadName, job: Job, result: HeadResult) -> Iterator[float]:
    """Trains with `head`, fills `result`, and yields the loss of each step as it comes."""
    for rank, event in events(job.members(head, "train")):
        if "step" not in event:
            result.record(rank, event)
        elif rank == 0:
            result.losses.append(event["loss"])
            result.seconds.append(event["seconds"])
            yield event["loss"]


def measure(head: HeadName, job: Job, result: HeadResult) -> None:
    """Measures `head` alone, after its training, and fills `result`."""
    for rank, event in events(job.members(head, "measure")):
        result.record(rank, event)
