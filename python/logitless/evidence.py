# SPDX-License-Identifier: Apache-2.0
"""Evidence: what was measured, by which sources, on which machine. Documents quote only this.

One JSON file per run of a recording script, docs/evidence/<topic>-<yyyymmdd>-<short commit>.json.
Failures are recorded like successes. `logitless evidence check` validates the files and renders
the newest row of every key.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

__all__ = [
    "TOPICS",
    "check",
    "clean_commit",
    "newest_rows",
    "record",
    "rows_of_demo",
    "rows_of_validate",
    "stamp",
    "table",
]

TOPICS = (
    "device-model",
    "hopper-projection",
    "hopper-gradients",
    "tensor-parallel",
    "many-hosts",
    "blackwell-static",
    "options",
    "benchmark",
    "reliability",
    "convergence",
)

# What a row of each kind has to say.
_ROW = {
    "speed": ("what", "provider", "variant", "dtype", "m", "h", "v", "ranks", "mode", "ms"),
    "check": ("what", "variant", "m", "h", "v", "ranks", "metric", "value", "limit", "pass"),
    "memory": ("what", "provider", "variant", "m", "h", "v", "ranks", "bytes"),
}
_STAMP = ".evidence-commit"
_FILE = ("topic", "commit", "dirty", "date", "device", "command", "rows", "failures", "not_run")
# Rows with the same values here are measurements of the same thing: the newest is quoted.
_KEY = (
    "device",
    "kind",
    "what",
    "variant",
    "dtype",
    "metric",
    "m",
    "h",
    "v",
    "ranks",
    "hosts",
    "transport",
    "mode",
    "provider",
)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def _processor() -> str:
    """Return the processor's name as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _device() -> dict[str, Any]:
    if torch.cuda.is_available():
        return {
            "name": torch.cuda.get_device_name(),
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
        }
    return {"name": _processor(), "count": os.cpu_count(), "torch": torch.__version__}


