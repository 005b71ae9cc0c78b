# SPDX-License-Identifier: Apache-2.0
"""Breaks the test kernels, one line at a time, and asks whether the device model notices.

    python tests/mutation/mutate.py [--set short|all] [--kernel NAME] [--list] [--json FILE]

Every mutation is a copy of one header, put before the others on the include path: only the kernel's
test is compiled again, and it has to fail. The model itself is compiled once, or given by --model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from mutations import (
    HIGHEST_RATE,
    KINDS,
    ROOT,
    Kernel,
    ListError,
    Mutation,
    Result,
    judge,
    read_lists,
    read_survivors,
    survival_rate,
    too_many_survive,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-ffp-contract=off"]
INCLUDES = ["src", "tests/model"]
COMPILE_LIMIT = 300.0  # seconds
VERDICTS = ("caught", "crashed", "timed out", "survived", "invalid")


@dataclass(frozen=True)
class Bench:
    """What every mutation is tried with."""

    objects: list[str]  # the model and doctest's main
    seeds: int
    time_limit: int  # seconds of one test


def command(arguments: list[str], limit: float, seeds: int = 0) -> tuple[int | None, str]:
    """(exit status, what it said); no status: it ran past the limit, and was killed."""
    environment = os.environ | {"LOGITLESS_MODEL_SEEDS": str(seeds)}
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            return None, said
        return process.returncode, said


def build(sources: Iterable[Path], folder: Path, jobs: int) -> list[str]:
    """Object files of what every mutation shares; compiled if older than the layer's sources."""
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in (ROOT / "src/cuda/hw").rglob("*.*"))

    def one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest, source.stat().st_mtime):
            flags = [*FLAGS, "-O2", f"-I{ROOT}/src"]
            status, said = command([COMPILER, *flags, "-c", str(source), "-o", str(target)], 600)
            if status != 0:
                raise ListError(f"{source}: expected it to compile, got:\n{said}")
        return str(target)

    with ThreadPoolExecutor(jobs) as workers:
        return list(workers.map(one, sources))


def first_message(said: str) -> tuple[str, str]:
    """(what the test complained of first, how many seeds of that case did)."""
    summary = re.search(
        r"(\d+) of (\d+) seeds failed \[[.X]*\] (.*(?:\n  \S.*|\n  +\S.*){0,3})", said
    )
    if summary:
        return re.sub(r"\s+", " ", summary[3]).strip(), f"{summary[1]} of {summary[2]}"
    for mark in ("FATAL ERROR:", "ERROR:", "error:"):
        if mark in said:
            return re.sub(r"\s+", " ", said.split(mark, 1)[1])[:300].strip(), ""
    return re.sub(r"\s+", " ", said)[-300:].strip(), ""


def run_test(test: str, headers: dict[str, str], bench: Bench) -> tuple[str, str, str]:
    """(verdict, message, seeds) of a kernel's test with these headers in the place of its own."""
    with tempfile.TemporaryDirectory(prefix="logitless-mutation-") as name:
        folder = Path(name)
        for file, text in headers.items():
            # As it is included: "kernels/x.h" or "cuda/tile/x.h".
            root = next(r for r in sorted(INCLUDES, key=len, reverse=True) if file.startswith(r))
            place = folder / Path(file).relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        # A quoted include looks beside its own file first: the test moves, its neighbours do not.
        source = folder / Path(test).name
        source.write_text((ROOT / test).read_text())
        includes = [f"-I{folder}", *(f"-I{ROOT / include}" for include in INCLUDES)]
        compiled, used, program = folder / "test.o", folder / "test.d", folder / "test"
        flags = [*FLAGS, "-O1", "-w", "-MMD", "-MF", str(used), *includes]
        status, said = command(
            [COMPILER, *flags, "-c", str(source), "-o", str(compiled)], COMPILE_LIMIT
        )
        if status != 0 and " error: " not in said:
            raise ListError(f"{test}: expected {COMPILER} to end by itself, got {status}: {said}")
        if status != 0:
            return "invalid", first_message(said)[0], ""
        for file in headers:
            if str(ROOT / file) in used.read_text() or Path(file).name not in used.read_text():
                raise ListError(
                    f"{test}: expected it to include a copy of {file}, got its own or none"
                )
        link = [COMPILER, str(compiled), *bench.objects, "-o", str(program)]
        status, said = command(link, COMPILE_LIMIT)
        if status != 0:
            raise ListError(f"{test}: expected it to link with the model, got:\n{said[-500:]}")
        # In CPU time: how busy the machine is must not make a mutation look caught.
        limited = ["/bin/sh", "-c", f'ulimit -t {bench.time_limit}; exec "$0" "$@"', str(program)]
        status, said = command([*limited, "--abort-after=1"], bench.time_limit * 20, bench.seeds)
    if status == 0:
        return "survived", "", ""
    if status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        return "timed out", f"no end after {bench.time_limit} s", ""
    message, seeds = first_message(said)
    crashed = status < 0 or "CRASHED" in said
    return ("crashed" if crashed else "caught"), message, seeds


