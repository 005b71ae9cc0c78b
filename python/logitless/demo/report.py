# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: the plot, the table and the figures as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from logitless.demo.checks import CURVE_LIMIT, MEMORY_LIMIT, HeadResult, last_half
from logitless.demo.job import RANKS, Job

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
_ORDINARY_COLOR = "#b8bec8"
_LOGITLESS_COLOR = "#c2410c"
_LIMIT_COLOR = "#1f2937"
_SMALLEST_SHOWN = 1e-7  # nats; a logarithmic axis has no zero
_LAST_LOSSES = 10


def largest_difference(ordinary: HeadResult, logitless: HeadResult) -> float:
    """Nats, over the last half."""
    return max(
        abs(ordinary.losses[step] - logitless.losses[step])
        for step in last_half(len(ordinary.losses))
    )


def final_loss(result: HeadResult) -> float:
    """Mean of the last ten steps, in nats."""
    return mean(result.losses[-_LAST_LOSSES:])


def draw(path: Path, job: Job, ordinary: HeadResult, logitless: HeadResult) -> None:
    """The two curves, their difference against the limit, and the two heads' memory, as a PNG."""
    # Imported here: the backend must be chosen before pyplot, and a display is never needed.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1), height_ratios=(2, 1))
    losses = figure.add_subplot(grid[0, 0])
    differences = figure.add_subplot(grid[1, 0], sharex=losses)
    memory = figure.add_subplot(grid[:, 1])
    figure.suptitle(
        f"The same model, trained with and without logits: vocabulary {job.vocab}, "
        f"{job.tokens} tokens a step, hidden {job.hidden}",
        fontsize=12,
    )
    _draw_losses(losses, ordinary, logitless)
    _draw_differences(differences, ordinary, logitless)
    _draw_memory(memory, ordinary, logitless)
    for axes in (losses, differences, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_losses(axes: Axes, ordinary: HeadResult, logitless: HeadResult) -> None:
    axes.plot(
        ordinary.losses, color=_ORDINARY_COLOR, linewidth=6, label="ordinary logits, 1 process"
    )
    axes.plot(
        logitless.losses,
        color=_LOGITLESS_COLOR,
        linewidth=1.4,
        label=f"Logitless, vocabulary split over {RANKS} processes",
    )
    axes.set_ylabel("training loss (nats)")
    axes.tick_params(labelbottom=False)
    axes.legend(frameon=False)


def _draw_differences(axes: Axes, ordinary: HeadResult, logitless: HeadResult) -> None:
    steps = len(ordinary.losses)
    pairs = zip(ordinary.losses, logitless.losses, strict=True)
    axes.semilogy(
        [max(_SMALLEST_SHOWN, abs(a - b)) for a, b in pairs], color=_LOGITLESS_COLOR, linewidth=1.4
    )
    compared = last_half(steps)
    axes.hlines(CURVE_LIMIT, compared.start, compared.stop - 1, color=_LIMIT_COLOR, linestyle="--")
    axes.annotate(
        f"limit {CURVE_LIMIT}, last half",
        ((compared.start + compared.stop - 1) / 2, CURVE_LIMIT),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
    )
    axes.set_ylim(top=CURVE_LIMIT * 15)
    axes.set_ylabel("|difference| (nats)")
    axes.set_xlabel("step")


def _draw_memory(axes: Axes, ordinary: HeadResult, logitless: HeadResult) -> None:
    axes.bar(0, ordinary.memory / _MIB, color=_ORDINARY_COLOR, width=0.6)
    bottom = 0.0
    for rank, growth in enumerate(rank.growth for rank in logitless.ranks):
        axes.bar(
            1,
            growth / _MIB,
            bottom=bottom,
            color=_LOGITLESS_COLOR,
            edgecolor="white",
            linewidth=1.5,
            width=0.6,
        )
        label = f"rank {rank}"
        axes.text(1, bottom + growth / _MIB / 2, label, ha="center", va="center", color="white")
        bottom += growth / _MIB
    for position, result in enumerate((ordinary, logitless)):
        top = result.memory / _MIB
        axes.text(position, top, f"{top:.0f} MiB", ha="center", va="bottom")
    limit = MEMORY_LIMIT * ordinary.memory / _MIB
    axes.hlines(limit, -0.4, 1.4, color=_LIMIT_COLOR, linestyle="--")
    axes.text(0.5, limit, "half", ha="center", va="bottom", color=_LIMIT_COLOR)
    axes.set_xticks([0, 1], ["ordinary", "Logitless"])
    axes.set_ylabel("peak memory of the head (MiB)")


def table(job: Job, ordinary: HeadResult, logitless: HeadResult) -> Table:
    """The figures of the run, one column for each head."""
    methods = " and ".join(sorted({rank.method for rank in ordinary.ranks + logitless.ranks}))
    rows = Table(
        title="The same model on the same text, with two heads",
        title_justify="left",
        caption=(
            f"(1) what forward and backward of the head alone add to the resident set\n"
            f"    ({methods}), in fresh processes, on the last step's inputs;\n"
            "    dX and dW count, x and W do not\n"
            "(2) the ordinary model computes its trunk once, with both threads;\n"
            "    each of the two ranks computes the whole trunk, with one thread"
        ),
        caption_justify="left",
    )
    rows.add_column("")
    rows.add_column("ordinary logits", justify="right")
    rows.add_column("Logitless", justify="right")
    rows.add_row("head", "x @ W.T, cross_entropy", "linear_cross_entropy")
    rows.add_row("backend", "PyTorch", _backend_names(logitless))
    rows.add_row("processes × threads", f"1 × {RANKS}", f"{RANKS} × 1")
    rows.add_row("rows of W in a process", str(job.vocab), _shard_sizes(job))
    rows.add_row("dtype of x and W", "float32", "float32")
    rows.add_row("kept for backward", "all columns", logitless.ranks[0].kept)
    rows.add_section()
    rows.add_row("loss, first step", _nats(ordinary.losses[0]), _nats(logitless.losses[0]))
    rows.add_row(
        f"loss, mean of last {min(_LAST_LOSSES, job.steps)}",
        _nats(final_loss(ordinary)),
        _nats(final_loss(logitless)),
    )
    difference = largest_difference(ordinary, logitless)
    rows.add_row("difference, last half", "", f"at most {difference:.1e} nats")
    rows.add_row("dX of all steps", "", _equal([rank.input_grads for rank in logitless.ranks]))
    rows.add_row("trunk at the end", "", _equal([rank.trunk for rank in logitless.ranks]))
    rows.add_section()
    parts = " + ".join(f"{rank.growth / _MIB:.1f}" for rank in logitless.ranks)
    rows.add_row("peak memory of head (1)", _mib(ordinary.memory), _mib(logitless.memory))
    rows.add_row("  of each process", _mib(ordinary.memory), f"{parts} MiB")
    planned = " + ".join(f"{rank.planned / _MIB:.1f}" for rank in logitless.ranks)
    rows.add_row("  planned, but for dX, dW", "", f"{planned} MiB")
    rows.add_row("  share", "100 %", f"{100 * _share(ordinary, logitless):.0f} %")
    rows.add_row("median step (2)", _median(ordinary), _median(logitless))
    return rows


def write_json(
    path: Path,
    job: Job,
    ordinary: HeadResult,
    logitless: HeadResult,
    failed: list[str],
    seconds: float,
) -> None:
    """Every figure of the run; bytes, nats and seconds."""
    report: dict[str, Any] = {
        "steps": job.steps,
        "vocab": job.vocab,
        "tokens": job.tokens,
        "hidden": job.hidden,
        "seed": job.seed,
        "dtype": "float32",
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "largest_difference_last_half": largest_difference(ordinary, logitless),
        "memory_share": _share(ordinary, logitless),
        "ordinary": {**asdict(ordinary), "memory": ordinary.memory},
        "logitless": {**asdict(logitless), "memory": logitless.memory},
        "failures": failed,
        "seconds": seconds,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _backend_names(result: HeadResult) -> str:
    return " and ".join(sorted({name for rank in result.ranks for name in rank.backends})) or "none"


def _shard_sizes(job: Job) -> str:
    shards = [member.shard for member in job.members("logitless", "train")]
    return " + ".join(str(shard.stop - shard.start) for shard in shards)


def _share(ordinary: HeadResult, logitless: HeadResult) -> float:
    return logitless.memory / ordinary.memory if ordinary.memory else float("nan")


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"


def _nats(loss: float) -> str:
    return f"{loss:.4f} nats"


def _median(result: HeadResult) -> str:
    return f"{median(result.seconds):.3f} s"


def _equal(fingerprints: list[str]) -> str:
    return "equal bits on all ranks" if len(set(fingerprints)) == 1 else "DIFFERENT BITS"