def clean_commit(root: Path) -> str:
    """Return the commit of the sources under `root`; call it before a run that is recorded.

    Where there is no git (a copy of the tree on a GPU machine) the file `.evidence-commit` names
    the commit; `logitless evidence stamp` writes it. Raises ValueError for uncommitted changes:
    such sources could not be found again.
    """
    try:
        commit = _git(root, "rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return (root / _STAMP).read_text(encoding="utf-8").strip()
    # What lies beside the sources without being one of them does no harm.
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    if changed:
        raise ValueError(f"evidence: expected a clean tree at {commit[:12]}, got {changed!r}")
    return commit


def stamp(root: Path) -> Path:
    """Write the commit of a clean tree beside the sources, for a copy of them without git."""
    path = root / _STAMP
    path.write_text(clean_commit(root) + "\n", encoding="utf-8")
    return path


def record(
    topic: str,
    commit: str,
    command: str,
    rows: Sequence[dict[str, Any]],
    failures: Sequence[str],
    not_run: Sequence[str],
    root: Path,
) -> Path:
    """Write an evidence file under `root`/docs/evidence and return its path.

    `commit` is what `clean_commit` returned before the run. Raises ValueError for bad content.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    content = {
        "topic": topic,
        "commit": commit,
        "dirty": False,
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": _device(),
        "command": command,
        "rows": list(rows),
        "failures": list(failures),
        "not_run": list(not_run),
    }
    problems = _problems(content)
    if problems:
        raise ValueError(f"evidence: {problems[0]}")
    folder = root / "docs" / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{topic}-{now:%Y%m%d}-{commit[:8]}"
    path, runs = folder / f"{name}.json", 1
    while path.exists():  # another run of the same sources on the same day
        runs += 1
        path = folder / f"{name}-{runs}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def rows_of_demo(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a demo's report.json."""
    ranks = len(report["logitless"]["ranks"])
    shape = {"m": report["tokens"], "h": report["hidden"], "v": report["vocab"]}
    base = {**shape, "what": "forward+backward", "variant": "stash", "dtype": "fp32"}
    group = {"ranks": ranks, "hosts": 1, "transport": "gloo"}
    ours, theirs = report["logitless"]["memory"], report["ordinary"]["memory"]
    difference = report["largest_difference_last_half"]
    last = {head: report[head]["losses"][-10:] for head in ("ordinary", "logitless")}
    return [
        {
            "kind": "check",
            **base,
            **group,
            "what": "training",
            "metric": "largest_loss_difference_last_half_nats",
            "value": difference,
            "limit": 0.02,
            "pass": difference <= 0.02,
            "steps": report["steps"],
            "first_loss": report["ordinary"]["losses"][0],
            "last_loss": sum(last["logitless"]) / len(last["logitless"]),
            "last_loss_ordinary": sum(last["ordinary"]) / len(last["ordinary"]),
            "seconds": report["seconds"],
        },
        {"kind": "memory", **base, "provider": "torch-eager", "ranks": 1, "bytes": theirs},
        {
            "kind": "memory",
            **base,
            **group,
            "provider": "logitless",
            "bytes": ours,
            "limit": theirs // 2,
            "pass": ours <= theirs // 2,
        },
    ]


def rows_of_validate(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the worst case of every dtype, backend and quantity of a validation's JSON."""
    worst: dict[tuple[str, str, str], tuple[float, dict[str, Any]]] = {}
    for case in report["cases"]:
        for quantity, value in case["ratios"].items():
            number = float(value)
            key = (case["dtype"], case["backend"], quantity)
            if key not in worst or not number <= worst[key][0]:  # NaN is worse than any number
                worst[key] = (number, case)
    rows: list[dict[str, Any]] = []
    for (dtype, backend, quantity), (number, case) in worst.items():
        m, h, v = (int(size) for size in case["shape"].split()[0].split("×"))
        same = [
            one for one in report["cases"] if (one["dtype"], one["backend"]) == (dtype, backend)
        ]
        rows.append(
            {
                "kind": "check",
                "what": "validate",
                "provider": backend,
                "variant": f"worst of {len(same)} random cases, seed {report['seed']}",
                "options": case["options"],
                "dtype": dtype,
                "m": m,
                "h": h,
                "v": v,
                "ranks": report["ranks"],
                "hosts": 1,
                "transport": "gloo" if report["ranks"] > 1 else "none",
                "metric": f"error_over_limit_{quantity}",
                "value": number,
                "limit": 1.0,
                "pass": number <= 1.0,
            }
        )
    return rows


def _problems(content: dict[str, Any]) -> list[str]:
    """Say what is wrong with one file's content."""
    missing = [name for name in _FILE if name not in content]
    if missing:
        return [f"expected {', '.join(missing)}, got a file without"]
    found = []
    if content["topic"] not in TOPICS:
        found.append(f"topic: expected one of {', '.join(TOPICS)}, got {content['topic']!r}")
    if not re.fullmatch("[0-9a-f]{40}", str(content["commit"])):
        found.append(f"commit: expected 40 hexadecimal digits, got {content['commit']!r}")
    if content["dirty"] is not False:
        found.append("dirty: expected false, got a run of changed sources")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(content["date"])):
        found.append(f"date: expected UTC like 2026-12-01T10:00:00Z, got {content['date']!r}")
    if not isinstance(content["device"], dict) or not content["device"].get("name"):
        found.append("device: expected a name, got none")
    for place, row in enumerate(content["rows"]):
        kind = row.get("kind")
        if kind not in _ROW:
            found.append(f"rows[{place}]: expected kind speed, check or memory, got {kind!r}")
            continue
        absent = [name for name in _ROW[kind] if name not in row]
        if absent:
            found.append(f"rows[{place}]: expected {', '.join(absent)} in a {kind} row, got none")
        elif kind == "check" and not isinstance(row["pass"], bool):
            found.append(f"rows[{place}]: expected pass true or false, got {row['pass']!r}")
    return found


def check(folder: Path) -> list[str]:
    """Return what is wrong with the evidence files of a folder, a sentence each."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            found.append(f"{path.name}: expected JSON, got {error}")
            continue
        found += [f"{path.name}: {problem}" for problem in _problems(content)]
        name = rf"{content.get('topic')}-\d{{8}}-{str(content.get('commit'))[:8]}.*\.json"
        if not re.fullmatch(name, path.name):
            found.append(f"{path.name}: expected a name of its topic, date and commit")
    return found


def newest_rows(folder: Path) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (file's content, row): the newest row of every key, in the order of the files."""
    newest: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]] = {}
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    for content in sorted(contents, key=lambda content: str(content["date"])):
        for row in content["rows"]:
            named = {**row, "device": content["device"]["name"]}
            newest[tuple(named.get(name) for name in _KEY)] = (content, row)
    return newest.values()


def table(folder: Path) -> Table:
    """Return the newest row of every key."""
    shown = Table("topic", "device", "what", "provider", "M×H×V", "ranks", "figure", "commit")
    for content, row in newest_rows(folder):
        if row["kind"] == "speed":
            figure = f"{row['ms']} ms, {row.get('ratio', '-')} × {row.get('reference', '-')}"
        elif row["kind"] == "memory":
            figure = f"{row['bytes'] / 2**20:.1f} MiB"
        else:
            verdict = "pass" if row["pass"] else "FAIL"
            figure = f"{row['metric']} {row['value']:.3g} (limit {row['limit']}) {verdict}"
        shown.add_row(
            content["topic"],
            content["device"]["name"],
            f"{row['what']}, {row['variant']}, {row.get('dtype', '-')}",
            str(row.get("provider", "-")),
            f"{row['m']}×{row['h']}×{row['v']}",
            str(row["ranks"]),
            figure,
            content["commit"][:8],
        )
    return shown
