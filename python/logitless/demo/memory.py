# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a head alone: forward and backward on a training step's inputs.

Both heads are measured the same way, in processes that do nothing else. What is resident before
the call (libraries, x, the weight, the target) does not count; everything that the call makes
resident does: logits or stash, workspace, messages, and the gradients dX and dW. An unmeasured
call comes first; what it took is freed and returned to the system before the measured one.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import logitless
from logitless.demo.checks import BACKEND
from logitless.demo.job import Job
from logitless.demo.model import head_loss
from logitless.demo.train import Emit

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def status_bytes(key: str) -> int:
    """A size of /proc/self/status: VmRSS (resident now) or VmHWM (its peak), in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"memory: expected {key} in {_STATUS}, got no such line")


def resident_growth(call: Callable[[], None]) -> tuple[int, str]:
    """How far `call` raises the resident set at its peak, in bytes, and how that was measured.

    Where the kernel's peak cannot be reset, the process's whole-life peak stands in for it: an
    upper bound, exact when the call is the largest thing that the process ever did.
    """
    gc.collect()
    _return_free_pages()
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        before = status_bytes("VmRSS")
        call()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, "ru_maxrss"
    before = status_bytes("VmRSS")
    call()
    return status_bytes("VmHWM") - before, "VmHWM"


def measure(job: Job, group: dist.ProcessGroup | None, emit: Emit) -> None:
    """Emits the head's growth of the resident set, and its seconds, on the last step's inputs."""
    inputs = torch.load(job.head_inputs_file, weights_only=True)
    x = inputs["x"].requires_grad_()
    weight = inputs["weight"].requires_grad_()
    target = inputs["target"]

    def head() -> None:
        torch.autograd.backward(head_loss(job, x, weight, target, group))

    # Loads the libraries and the kernels that they generate for these shapes, then lets go of all
    # memory that a call keeps, so that the measured call has to take every byte again.
    head()
    x.grad = weight.grad = None
    if job.head == "logitless":
        logitless.workspace.release(group=group)

    started = time.perf_counter()
    growth, method = resident_growth(head)
    seconds = time.perf_counter() - started
    emit({"growth": growth, "method": method, "head_seconds": seconds, **plan_of_head(job)})


def plan_of_head(job: Job) -> dict[str, Any]:
    """The plan of this rank's call, made before anything is allocated; empty without one."""
    if job.head == "ordinary" or logitless.last_backend() != BACKEND:
        return {}
    rows = job.shard.stop - job.shard.start
    plan = logitless.workspace.plan(
        job.tokens,
        job.hidden,
        rows,
        dtype=torch.float32,
        vocab_start=job.shard.start,
        vocab_size=job.vocab,
        ranks=job.ranks,
        threads=job.threads,
    )
    return {
        "kept": f"{plan.stash_columns} of {rows} columns",
        "planned": plan.rows_bytes + plan.stash_bytes + plan.workspace_bytes,
        "plan": plan.text,
    }


def _return_free_pages() -> None:
    """Gives the allocator's free pages back, so that the call cannot use them uncounted."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