def try_one(kernel: Kernel, mutation: Mutation, bench: Bench) -> Result:
    begin = time.monotonic()
    verdict, message, seeds = run_test(kernel.test, {mutation.file: mutation.text}, bench)
    return Result(mutation, verdict, message, seeds, time.monotonic() - begin)


def check_clean(kernels: list[Kernel], bench: Bench, jobs: int) -> None:
    """A test that fails, or takes long, without any mutation says nothing about mutations."""

    def one(kernel: Kernel) -> tuple[str, str, str]:
        files = {mutation.file for mutation in kernel.mutations}
        return run_test(kernel.test, {file: (ROOT / file).read_text() for file in files}, bench)

    with ThreadPoolExecutor(jobs) as workers:
        clean = list(workers.map(one, kernels))
    for kernel, (verdict, message, _) in zip(kernels, clean, strict=True):
        if verdict != "survived":
            raise ListError(
                f"{kernel.test}: expected it to pass without a mutation, got: {verdict}: {message}"
            )


def try_all(
    work: list[tuple[Kernel, Mutation]], bench: Bench, jobs: int, console: Console
) -> list[Result]:
    found: dict[str, Result] = {}
    with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(jobs) as workers:
        bar = progress.add_task("mutations", total=len(work))
        waiting = [workers.submit(try_one, kernel, mutation, bench) for kernel, mutation in work]
        for done in as_completed(waiting):
            if done.exception():
                workers.shutdown(cancel_futures=True)
            result = done.result()
            found[result.mutation.label + result.mutation.file] = result
            progress.advance(bar)
            if result.verdict != "caught":
                progress.console.print(
                    f"{result.verdict:9} {escape(result.mutation.label)} {escape(result.message)}",
                    soft_wrap=True,
                )
    return [found[mutation.label + mutation.file] for _, mutation in work]


def rates(results: list[Result], rows: Iterable[tuple[str, list[Result]]]) -> Table:
    table = Table("", *VERDICTS, "survivors")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in [*rows, ("all", results)]:
        if part:
            counts = [sum(result.verdict == verdict for result in part) for verdict in VERDICTS]
            table.add_row(
                name, *(str(count or "") for count in counts), f"{survival_rate(part):.1%}"
            )
    return table


