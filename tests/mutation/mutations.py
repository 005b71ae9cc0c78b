# SPDX-License-Identifier: Apache-2.0
"""The lists: what is broken in which kernel, which mutations may survive, and the verdict.

lists/KERNEL.toml breaks tests/model/kernels/KERNEL.h; tests/model/KERNEL_test.cpp has to notice:

    test = "..."            another test
    file = "..."            another header for all mutations of the list
    automatic = ["..."]     headers whose synchronising calls are deleted one by one; "x.h:function"
                            for one function of it; without the field: the kernel's own header
    [[mutation]]
    name, kind              kind: one of KINDS
    file = "..."            another header for this mutation
    old, new                old must be there once; with all = true it may be there more often
    edits = [{old, new}]    in place of old and new: several changes
    short = true            belongs to --set short

survivors.toml excuses what a test cannot notice:

    [[survivor]]
    kernel, reason
    name                    of a mutation of a list; or, for a deleted call:
    file, function, call    where it was
    occurrence              of the same text in that function, from 1
    covered_by              the text of the second synchronisation, if it was a wait
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib
from calls import Call, synchronising_calls

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
KINDS = (
    "wait",
    "fence",
    "commit",
    "phase",
    "bytes",
    "scope",
    "descriptor",
    "count",
    "mask",
    "order",
    "other",
)
# A kernel that lacks one of these is wrong, whatever a test says: no reason excuses it.
NEVER_EXCUSED = ("wait", "phase", "bytes", "scope")
HIGHEST_RATE = 0.08
# Headers whose every synchronising call has to be tried with some kernel.
DELETED_IN = ("tests/model/kernels", "src/cuda/tile")


class ListError(ValueError):
    """A list does not fit the sources."""


@dataclass(frozen=True)
class Mutation:
    """One change of one header, and how the lists name it."""

    kernel: str
    name: str
    kind: str
    file: str  # relative to the root
    text: str  # of the header, mutated
    automatic: bool = False
    short: bool = False
    call: Call | None = None

    @property
    def label(self) -> str:
        return f"{self.kernel}: {self.name}"


@dataclass
class Kernel:
    """A list of lists/: the test that has to notice, and what is broken."""

    name: str
    test: str
    mutations: list[Mutation] = field(default_factory=list)


@dataclass(frozen=True)
class Survivor:
    """An entry of survivors.toml."""

    kernel: str
    name: str
    reason: str
    file: str = ""
    covered_by: str = ""  # the text of the second synchronisation, in the same header


def field_of(table: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ListError(f"{where}: expected {key} = a string, got {value!r}")
    return value


def apply(source: str, edits: list[tuple[str, str, bool]], where: str) -> str:
    """The source after all edits, each (old, new, everywhere)."""
    for old, new, everywhere in edits:
        count = source.count(old)
        if count == 0 or (count > 1 and not everywhere):
            wanted = "at least once" if everywhere else "exactly once"
            raise ListError(
                f"{where}: the list is stale: expected {wanted}, found {count} times: {old.strip()}"
            )
        source = source.replace(old, new)
    return source


def read_list(path: Path, root: Path = ROOT) -> Kernel:
    """A kernel's mutations: those of the list, and the deletion of each synchronising call."""
    data = tomllib.loads(path.read_text())
    name = path.stem
    header = field_of(data, "file", path.name, f"tests/model/kernels/{name}.h")
    kernel = Kernel(name, field_of(data, "test", path.name, f"tests/model/{name}_test.cpp"))
    names: set[str] = set()
    for table in data.get("mutation", []):
        where = f"{path.name}: {field_of(table, 'name', path.name)}"
        kind = field_of(table, "kind", where)
        if kind not in KINDS:
            raise ListError(f"{where}: expected kind of {', '.join(KINDS)}, got {kind}")
        if table["name"] in names:
            raise ListError(f"{where}: expected a name of its own, got it twice")
        names.add(table["name"])
        file = field_of(table, "file", where, header)
        edits = [
            (field_of(edit, "old", where), field_of(edit, "new", where), bool(edit.get("all")))
            for edit in table.get("edits", [table])
        ]
        text = apply((root / file).read_text(), edits, where)
        short = bool(table.get("short"))
        kernel.mutations.append(Mutation(name, table["name"], kind, file, text, short=short))
    for entry in data.get("automatic", [header]):
        # "x.h", or "x.h:function" if another kernel's test runs the rest of it.
        file, _, function = entry.partition(":")
        source = (root / file).read_text()
        for call in synchronising_calls(source):
            if function not in ("", call.function):
                continue
            text = source[: call.begin] + call.replacement + source[call.end :]
            kernel.mutations.append(
                Mutation(name, call.name, call.kind, file, text, automatic=True, call=call)
            )
    return kernel


