# SPDX-License-Identifier: Apache-2.0
"""What a run of `logitless validate` is asked to do, as its processes pass it on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["DTYPES", "Job"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Job:
    """Cases `indices` of a seed, on one rank of `ranks`."""

    seed: int
    indices: tuple[int, ...]
    ranks: int
    dtypes: tuple[str, ...]  # names of DTYPES; case k has dtype k mod their number
    device: str  # "cpu" or "cuda"
    backends: dict[str, str]  # dtype → the backend that has to run it
    threads: int  # of PyTorch, in each rank
    folder: str = ""  # of the store through which the ranks meet; "" where there is one
    rank: int = 0

    def dtype_of(self, index: int) -> str:
        """Return the name of the dtype of a case."""
        return self.dtypes[index % len(self.dtypes)]

    def to_json(self) -> str:
        """Return the job as `from_json` takes it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["indices"] = tuple(fields["indices"])
        fields["dtypes"] = tuple(fields["dtypes"])
        return cls(**fields)
