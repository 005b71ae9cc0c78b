# SPDX-License-Identifier: Apache-2.0
"""Random cases of the operation against float64, on any number of ranks: `logitless validate`."""

from __future__ import annotations

from .show import validate

__all__ = ["validate"]
