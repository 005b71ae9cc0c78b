# SPDX-License-Identifier: Apache-2.0
"""Random problems: case k of a seed is the same one everywhere, whatever runs it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from logitless import _memory

__all__ = ["IGNORE", "Case", "draw"]

IGNORE = -100

# Around the sizes at which vectors, groups of 64 columns, and tiles of 512 and 2048 end.
_TOKENS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 129, 200, 257)
_HIDDEN = (8, 16, 24, 40, 64, 72, 100, 128, 136, 200, 256)
_VOCAB = (5, 37, 63, 64, 65, 127, 128, 129, 200, 511, 513, 1000, 2047, 2049, 2600, 4097, 5000)
_KINDS = ("flat", "ordinary", "peaked", "confident", "offset", "negative")


@dataclass
class Case:
    """One problem with its upstream gradients: whole tensors of the group, on the CPU."""

    index: int
    kind: str  # how the logits are distributed
    x: Tensor  # [M, H]
    weight: Tensor  # [rows, H]; rows from `vocab_size` on are padding
    target: Tensor  # [M] int64 or int32
    temperature: float | Tensor  # τ; [M] float32
    vocab_size: int
    name_vocab_size: bool  # false: it is the number of rows, and the call does not say it
    name_vocab_start: bool
    vocab_ends: tuple[int, ...]  # R + 1: the shards' ends, from 0 to rows
    token_ends: tuple[int, ...] | None  # R + 1 with sequence parallelism
    reduction: str
    return_entropy: bool
    return_lse: bool
    memory: str | int
    want_input_grad: bool
    want_weight_grad: bool
    main_grad: Tensor | None  # [rows, H] float32 or float64: what the weight's gradient is added to
    upstream: dict[str, Tensor]  # of "loss", "entropy", "lse": [M] or [] float32, random signs
    rows_are_nan: bool  # x of ignored tokens is NaN

    @property
    def live(self) -> Tensor:
        """Return which tokens count: [M] bool."""
        return self.target != IGNORE

    def shard(self, rank: int) -> slice:
        """Return the rows of the weight that a rank holds."""
        return slice(self.vocab_ends[rank], self.vocab_ends[rank + 1])

    def tokens(self, rank: int) -> slice:
        """Return the tokens whose x and dX a rank holds."""
        if self.token_ends is None:
            return slice(0, len(self.target))
        return slice(self.token_ends[rank], self.token_ends[rank + 1])

    def shape(self) -> str:
        """Return M×H×V and, for a group, the sizes of the shards."""
        tokens, hidden = self.x.shape
        text = f"{tokens}×{hidden}×{self.vocab_size}"
        if len(self.vocab_ends) > 2:
            text += " " + "+".join(str(b - a) for a, b in pairwise(self.vocab_ends))
        return text

    def options(self) -> str:
        """Return what is out of the ordinary, in a few words: ∂ are the upstream gradients."""
        words = [self.kind]
        if isinstance(self.temperature, Tensor):
            words.append("τ/token")
        elif self.temperature != 1.0:
            words.append(f"τ {self.temperature:.3g}")
        ignored = int((~self.live).sum())
        if ignored:
            words.append(f"{ignored} ignored" + (" NaN" if self.rows_are_nan else ""))
        padding = len(self.weight) - self.vocab_size
        if padding:
            words.append(f"{padding} padded")
        if self.reduction != "none":
            words.append(self.reduction)
        if set(self.upstream) != {"loss"}:
            words.append("∂" + "+".join(self.upstream))
        if self.memory != "auto":
            words.append(f"{self.memory} B" if isinstance(self.memory, int) else self.memory)
        if not self.want_input_grad:
            words.append("no dX")
        if not self.want_weight_grad:
            words.append("no dW")
        if self.main_grad is not None:
            words.append("main_grad")
        if self.token_ends is not None:
            words.append("seq-parallel")
        if self.target.dtype == torch.int32:
            words.append("int32")
        return ", ".join(words)


def _ends(total: int, parts: int, least: int, rng: random.Random) -> tuple[int, ...]:
    """Cut `total` into uneven parts of at least `least`."""
    free = total - least * parts
    if rng.random() < 0.25:
        cuts = [free * part // parts for part in range(1, parts)]
    else:
        cuts = sorted(rng.randint(0, free) for _ in range(1, parts))
    return (0, *(cut + least * part for part, cut in enumerate(cuts, start=1)), total)


def _matrices(
    kind: str, tokens: int, hidden: int, vocab: int, target: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return x [M, H] and the weight [V, H] in float64."""
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    weight *= {"ordinary": 3.0, "peaked": 12.0}.get(kind, 1.0) / math.sqrt(hidden)
    if kind == "confident":
        # The target's logit is raised until p is, at τ = 1, 0.98 … 1 − 1e-6.
        gap = math.log(vocab) + 4.0 + 10.0 * torch.rand(tokens, 1, generator=generator)
        rows = weight[target]
        x = 0.3 * x + rows * gap / rows.square().sum(1, keepdim=True)
    elif kind == "offset":
        x[:, 0], weight[:, 0] = 16.0, 48.0
    elif kind == "negative":
        x[:, 0], weight[:, 0] = 8.0, -12.0
    return x, weight


