# SPDX-License-Identifier: Apache-2.0
"""Reads as much of C++ as the headers of the instruction layer need: which functions, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


def _spaces(text: str) -> str:
    """As long and with as many lines, so that every place in it stays where it was."""
    return re.sub(r"[^\n]", " ", text)


def code_only(text: str) -> str:
    """Without comments, preprocessor lines and the contents of strings."""
    return re.sub(
        r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*',
        lambda m: _spaces(m[0]),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )


@dataclass(frozen=True)
class Function:
    """A public function of namespace hw; the lines are those of its whole definition."""

    name: str
    template: str
    returns: str
    parameters: tuple[str, ...]
    first_line: int = field(compare=False)
    last_line: int = field(compare=False)

    def __str__(self) -> str:
        template = f"template <{self.template}> " if self.template else ""
        return f"{template}{self.returns} {self.name}({', '.join(self.parameters)})"


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _split(parameters: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth = [""], 0
    for c in parameters:
        depth += (c in "<([{") - (c in ">)]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [_squeeze(part) for part in parts if part.strip()]


def _type_of(parameter: str) -> str:
    """Without the default and the name."""
    parameter = parameter.split(" = ")[0]
    if array := re.fullmatch(r"(.*)\(&\s*\w*\)\s*(\[.*\])", parameter):
        return f"{array[1].strip()} (&){array[2]}"
    named = re.fullmatch(r"(.*[\s&*>])\s*(\w+)", parameter)
    return (named[1] if named else parameter).strip()


def _function(head: str, prefix: str, first: int, last: int) -> Function | None:
    head = _squeeze(head)
    template = ""
    if head.startswith("template <"):
        depth, end = 1, len("template <")
        while depth > 0:
            depth += (head[end] == "<") - (head[end] == ">")
            end += 1
        end -= 1
        template, head = head[len("template <") : end].strip(), head[end + 1 :].strip()
    if re.match(r"(using|enum|struct|class|static_assert|constexpr|extern|public|private)\b", head):
        return None
    start = head.find("(")
    named = re.fullmatch(r"(.*?)\b(\w+)", head[:start].strip()) if start > 0 else None
    if named is None:
        return None
    words = ("HW_FN", "HW_ANYWHERE", "inline", "static")
    returns = " ".join(word for word in named[1].split() if word not in words)
    inside = head[start + 1 : head.rfind(")")]
    types = tuple(_type_of(p) for p in _split(inside) if not p.startswith("Site "))
    return Function(prefix + named[2], template, returns, types, first, last)


def functions(text: str) -> list[Function]:
    """The functions of namespace hw itself, and of its classes (`Cell::load`).

    Nested namespaces, which are each side's own, are left out.
    """
    code = code_only(text)
    found: list[Function] = []

    def closing(at: int) -> int:
        depth = 0
        while True:
            depth += (code[at] == "{") - (code[at] == "}")
            if depth == 0:
                return at
            at += 1

    def scope(at: int, end: int, prefix: str) -> None:
        start = at
        while at < end:
            if code[at] not in ";{":
                at += 1
                continue
            head = re.sub(r"\b(public|private)\s*:", lambda m: _spaces(m[0]), code[start:at])
            first = code.count("\n", 0, start + len(head) - len(head.lstrip())) + 1
            if code[at] == ";":
                last = code.count("\n", 0, at) + 1
                if function := _function(head, prefix, first, last):
                    found.append(function)
                at += 1
            else:
                close = closing(at)
                kind = re.search(r"\b(namespace|class|struct|enum)\b[^()]*?(\w+)?\s*$", head)
                last = code.count("\n", 0, close) + 1
                if kind and kind[1] == "namespace":
                    if kind[2] == "hw":
                        scope(at + 1, close, "")
                elif kind and kind[1] in ("class", "struct"):
                    scope(at + 1, close, f"{kind[2]}::")
                elif function := _function(head, prefix, first, last):
                    found.append(function)
                at = close + 1
            start = at

    scope(0, len(code), "")
    return found
