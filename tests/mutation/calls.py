# SPDX-License-Identifier: Apache-2.0
"""Finds the synchronising calls of a kernel's source, each of which a mutation deletes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# What is deleted, and what kind of mistake that is. The first pattern that matches a name decides.
KINDS = (
    (r"(wait|wait_flag|wait_peer|test|bulk_wait|bulk_wait_read|wgmma_wait|tmem_wait_\w+)", "wait"),
    (r"(cta|warp|named)_sync|named_arrive|cluster_(arrive|arrive_relaxed|wait)", "wait"),
    (r"fence|fence_\w+|wgmma_fence|tcgen05_(after|before)_sync", "fence"),
    (r"bulk_commit|wgmma_commit|tcgen05_commit(_multicast)?", "commit"),
    (r"expect|arrive_expect(_at)?", "bytes"),
    (r"arrive|arrive_at|barrier_init", "count"),
    (r"elect_one", "mask"),
    (r"st|add|multimem_add|put_signal|store_async", "order"),
    (r"tmem_(alloc|relinquish|dealloc)|registers_(up|down)", "other"),
)
# A weak store is data, not synchronisation: these count only with an order.
STRONG_ONLY = ("st", "add")
# In an expression the call is replaced by what lets the kernel go on.
TRUTHS = ("elect_one", "test", "wait_peer")

CALL = re.compile(r"\bhw::(?P<name>\w+)(?P<template><[^()<>;]*>)?\(")
HEAD = re.compile(r"\b(?P<name>\w+)\s*\((?:[^()]|\([^()]*\))*\)\s*(?:const|noexcept|\s)*$")
CONTROL = ("if", "for", "while", "switch", "catch", "HW_UNROLL", "HW_LOOP")


@dataclass(frozen=True)
class Call:
    """One call: where it is, how a report names it, and what stands there when it is deleted."""

    function: str
    text: str  # white space made uniform
    occurrence: int  # of this text in this function, from 1
    kind: str
    begin: int
    end: int
    replacement: str

    @property
    def name(self) -> str:
        again = f" #{self.occurrence}" if self.occurrence > 1 else ""
        return f"delete {self.function}: {self.text}{again}"


def blank(source: str) -> str:
    """The source with comments, strings and preprocessor lines as spaces, place for place."""
    dead = re.compile(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#[^\n]*',
        re.DOTALL | re.MULTILINE,
    )
    return dead.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def closing(text: str, opening: int) -> int:
    """One past the parenthesis that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    line = text.count("\n", 0, opening) + 1
    raise ValueError(f"calls: expected a closing parenthesis for line {line}, got the file's end")


def functions(text: str) -> Iterator[tuple[int, int, str]]:
    """(begin, end, name) of every body in braces that has a function's head; inner ones later."""
    stack: list[tuple[int, str]] = []
    for at, char in enumerate(text):
        if char == "{":
            since = max(text.rfind(mark, 0, at) for mark in ";{}") + 1
            head = HEAD.search(text[since:at])
            name = head["name"] if head and head["name"] not in CONTROL else ""
            stack.append((at, name))
        elif char == "}" and stack:
            begin, name = stack.pop()
            if name:
                yield begin, at, name


def kind_of(name: str) -> str | None:
    for pattern, kind in KINDS:
        if re.fullmatch(pattern, name):
            return kind
    return None


def synchronising_calls(source: str) -> list[Call]:
    """Every call of `hw::` that orders something, in the order of the text."""
    text = blank(source)
    bodies = sorted(functions(text))
    seen: Counter[tuple[str, str]] = Counter()
    calls: list[Call] = []
    for found in CALL.finditer(text):
        name, kind = found["name"], kind_of(found["name"])
        if kind is None or (name in STRONG_ONLY and "Order::" not in (found["template"] or "")):
            continue
        begin, end = found.start(), closing(text, found.end() - 1)
        # The innermost body is the last that begins before the call and ends after it.
        function = "?"
        for first, last, body_name in bodies:
            if first < begin < last:
                function = body_name
        # However the call was broken into lines.
        call = re.sub(r"\s+", " ", source[begin:end]).replace("( ", "(").replace(" )", ")")
        seen[function, call] += 1
        statement = text[:begin].rstrip()[-1:] in ("", ";", "{", "}", ")", ":") or re.search(
            r"\belse\s*$", text[:begin]
        )
        if name in TRUTHS:
            replacement = "true"
        else:
            replacement = "(void)0" if statement else "0"
        calls.append(Call(function, call, seen[function, call], kind, begin, end, replacement))
    return calls