def read_lists(folder: Path = HERE / "lists", root: Path = ROOT) -> list[Kernel]:
    """All lists; every synchronising call of a kernel must belong to one of them."""
    kernels = [read_list(path, root) for path in sorted(folder.glob("*.toml"))]
    tried = {(m.file, m.name) for kernel in kernels for m in kernel.mutations if m.automatic}
    for room in DELETED_IN:
        for path in sorted((root / room).glob("*.h")):
            file = str(path.relative_to(root))
            for call in synchronising_calls(path.read_text()):
                if (file, call.name) not in tried:
                    raise ListError(
                        f"lists: expected a list with automatic = ['{file}'] or "
                        f"['{file}:{call.function}'], got none"
                    )
    return kernels


def read_survivors(path: Path = HERE / "survivors.toml") -> list[Survivor]:
    survivors: list[Survivor] = []
    for table in tomllib.loads(path.read_text()).get("survivor", []):
        where = f"{path.name}: {table.get('name') or table.get('call')}"
        name, file = table.get("name"), ""
        if name is None:  # of a deleted call
            file = field_of(table, "file", where)
            name = Call(
                field_of(table, "function", where),
                field_of(table, "call", where),
                int(table.get("occurrence", 1)),
                *("", 0, 0, ""),
            ).name
        reason = field_of(table, "reason", where)
        if len(reason.split()) < 4:
            raise ListError(f"{where}: expected a reason, got '{reason}'")
        survivors.append(
            Survivor(
                field_of(table, "kernel", where),
                name,
                reason,
                file,
                field_of(table, "covered_by", where, ""),
            )
        )
    return survivors


@dataclass(frozen=True)
class Result:
    """What became of a mutation."""

    mutation: Mutation
    verdict: str  # caught, crashed, timed out, survived, invalid
    message: str = ""  # the first thing the test said
    seeds: str = ""  # "3 of 9": failed seeds of the first case that failed
    seconds: float = 0

    @property
    def caught(self) -> bool:
        return self.verdict in ("caught", "crashed", "timed out")


def matches(survivor: Survivor, mutation: Mutation) -> bool:
    same = survivor.kernel == mutation.kernel and survivor.name == mutation.name
    return same and (not mutation.automatic or survivor.file == mutation.file)


def excuse(mutation: Mutation, survivor: Survivor, root: Path = ROOT) -> str:
    """Why the entry does not excuse the mutation; nothing if it does."""
    if mutation.kind not in NEVER_EXCUSED:
        return ""
    if not mutation.automatic:
        return f"survived, and a mutation of kind {mutation.kind} has to be caught"
    if not survivor.covered_by:
        return f"survived; kind {mutation.kind} needs covered_by, the second synchronisation"
    if survivor.covered_by not in (root / mutation.file).read_text():
        return f"survived; covered_by is not in {mutation.file}: {survivor.covered_by}"
    return ""


def judge(
    results: list[Result], survivors: list[Survivor], everything: list[Mutation], root: Path = ROOT
) -> list[str]:
    """What makes a run fail: sentences, none if it passes. `everything`: also what did not run.

    How many survive is left to too_many_survive: it means little for a few chosen mutations.
    """
    wrong: list[str] = []
    for result in results:
        mutation = result.mutation
        entries = [s for s in survivors if matches(s, mutation)]
        if result.verdict == "survived":
            why = excuse(mutation, entries[0], root) if entries else "survived, without a reason"
            if why:
                wrong.append(f"{mutation.label}: {why}")
        elif result.verdict == "invalid" and not mutation.automatic:
            wrong.append(f"{mutation.label}: does not compile: {result.message}")
        elif result.caught and entries:
            wrong.append(f"{mutation.label}: survivors.toml is stale: it is caught now")
    kernels = {mutation.kernel for mutation in everything}
    for survivor in survivors:
        known = any(matches(survivor, mutation) for mutation in everything)
        if survivor.kernel in kernels and not known:
            wrong.append(
                f"{survivor.kernel}: {survivor.name}: survivors.toml is stale: no such mutation"
            )
    return wrong


def too_many_survive(results: list[Result]) -> list[str]:
    """The sentence that makes a run fail, if there is one."""
    rate = survival_rate(results)
    return (
        [f"expected at most {HIGHEST_RATE:.0%} survivors, got {rate:.1%}"]
        if rate > HIGHEST_RATE
        else []
    )


def survival_rate(results: list[Result]) -> float:
    tried = [result for result in results if result.verdict != "invalid"]
    survived = sum(result.verdict == "survived" for result in tried)
    return survived / len(tried) if tried else 0.0
