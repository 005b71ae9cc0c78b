# SPDX-License-Identifier: Apache-2.0
"""The layouts of the instruction layer against CuTe's; needs nvcc and CuTe's headers, and no GPU.

The headers are in the wheel of requirements/cute.txt, or where LOGITLESS_CUTLASS_INCLUDE says.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEADER = "cute/atom/mma_traits_sm100.hpp"


def headers() -> Path | None:
    """Where CuTe's headers are."""
    if given := os.environ.get("LOGITLESS_CUTLASS_INCLUDE"):
        return Path(given)
    wheel = importlib.util.find_spec("cutlass_library")
    for place in (wheel.submodule_search_locations or []) if wheel else []:
        if (Path(place) / "source/include" / HEADER).exists():
            return Path(place) / "source/include"
    return None


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The comparison, compiled."""
    nvcc, include = shutil.which("nvcc"), headers()
    if nvcc is None:
        pytest.skip("no nvcc on the path")
    if include is None:
        pytest.skip(
            "no CuTe headers: pip install --no-deps -r requirements/cute.txt, "
            "or set LOGITLESS_CUTLASS_INCLUDE"
        )
    if not (include / HEADER).exists():
        pytest.fail(f"LOGITLESS_CUTLASS_INCLUDE: expected {HEADER} in {include}")
    target = tmp_path_factory.mktemp("cute") / "layouts"
    source = Path(__file__).with_name("layouts.cu")
    options = ["-std=c++20", "-arch=sm_100a", "--expt-relaxed-constexpr"]
    command = [nvcc, *options, f"-I{ROOT}/src", "-isystem", str(include)]
    done = subprocess.run(
        [*command, str(source), "-o", str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def result(program: Path, *arguments: str) -> tuple[int, str, int, int]:
    """(exit status, everything it said, places that differ, places)."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    last = re.search(r"^(\d+) of (\d+) places differ$", done.stdout, re.MULTILINE)
    assert last, done.stdout
    return done.returncode, done.stdout, int(last[1]), int(last[2])


@pytest.mark.timeout(600)  # nvcc takes a minute
def test_layouts_are_those_of_cute(program: Path) -> None:
    status, said, differ, places = result(program)
    assert (status, differ) == (0, 0), said
    assert places > 500_000


@pytest.mark.timeout(600)
def test_a_difference_in_any_table_is_seen(program: Path) -> None:
    status, said, differ, _ = result(program, "--break")
    assert status == 1
    for table in ("tile, K-major, swizzle 64 B", "tile, MN-major, swizzle none"):
        assert table in said
    for table in ("wgmma operand", "tcgen05 operand", "wgmma fragment", "accumulator", "rows of"):
        assert table in said
    assert differ == said.count("expected 0x")
