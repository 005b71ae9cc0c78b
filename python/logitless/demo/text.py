# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: the Python standard library's sources, as token ids."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from logitless.demo.job import Job

# Not part of every installation (distributions split them off), or not the library's own text.
_LEFT_OUT = frozenset(
    "dist-packages distutils ensurepip idlelib lib2to3 site-packages test tests turtledemo".split()
)
_BYTES = 256


def standard_library_texts(root: Path | None = None) -> list[str]:
    """The sources below `root` (default: this Python's standard library), in path order.

    Raises RuntimeError where there are none, as in an installation that keeps them in an archive.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts = []
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1]):
            texts.append(path.read_bytes().decode("utf-8", errors="replace"))
    if not texts:
        raise RuntimeError(f"text: expected Python sources below {root}, got no .py file")
    return texts


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE with at most `vocab` ids. The same texts give the same merges.

    Raises ValueError where `vocab` cannot hold the 256 bytes.
    """
    if vocab < _BYTES:
        raise ValueError(f"vocab: expected at least {_BYTES}, one id for each byte, got {vocab}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts, one after the other, as int32 ids [length]."""
    parts = [
        torch.tensor(encoding.ids, dtype=torch.int32) for encoding in tokenizer.encode_batch(texts)
    ]
    return torch.cat(parts)


class Batches:
    """The training data: step i is the same windows of the text in every process."""

    def __init__(self, job: Job) -> None:
        self._ids = torch.load(job.token_file, weights_only=True)
        last = len(self._ids) - job.sequence - 1
        if last < 0:
            raise ValueError(
                f"text: expected at least {job.sequence + 1} tokens, got {len(self._ids)}"
            )
        generator = torch.Generator().manual_seed(job.seed)
        self._starts = torch.randint(last + 1, (job.steps, job.batch), generator=generator)
        self._window = torch.arange(job.sequence + 1)

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [batch, sequence] and the ids that follow them [batch * sequence], both int64."""
        windows = self._ids[self._starts[step][:, None] + self._window].long()
        return windows[:, :-1], windows[:, 1:].reshape(-1)