def _temperature(rng: random.Random, tokens: int, generator: torch.Generator) -> float | Tensor:
    choice = rng.random()
    if choice < 0.4:
        return 1.0
    if choice < 0.7:
        return round(math.exp(rng.uniform(math.log(0.1), math.log(4.0))), 3)
    return torch.exp2(4.0 * torch.rand(tokens, generator=generator) - 2.0)


def _ignore(rng: random.Random, target: Tensor, generator: torch.Generator) -> None:
    choice = rng.random()
    if choice < 0.5:
        return
    if choice < 0.85:
        target[torch.rand(len(target), generator=generator) < 0.3] = IGNORE
    elif choice < 0.9:
        target[: len(target) // 2] = IGNORE
    elif choice < 0.95:
        target[:-1] = IGNORE
    else:
        target[:] = IGNORE


def _memory_policy(rng: random.Random, tokens: int, columns: int) -> str | int:
    policy = rng.choice(("auto", "stash", "recompute", "bytes"))
    if policy != "bytes":
        return policy
    # Between the least and all, at the widest element that may come.
    column = _memory.token_pitch(tokens) * 4
    least = 24 * tokens + min(columns, 2048) * column
    return least + int(rng.random() * columns * column)


def _upstream(
    rng: random.Random, case_size: int, reduction: str, outputs: list[str], g: torch.Generator
) -> dict[str, Tensor]:
    chosen = [name for name in outputs if rng.random() < 0.6] or [rng.choice(outputs)]
    found = {}
    for name in chosen:
        scalar = name == "loss" and reduction != "none"
        values = torch.randn(() if scalar else (case_size,), generator=g)
        if not scalar and case_size > 2 and rng.random() < 0.4:
            values[rng.randrange(case_size)] = 0.0
            values[rng.randrange(case_size)] *= 100.0
        found[name] = values
    return found


def draw(seed: int, index: int, dtype: torch.dtype, ranks: int) -> Case:
    """Return case `index` of a seed. Only the shards depend on the number of ranks."""
    rng = random.Random(f"{seed}/{index}")
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    kind = rng.choice(_KINDS)
    tokens, hidden, vocab = rng.choice(_TOKENS), rng.choice(_HIDDEN), rng.choice(_VOCAB)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    x, weight = _matrices(kind, tokens, hidden, vocab, target, generator)
    _ignore(rng, target, generator)
    x, weight = x.to(dtype), weight.to(dtype)
    rows_are_nan = bool((target == IGNORE).any()) and rng.random() < 0.5
    if rows_are_nan:
        x[target == IGNORE] = math.nan
    # A shard as large as the vocabulary is refused: it looks like the whole weight.
    padding = min(rng.choice((1, 7, 64, 130)), vocab - 2) if rng.random() < 0.3 else 0
    # A shard has at least one row.
    padding = max(padding, ranks - vocab)
    if padding:
        # What padding holds must not matter.
        rubbish = torch.full((padding, hidden), rng.choice((0.0, 300.0, math.nan)), dtype=dtype)
        weight = torch.cat((weight, rubbish))
    temperature = _temperature(rng, tokens, generator)
    if rng.random() < 0.2:
        target = target.to(torch.int32)
    reduction = rng.choice(("none", "none", "none", "sum", "mean"))
    return_entropy, return_lse = rng.random() < 0.5, rng.random() < 0.5
    outputs = ["loss"] + ["entropy"] * return_entropy + ["lse"] * return_lse
    upstream = _upstream(rng, tokens, reduction, outputs, generator)
    memory = _memory_policy(rng, tokens, vocab)
    wanted = rng.choice(("both", "both", "both", "both", "input", "weight"))
    main_grad = None
    if wanted != "input" and rng.random() < 0.25:
        wide = torch.promote_types(dtype, torch.float32)
        main_grad = 0.1 * torch.randn(weight.shape, generator=generator, dtype=wide)
    name_vocab_start, sequence_parallel = rng.random() < 0.5, rng.random() < 0.25
    name_vocab_size = padding > 0 or rng.random() < 0.3
    vocab_ends = _ends(len(weight), ranks, 1, rng)
    while ranks > 1 and max(b - a for a, b in pairwise(vocab_ends)) >= vocab:
        vocab_ends = _ends(len(weight), ranks, 1, rng)
    return Case(
        index=index,
        kind=kind,
        x=x,
        weight=weight,
        target=target,
        temperature=temperature,
        vocab_size=vocab,
        name_vocab_size=name_vocab_size,
        name_vocab_start=name_vocab_start,
        vocab_ends=vocab_ends,
        token_ends=_ends(tokens, ranks, 0, rng) if sequence_parallel else None,
        reduction=reduction,
        return_entropy=return_entropy,
        return_lse=return_lse,
        memory=memory,
        want_input_grad=wanted != "weight",
        want_weight_grad=wanted != "input",
        main_grad=main_grad,
        upstream=upstream,
        rows_are_nan=rows_are_nan,
    )
