# SPDX-License-Identifier: Apache-2.0
"""A rank of `logitless validate`: a job comes in as JSON on stdin, records go out as lines."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from .job import Job
from .measure import Measured, measure

__all__ = ["GROUP_TIMEOUT", "measured"]

GROUP_TIMEOUT = timedelta(seconds=60)


def measured(job: Job, group: dist.ProcessGroup | None) -> Iterator[Measured]:
    """Run the cases of a job, in order. Collective."""
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        with warnings.catch_warnings():
            # The table says which backend ran.
            warnings.filterwarnings("ignore", message="logitless:.*using chunked PyTorch")
            for index in job.indices:
                yield measure(job, index, group)
    finally:
        torch.set_num_threads(threads)


def main() -> int:
    """Run one rank of a group. Returns 0: failures are in the records."""
    job = Job.from_json(sys.stdin.read())
    # Nothing that a library prints may mix with the records.
    records = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = dist.FileStore(os.path.join(job.folder, "store"), job.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=job.ranks, timeout=GROUP_TIMEOUT
    )
    for record in measured(job, dist.group.WORLD):
        records.write(json.dumps(asdict(record)) + "\n")
        records.flush()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