def record(results: list[Result], wrong: list[str], bench: Bench, chosen: str) -> dict[str, object]:
    """For --json."""
    return {
        "set": chosen,
        "seeds": bench.seeds,
        "tried": sum(result.verdict != "invalid" for result in results),
        "verdicts": {v: sum(result.verdict == v for result in results) for v in VERDICTS},
        "survival_rate": survival_rate(results),
        "wrong": wrong,
        "mutations": [
            {
                "kernel": result.mutation.kernel,
                "name": result.mutation.name,
                "kind": result.mutation.kind,
                "file": result.mutation.file,
                "automatic": result.mutation.automatic,
                "verdict": result.verdict,
                "seeds": result.seeds,
                "message": result.message,
                "seconds": round(result.seconds, 2),
            }
            for result in results
        ],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--set", choices=("short", "all"), default="all", help="which mutations")
    parser.add_argument("--kernel", action="append", help="only this kernel; may be repeated")
    parser.add_argument("--match", default="", help="only mutations whose name contains this")
    parser.add_argument("--list", action="store_true", help="name them, try none")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seeds", type=int, default=9, help="of each case of a kernel's test")
    parser.add_argument("--time-limit", type=int, default=120, help="of a test, in CPU seconds")
    parser.add_argument("--model", type=Path, help="the model: an archive, or a folder of objects")
    parser.add_argument("--build", type=Path, default=ROOT / "build/mutation")
    return parser.parse_args()


def model_objects(given: Path | None, build_folder: Path, jobs: int) -> list[str]:
    main = build([ROOT / "tests/cpp/main.cpp"], build_folder, jobs)
    if given is None:
        engine = sorted((ROOT / "src/cuda/hw/model/engine").glob("*.cpp"))
        return main + build(engine, build_folder / "engine", jobs)
    if given.is_dir():
        return main + sorted(str(path) for path in given.glob("*.[oa]"))
    return [*main, str(given)]


def report(
    results: list[Result], kernels: list[Kernel], wrong: list[str], console: Console
) -> None:
    by_kernel = [(k.name, [r for r in results if r.mutation.kernel == k.name]) for k in kernels]
    by_origin = [
        (origin, [r for r in results if r.mutation.automatic == automatic])
        for origin, automatic in (("lists", False), ("deleted calls", True))
    ]
    by_kind = [(kind, [r for r in results if r.mutation.kind == kind]) for kind in KINDS]
    console.print(rates(results, by_kernel), rates(results, [*by_origin, *by_kind]))
    for sentence in wrong:
        console.print(f"mutate: {escape(sentence)}", style="red", soft_wrap=True)


def run(options: argparse.Namespace, console: Console) -> int:
    kernels = read_lists()
    unknown = set(options.kernel or []) - {kernel.name for kernel in kernels}
    if unknown:
        names = ", ".join(kernel.name for kernel in kernels)
        raise ListError(f"--kernel: expected one of {names}, got {', '.join(sorted(unknown))}")
    if options.kernel:
        kernels = [kernel for kernel in kernels if kernel.name in options.kernel]
    work = [
        (kernel, mutation)
        for kernel in kernels
        for mutation in kernel.mutations
        if (options.set == "all" or mutation.short) and options.match in mutation.name
    ]
    if options.list:
        for _, mutation in work:
            console.print(f"{mutation.kind:10} {escape(mutation.label)}", soft_wrap=True)
        console.print(f"{len(work)} mutations")
        return 0
    survivors = read_survivors()
    objects = model_objects(options.model, options.build, options.jobs)
    bench = Bench(objects, options.seeds, options.time_limit)
    begin = time.monotonic()
    check_clean(kernels, bench, options.jobs)
    results = try_all(work, bench, options.jobs, console)
    wrong = judge(results, survivors, [m for kernel in kernels for m in kernel.mutations])
    if not options.kernel and not options.match:
        wrong += too_many_survive(results)
    report(results, kernels, wrong, console)
    console.print(
        f"{len(results)} mutations in {time.monotonic() - begin:.0f} s; "
        f"{survival_rate(results):.1%} survived, at most {HIGHEST_RATE:.0%} may"
    )
    if options.json:
        text = json.dumps(record(results, wrong, bench, options.set), indent=1)
        options.json.write_text(text + "\n")
    return 1 if wrong else 0


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        return run(arguments(), console)
    except ListError as error:
        console.print(f"mutate: {escape(str(error))}", style="red", soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
