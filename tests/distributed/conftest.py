# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks

WORLD = 5


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for groups of one to five ranks."""
    pool = Ranks(WORLD)
    yield pool
    codes = pool.stop()
    assert set(codes) <= {0}, f"expected every worker to exit with 0, got {codes}"
