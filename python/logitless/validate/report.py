# SPDX-License-Identifier: Apache-2.0
"""What the ranks found, as one verdict for a case, a table, and JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .measure import QUANTITIES, Measured, ratio

__all__ = ["Verdict", "table", "verdict"]


@dataclass
class Verdict:
    """One case, all ranks together."""

    index: int
    shape: str
    dtype: str
    options: str
    backend: str
    seconds: float  # of the slowest rank
    ratios: dict[str, float]  # the worst error over its limit; above 1, or NaN, fails
    failures: list[str]  # no failure: passed
    ranks: list[Measured]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict for a JSON file."""
        ranks = [
            {key: value for key, value in asdict(rank).items() if key not in ("shape", "options")}
            for rank in self.ranks
        ]
        ratios = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.ratios.items()
        }
        return {**asdict(self), "passed": not self.failures, "ratios": ratios, "ranks": ranks}


def verdict(index: int, records: list[Measured]) -> Verdict:
    """Join what the ranks found, and compare what has to be the same bits on all of them."""
    failures: list[str] = []
    for record in records:
        where = f"rank {record.rank}: " if len(records) > 1 else ""
        failures += [where + failure for failure in record.failures]
    for name in QUANTITIES:
        if len({record.digests.get(name) for record in records if not record.raised}) > 1:
            failures.append(f"{name}: expected the same bits on every rank, got others")
    ratios = {}
    for name in QUANTITIES:
        found = [ratio(record.errors[name]) for record in records if name in record.errors]
        if found:
            ratios[name] = math.nan if any(map(math.isnan, found)) else max(found)
    first = max(records, key=lambda record: len(record.shape))
    return Verdict(
        index=index,
        shape=first.shape,
        dtype=first.dtype,
        options=first.options,
        backend=", ".join(sorted({record.backend for record in records if record.backend})),
        seconds=max(record.seconds for record in records),
        ratios=ratios,
        failures=failures,
        ranks=records,
    )


def table(verdicts: list[Verdict]) -> Table:
    """Return one row for each case."""
    rows = Table(
        caption="nll … dW: error / limit; above 1.00 fails; a dot: not asked for. "
        "∂: upstream gradients, where not of the loss alone.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        expand=True,
    )
    rows.add_column("case", justify="right")
    rows.add_column("dtype")
    rows.add_column("M×H×V shards", max_width=17, overflow="fold")
    rows.add_column("logits and options", ratio=1)
    rows.add_column("ran")
    for name in QUANTITIES:
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("")
    for one in verdicts:
        passed = not one.failures
        rows.add_row(
            str(one.index),
            one.dtype,
            one.shape.replace(" ", "\n"),
            one.options,
            one.backend.replace("chunked-pytorch", "chunked"),
            *(_cell(one.ratios.get(name)) for name in QUANTITIES),
            Text("ok", "green") if passed else Text("FAIL", "bold red"),
        )
    return rows


def _cell(value: float | None) -> Text:
    if value is None:
        return Text("·", "dim")
    text = f"{value:.2f}" if value < 10 else f"{value:.0e}"
    return Text(text) if value <= 1.0 else Text(text, "bold red")
