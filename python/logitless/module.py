# SPDX-License-Identifier: Apache-2.0
"""`LinearCrossEntropy`: a language-model head and its loss as one module."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from . import _groups
from .functional import HeadLoss, linear_cross_entropy

__all__ = ["LinearCrossEntropy"]


class LinearCrossEntropy(nn.Module):
    """Holds this rank's rows of the head's weight [V_r, H]; calling it gives the loss.

    Takes the place of `nn.Linear(hidden, vocab, bias=False)` followed by `nn.CrossEntropyLoss`.
    The options are those of `linear_cross_entropy`.
    """

    def __init__(
        self,
        hidden: int,
        vocab_rows: int,
        *,
        group: _groups.ProcessGroup | None = None,
        temperature: float = 1.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        return_entropy: bool = False,
        return_lse: bool = False,
        memory: str | int = "auto",
        sequence_parallel: bool = False,
        vocab_size: int | None = None,
        vocab_start: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_rows, hidden, device=device, dtype=dtype))
        self.group = group
        self.temperature = temperature
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.return_entropy = return_entropy
        self.return_lse = return_lse
        self.memory = memory
        self.sequence_parallel = sequence_parallel
        self.vocab_size = vocab_size
        self.vocab_start = vocab_start
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: object) -> LinearCrossEntropy:
        """Return a head that shares the weight of a plain `nn.Linear` without bias.

        Raises TypeError for any other module (an adapter around the head would silently stay
        untrained) and ValueError for a bias.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(
                f"linear: expected a plain nn.Linear, got {type(linear).__name__} "
                "(merge an adapter into the weight first)"
            )
        bias: Tensor | None = linear.bias
        if bias is not None:
            raise ValueError("linear: expected no bias, got one")
        rows, hidden = linear.weight.shape
        head = cls(hidden, rows, device="meta", dtype=linear.weight.dtype, **options)  # type: ignore[arg-type]
        head.weight = cast("nn.Parameter", linear.weight)
        return head

    def reset_parameters(self) -> None:
        """Draw the weight as nn.Linear does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(
        self, x: Tensor, target: Tensor, temperature: float | Tensor | None = None
    ) -> Tensor | HeadLoss:
        """Return the loss of x [..., H] against target [...]; see `linear_cross_entropy`."""
        return linear_cross_entropy(
            x,
            self.weight,
            target,
            group=self.group,
            temperature=self.temperature if temperature is None else temperature,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            return_entropy=self.return_entropy,
            return_lse=self.return_lse,
            memory=self.memory,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size,
            vocab_start=self.vocab_start,
        )

    def extra_repr(self) -> str:
        rows, hidden = self.weight.shape
        return f"hidden={hidden}, vocab_rows={rows}, reduction={self.reduction!r}"
