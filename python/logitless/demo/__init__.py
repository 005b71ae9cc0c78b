# SPDX-License-Identifier: Apache-2.0
"""Trains a small next-token model twice: with ordinary logits, and without logits.

The vocabulary of the second model's head is split over two processes. Both models start from the
same parameters and see the same text in the same order, so their loss curves must coincide.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# What the demo needs beyond the package's own dependencies: the extra `demo`.
_NEEDED = ("matplotlib", "rich", "tokenizers")

DEFAULT_STEPS = 120
DEFAULT_VOCAB = 8192
DEFAULT_TOKENS = 2048
DEFAULT_HIDDEN = 128
DEFAULT_SEED = 0
DEFAULT_OUT = Path("demo-out")


def run(
    steps: int = DEFAULT_STEPS,
    vocab: int = DEFAULT_VOCAB,
    tokens: int = DEFAULT_TOKENS,
    hidden: int = DEFAULT_HIDDEN,
    seed: int = DEFAULT_SEED,
    out: Path = DEFAULT_OUT,
) -> int:
    """Runs the demo and returns its exit status: 0, or 1 after one sentence for each failure.

    `tokens` are those of one step. Writes curves.png and report.json into the folder `out`.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"demo: expected the packages {', '.join(_NEEDED)}, got no {' and no '.join(missing)}: "
            "pip install 'logitless[demo]'",
            file=sys.stderr,
        )
        return 1

    from logitless.demo.show import show

    try:
        return show(steps=steps, vocab=vocab, tokens=tokens, hidden=hidden, seed=seed, out=out)
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
