# SPDX-License-Identifier: Apache-2.0
"""The model: a one-block decoder trunk that every rank holds whole, and the two heads compared."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import logitless
from logitless.demo.job import Job

_HEAD_SIZE = 64
_INITIAL_STD = 0.02


class Block(nn.Module):
    """Causal attention and an MLP, each on a normalised input and added to the stream."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // _HEAD_SIZE if hidden % _HEAD_SIZE == 0 else 1
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = stream.shape
        qkv = self.qkv(self.attention_norm(stream)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        change: torch.Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))
        return stream + change


class Trunk(nn.Module):
    """Ids [batch, sequence] int64 -> x [batch * sequence, hidden] fp32, the head's input."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = nn.Embedding(job.vocab, job.hidden)
        self.position = nn.Embedding(job.sequence, job.hidden)
        self.block = Block(job.hidden)
        self.norm = nn.LayerNorm(job.hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        stream = self.block(self.embedding(ids) + self.position.weight)
        x: torch.Tensor = self.norm(stream).reshape(-1, stream.shape[-1])
        return x


def initial_model(job: Job) -> tuple[Trunk, nn.Parameter]:
    """The trunk and this rank's shard [V_r, hidden] fp32 of the head's weight.

    The full weight is drawn and then cut, so that every split starts from the same model.
    """
    generator = torch.Generator().manual_seed(job.seed)
    trunk = Trunk(job)
    with torch.no_grad():
        for parameter in trunk.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=_INITIAL_STD, generator=generator)
    weight = torch.empty(job.vocab, job.hidden).normal_(std=_INITIAL_STD, generator=generator)
    return trunk, nn.Parameter(weight[job.shard].clone())


def head_loss(
    job: Job,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Mean loss of x [M, hidden] against target [M], with the head that the job names."""
    if job.head == "ordinary":
        return F.cross_entropy(x @ weight.T, target)
    loss = logitless.linear_cross_entropy(x, weight, target, group=group, reduction="mean")
    assert isinstance(loss, torch.Tensor)
    return loss
