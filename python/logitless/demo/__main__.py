# SPDX-License-Identifier: Apache-2.0
"""`python -m logitless.demo`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from logitless import demo


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m logitless.demo",
        description="Train a small model with and without logits, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=demo.DEFAULT_STEPS, help="training steps")
    parser.add_argument("--vocab", type=int, default=demo.DEFAULT_VOCAB, help="vocabulary size")
    parser.add_argument("--tokens", type=int, default=demo.DEFAULT_TOKENS, help="tokens a step")
    parser.add_argument("--hidden", type=int, default=demo.DEFAULT_HIDDEN, help="hidden size")
    parser.add_argument("--seed", type=int, default=demo.DEFAULT_SEED, help="of model and data")
    parser.add_argument("--out", type=Path, default=demo.DEFAULT_OUT, help="folder of the results")
    return demo.run(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
