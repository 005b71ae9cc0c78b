# SPDX-License-Identifier: Apache-2.0
"""Logitless: the loss of a language-model head without its logits, over a split vocabulary.

Importing it loads no native library, starts no thread and touches no GPU.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from . import workspace
from ._backends import last_backend, select_backend
from .functional import HeadLoss, linear_cross_entropy
from .module import LinearCrossEntropy

try:
    __version__ = version("logitless")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0"

__all__ = [
    "HeadLoss",
    "LinearCrossEntropy",
    "__version__",
    "last_backend",
    "linear_cross_entropy",
    "select_backend",
    "workspace",
]
