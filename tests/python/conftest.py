# SPDX-License-Identifier: Apache-2.0
"""What the tests of one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Both dtypes that have native kernels."""
    return request.param


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Give the next test the number of threads that this one found."""
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
