# SPDX-License-Identifier: Apache-2.0
"""What the demo found, and what makes it fail: a check returns one sentence for each failure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

BACKEND = "cpu"
CURVE_LIMIT = 0.02  # nats
MEMORY_LIMIT = 0.5  # of the ordinary head's peak
_MIB = 2**20


@dataclass
class RankResult:
    """What one process reported."""

    backends: list[str] = field(default_factory=list)  # every name that ran
    input_grads: str = ""  # SHA-256 over dX of all steps
    trunk: str = ""  # SHA-256 over the trunk's parameters at the end
    growth: int = 0  # bytes, at the peak of the head alone
    method: str = ""  # where those bytes were read
    head_seconds: float = 0.0  # of that call
    kept: str = ""  # what the head keeps for its backward, in words
    planned: int = 0  # bytes that the plan counts: statistics, stash and workspace
    plan: str = ""  # the plan as it prints itself


@dataclass
class HeadResult:
    """What the processes of one head reported."""

    ranks: list[RankResult]
    losses: list[float] = field(default_factory=list)  # nats, one for each step
    seconds: list[float] = field(default_factory=list)  # of each training step

    def record(self, rank: int, event: dict[str, Any]) -> None:
        """Fills in fields of a rank's result."""
        self.ranks[rank] = replace(self.ranks[rank], **event)

    @property
    def memory(self) -> int:
        """Bytes over all ranks."""
        return sum(rank.growth for rank in self.ranks)


def failures(ordinary: HeadResult, logitless: HeadResult) -> list[str]:
    """Everything that is wrong with this run; empty for a run that shows what it should."""
    return [
        *check_backend([rank.backends for rank in logitless.ranks]),
        *check_curves(ordinary.losses, logitless.losses),
        *check_memory(ordinary.memory, logitless.memory),
        *check_ranks("dX of all steps", [rank.input_grads for rank in logitless.ranks]),
        *check_ranks("trunk parameters", [rank.trunk for rank in logitless.ranks]),
    ]


def check_backend(backends: list[list[str]]) -> list[str]:
    """Every rank ran the C++ backend, and nothing else."""
    return [
        f"backend: expected {BACKEND} on every rank, got {' and '.join(names) or 'none'} "
        f"on rank {rank}"
        for rank, names in enumerate(backends)
        if names != [BACKEND]
    ]


def last_half(steps: int) -> range:
    """The steps whose losses are compared."""
    return range(steps // 2, steps)


def check_curves(ordinary: list[float], logitless: list[float]) -> list[str]:
    """The two losses of a step, neither smoothed, agree in the whole last half."""
    if len(ordinary) != len(logitless):
        return [
            f"curves: expected as many steps as the ordinary head's {len(ordinary)}, "
            f"got {len(logitless)}"
        ]
    compared = last_half(len(ordinary))
    for step in compared:
        difference = abs(ordinary[step] - logitless[step])
        if not difference <= CURVE_LIMIT:  # written so that NaN fails
            return [
                f"curves: expected a difference of at most {CURVE_LIMIT} nats in steps "
                f"{compared.start} to {compared.stop - 1}, got {difference:.4f} at step {step}"
            ]
    return []


def check_memory(ordinary: int, logitless: int) -> list[str]:
    """All ranks together need at most half of the ordinary head's memory. Both in bytes."""
    if 0 < logitless <= MEMORY_LIMIT * ordinary:
        return []
    return [
        f"memory: expected more than 0 and at most {MEMORY_LIMIT * ordinary / _MIB:.1f} MiB, half "
        f"of the ordinary head's, got {logitless / _MIB:.1f} MiB over all ranks"
    ]


def check_ranks(what: str, fingerprints: list[str]) -> list[str]:
    """The replicated values have the same bits on every rank."""
    return [
        f"{what}: expected rank 0's bits {fingerprints[0][:16]} on every rank, "
        f"got {fingerprint[:16]} on rank {rank}"
        for rank, fingerprint in enumerate(fingerprints)
        if fingerprint != fingerprints[0]
    ]
