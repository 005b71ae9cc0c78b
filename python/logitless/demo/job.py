# SPDX-License-Identifier: Apache-2.0
"""What the demo is asked to do, and the shapes that follow from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

RANKS = 2
SEQUENCE = 128

HeadName = Literal["ordinary", "logitless"]
Task = Literal["train", "measure"]


@dataclass(frozen=True)
class Job:
    """One process's part of the demo. It travels to the process as JSON."""

    steps: int
    vocab: int  # the tokenizer's real size; the head has one row for each id
    tokens: int  # per step, over all sequences of the batch
    hidden: int
    seed: int
    folder: str  # scratch folder with the token ids and the last step's head inputs
    head: HeadName = "ordinary"
    task: Task = "train"
    rank: int = 0
    ranks: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "hidden", "ranks", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.hidden % 8 != 0:
            raise ValueError(f"hidden: expected a multiple of 8, got {self.hidden}")
        if self.tokens % self.sequence != 0:
            raise ValueError(
                f"tokens: expected a multiple of the sequence length {self.sequence}, "
                f"got {self.tokens}"
            )

    @property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return min(SEQUENCE, self.tokens)

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        return self.tokens // self.sequence

    @property
    def shard(self) -> slice:
        """Rows of the global head weight that this rank holds; shards differ by at most one row."""
        first = self.vocab * self.rank // self.ranks
        return slice(first, self.vocab * (self.rank + 1) // self.ranks)

    @property
    def token_file(self) -> Path:
        return Path(self.folder) / "tokens.pt"

    @property
    def head_inputs_file(self) -> Path:
        """x, weight shard and target of this rank's last training step."""
        return Path(self.folder) / f"{self.head}-{self.rank}.pt"

    def members(self, head: HeadName, task: Task) -> list[Job]:
        """The processes that run `task` with `head`: two with one thread each, or one with two."""
        if head == "ordinary":
            return [replace(self, head=head, task=task, rank=0, ranks=1, threads=RANKS)]
        return [
            replace(self, head=head, task=task, rank=rank, ranks=RANKS, threads=1)
            for rank in range(RANKS)
        ]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))
