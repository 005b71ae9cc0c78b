# SPDX-License-Identifier: Apache-2.0
"""Times a training step of the head on this CPU beside PyTorch's ordinary logits, in one run.

    python bench/cpu_step.py [--record]

Providers alternate in random order, on random data; medians, 20th and 80th percentiles.
ratio = our time / eager PyTorch's. --record writes docs/evidence (from a clean tree).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import logitless
from logitless import evidence

SHAPES = ((2048, 256, 8192), (1000, 1024, 16384), (2048, 1024, 32768))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def native(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, memory: str) -> None:
    loss = logitless.linear_cross_entropy(x, w, target, reduction="mean", memory=memory)
    loss.backward()
    if logitless.last_backend() != "cpu":
        raise RuntimeError(f"backend: expected cpu, got {logitless.last_backend()}")


def eager(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> None:
    torch.nn.functional.cross_entropy(x @ w.T, target).backward()


def measure(shape: tuple[int, int, int], dtype: str, rounds: int) -> list[dict[str, object]]:
    m, h, v = shape
    torch.manual_seed(0)
    x = torch.randn(m, h).to(DTYPES[dtype]).requires_grad_()
    w = (torch.randn(v, h) * h**-0.5).to(DTYPES[dtype]).requires_grad_()
    target = torch.randint(0, v, (m,))
    providers: dict[tuple[str, str], Callable[[], None]] = {
        ("logitless", "stash"): lambda: native(x, w, target, "stash"),
        ("logitless", "recompute"): lambda: native(x, w, target, "recompute"),
        ("torch-eager", "stash"): lambda: eager(x, w, target),
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in providers}
    order = list(providers)
    for counted in range(-2, rounds):
        random.shuffle(order)
        for key in order:
            x.grad = w.grad = None
            begin = time.perf_counter()
            providers[key]()
            if counted >= 0:
                times[key].append((time.perf_counter() - begin) * 1e3)
    reference = statistics.median(times[("torch-eager", "stash")])
    rows: list[dict[str, object]] = []
    for (provider, variant), taken in times.items():
        cuts = statistics.quantiles(taken, n=5, method="inclusive")
        ms = statistics.median(taken)
        rows.append(
            {
                "kind": "speed",
                "what": "forward+backward",
                "provider": provider,
                "variant": variant,
                "dtype": dtype,
                "m": m,
                "h": h,
                "v": v,
                "ranks": 1,
                "hosts": 1,
                "transport": "none",
                "mode": "alternating",
                "threads": torch.get_num_threads(),
                "ms": round(ms, 3),
                "ms_p20": round(cuts[0], 3),
                "ms_p80": round(cuts[3], 3),
                "reference": "torch-eager",
                "reference_ms": round(reference, 3),
                "ratio": round(ms / reference, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    commit = evidence.clean_commit(root) if options.record else ""
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    rows = [row for case in track(cases, "measuring") for row in measure(*case, options.rounds)]
    table = Table("M", "H", "V", "dtype", "provider", "variant", "ms", "ratio to eager PyTorch")
    for row in rows:
        names = ("m", "h", "v", "dtype", "provider", "variant", "ms", "ratio")
        table.add_row(*(str(row[name]) for name in names))
    Console().print(table)
    if options.record:
        command = f"python bench/cpu_step.py --rounds {options.rounds} --record"
        not_run = ["GPUs: there are no native kernels for them yet"]
        print(evidence.record("benchmark", commit, command, rows, [], not_run, root))


if __name__ == "__main__":
    main()
