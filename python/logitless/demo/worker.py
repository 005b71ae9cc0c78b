# SPDX-License-Identifier: Apache-2.0
"""A process of the demo: a job comes in as JSON on stdin, events go out as lines on stdout."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from logitless.demo.job import Job
from logitless.demo.memory import measure
from logitless.demo.train import train

_GROUP_TIMEOUT = timedelta(minutes=3)


def main() -> int:
    job = Job.from_json(sys.stdin.read())
    # Nothing that a library prints may mix with the events.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    torch.set_num_threads(job.threads)
    group = join_group(job)
    try:
        (train if job.task == "train" else measure)(job, group, emit)
    finally:
        if group is not None:
            dist.destroy_process_group()
    return 0


def join_group(job: Job) -> dist.ProcessGroup | None:
    """The group over all ranks of the job, over loopback; None for one process."""
    if job.ranks == 1:
        return None
    store = Path(job.folder).resolve() / f"group-{job.task}"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=job.rank,
        world_size=job.ranks,
        timeout=_GROUP_TIMEOUT,
    )
    return dist.group.WORLD


if __name__ == "__main__":
    sys.exit(main())
