# SPDX-License-Identifier: Apache-2.0
"""The training loop of one process."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import logitless
from logitless.demo.job import Job
from logitless.demo.model import head_loss, initial_model
from logitless.demo.text import Batches

Emit = Callable[[dict[str, Any]], None]

_PEAK_RATE = 2e-3  # 3e-3 ends at the same loss after 120 steps, by a rougher way
_WARM_UP_STEPS = 10


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to a tenth of the peak."""
    warm_up = min(1.0, (step + 1) / _WARM_UP_STEPS)
    decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
    return _PEAK_RATE * warm_up * decay


def train(job: Job, group: dist.ProcessGroup | None, emit: Emit) -> None:
    """Trains and emits one event a step, then one with the fingerprints.

    The trunk is replicated: no gradient of it is exchanged. Its copies stay equal only because
    dX has the same bits on every rank, which the two fingerprints make visible.
    """
    batches = Batches(job)
    trunk, weight = initial_model(job)
    optimizer = torch.optim.AdamW([*trunk.parameters(), weight], betas=(0.9, 0.95), fused=True)
    input_grads = hashlib.sha256()
    backends: set[str] = set()

    def note_backend() -> None:
        if job.head == "logitless":
            backends.add(logitless.last_backend() or "none")

    for step in range(job.steps):
        started = time.perf_counter()
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate(step, job.steps)
        ids, target = batches[step]
        x = trunk(ids)
        x.retain_grad()
        loss = head_loss(job, x, weight, target, group)
        note_backend()
        torch.autograd.backward(loss)
        note_backend()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        input_grads.update(_bits(x.grad))
        emit({"step": step, "loss": loss.item(), "seconds": time.perf_counter() - started})

    torch.save({"x": x.detach(), "weight": weight.detach(), "target": target}, job.head_inputs_file)
    emit(
        {
            "backends": sorted(backends),
            "input_grads": input_grads.hexdigest(),
            "trunk": fingerprint(trunk),
        }
    )


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over the bits of all parameters, in the order of their names."""
    digest = hashlib.sha256()
    for _, parameter in sorted(module.named_parameters()):
        digest.update(_bits(parameter.detach()))
    return digest.hexdigest()


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
