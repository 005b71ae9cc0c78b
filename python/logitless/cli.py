# SPDX-License-Identifier: Apache-2.0
"""The command `logitless`. Exit status: 0, 1 for a failed check, 2 for wrong arguments."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import logitless
from logitless import demo, evidence
from logitless._backends import AUTO, CHUNKED, CPU, VARIABLE

__all__ = ["main"]

_CASES = 24
_MOST_RANKS = 64
_EVIDENCE_WIDTH = 220  # columns where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; `arguments` default to the process's. Wrong ones raise SystemExit(2)."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help(sys.stderr)
        return 2
    commands: dict[str, Callable[[argparse.Namespace, argparse.ArgumentParser], int]] = {
        "doctor": _doctor,
        "validate": _validate,
        "demo": _demo,
        "evidence": _evidence,
    }
    return commands[given.command](given, parser)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logitless",
        description="The loss of a language-model head without its logits.",
        epilog="Exit status: 0, 1 where a check failed, 2 for wrong arguments.",
    )
    parser.add_argument("--version", action="version", version=f"logitless {logitless.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_doctor(commands)
    _add_validate(commands)
    _add_demo(commands)
    _add_evidence(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can run, and why not",
        description="Say what this machine can run, and why not; test the C++ backend briefly. "
        "Exit status 0 where it works on this CPU.",
    )
    doctor.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_validate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    validate = commands.add_parser(
        "validate",
        help="compare random cases with float64",
        description="Run random cases, forward and backward, and compare loss, lse, entropy, dX "
        "and dW with plain PyTorch in float64, on any number of ranks (processes of this machine).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = validate.add_argument
    add("--ranks", type=_count(1, _MOST_RANKS), default=1, metavar="R", help="ranks of the group")
    add("--cases", type=_count(1), default=_CASES, metavar="N", help="how many")
    add("--seed", type=_count(0), default=0, metavar="S", help="of all cases")
    add("--case", type=_count(0), metavar="K", help="run only this case of the seed")
    add(
        "--backend",
        choices=(AUTO, CPU, CHUNKED),
        default=os.environ.get(VARIABLE) or AUTO,
        help="what has to run the cases; any other is a failure",
    )
    add(
        "--dtype",
        choices=("bf16", "fp32", "fp64", "all"),
        default="all",
        help="of x and weight; all: in turn, as far as the backend takes them",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    add("--threads", type=_count(1), default=1, metavar="T", help="of PyTorch, in each rank")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    _add_record(validate)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small model with and without logits",
        description="Train a small model on real text twice: with ordinary logits, and without "
        "logits and with the vocabulary split over two processes. Compare the two.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=_count(1), default=demo.DEFAULT_STEPS, metavar="N", help="training steps")
    add("--vocab", type=_count(1), default=demo.DEFAULT_VOCAB, metavar="V", help="vocabulary size")
    add("--tokens", type=_count(1), default=demo.DEFAULT_TOKENS, metavar="M", help="tokens a step")
    add("--hidden", type=_count(1), default=demo.DEFAULT_HIDDEN, metavar="H", help="hidden size")
    add("--seed", type=_count(0), default=demo.DEFAULT_SEED, metavar="S", help="of model and data")
    add("--out", type=Path, default=demo.DEFAULT_OUT, metavar="FOLDER", help="for the results")
    _add_record(parser)


def _add_evidence(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evidence",
        help="check the recorded measurements, and show them",
        description="check: validate docs/evidence and print the newest row of every key. "
        "stamp: name the commit of a clean tree, for a copy of it without git.",
    )
    parser.add_argument("action", choices=("check", "stamp"))
    parser.add_argument("--root", type=Path, default=Path(), help="of the sources (default: .)")


def _add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the figures to docs/evidence, from a clean tree in the current folder",
    )


def _count(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for argparse: a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {bound}, got {text!r}")
        return value

    return convert


def _doctor(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    del parser
    from logitless.doctor import doctor

    return doctor(as_json=given.json)


def _validate(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if given.backend not in (AUTO, CPU, CHUNKED):  # argparse checks no default
        parser.error(f"{VARIABLE}: expected {AUTO}, {CPU} or {CHUNKED}, got {given.backend!r}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a GPU that PyTorch can use, got none")
    if given.ranks > 1 and not (
        torch.distributed.is_available() and torch.distributed.is_gloo_available()
    ):
        parser.error(f"--ranks: expected 1 in a PyTorch without Gloo, got {given.ranks}")
    if given.json is not None and (given.json.is_dir() or not given.json.parent.is_dir()):
        parser.error(f"--json: expected a file in an existing folder, got {given.json}")
    from logitless.validate import validate

    commit = _clean_commit(given, parser)
    with tempfile.TemporaryDirectory(prefix="logitless-validate-") as folder:
        report = given.json
        if given.record and report is None:
            report = Path(folder) / "report.json"
        try:
            status = validate(
                ranks=given.ranks,
                number=given.cases,
                seed=given.seed,
                only=given.case,
                backend=given.backend,
                dtype=given.dtype,
                device=given.device,
                threads=given.threads,
                report=report,
            )
        except ValueError as error:
            parser.error(str(error))
        if given.record:
            figures = json.loads(report.read_text(encoding="utf-8"))
            failed = [sentence for case in figures["cases"] for sentence in case["failures"]]
            _record("options", commit, given, evidence.rows_of_validate(figures), failed)
    return status


def _demo(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    commit = _clean_commit(given, parser)
    report: Path = given.out / "report.json"
    report.unlink(missing_ok=True)
    status = demo.run(
        steps=given.steps,
        vocab=given.vocab,
        tokens=given.tokens,
        hidden=given.hidden,
        seed=given.seed,
        out=given.out,
    )
    if given.record and report.is_file():
        figures = json.loads(report.read_text(encoding="utf-8"))
        rows = evidence.rows_of_demo(figures)
        _record("convergence", commit, given, rows, figures["failures"])
    return status


def _clean_commit(given: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the commit that is going to be recorded; "" where nothing is."""
    if not given.record:
        return ""
    try:
        return evidence.clean_commit(Path())
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        parser.error(f"--record: {error}")


def _record(
    topic: str,
    commit: str,
    given: argparse.Namespace,
    rows: list[dict[str, Any]],
    failed: list[str],
) -> None:
    words = [f"logitless {given.command}"]
    for name, value in vars(given).items():
        if name not in ("command", "record", "json", "out") and value is not None:
            words.append(f"--{name} {value}")
    command = " ".join([*words, "--record"])
    print(evidence.record(topic, commit, command, rows, failed, [], Path()))


def _evidence(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if given.action == "stamp":
        try:
            print(evidence.stamp(given.root))
        except (ValueError, subprocess.CalledProcessError) as error:
            parser.error(str(error))
        return 0
    folder = given.root / "docs" / "evidence"
    problems = evidence.check(folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_EVIDENCE_WIDTH)
        console.print(evidence.table(folder))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
