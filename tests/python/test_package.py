# SPDX-License-Identifier: Apache-2.0
"""The package: what importing it does, what the library links, and other processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from truth import make_problem, run, same

import logitless
from logitless import _library

LIBRARY = next(path for path in _library._candidates() if path.is_file())
HERE = Path(__file__).parent


def child(code: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def tool(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True).stdout


def test_no_torch_symbols_in_the_library() -> None:
    symbols = tool("nm", "-D", str(LIBRARY))
    assert "fused_linear_scaled_cross_entropy_forward" in symbols
    for line in symbols.splitlines():
        assert not re.search(r"N?K?(3c10|2at|5torch|8pybind11)\w|\bPy[A-Z]\w+", line), line


def test_no_framework_among_the_librarys_needs() -> None:
    needed = [line for line in tool("readelf", "-d", str(LIBRARY)).splitlines() if "NEEDED" in line]
    assert needed
    for line in needed:
        assert not re.search("torch|c10|cuda|nvshmem|nccl|python", line), line


def test_only_ours_is_exported() -> None:
    """Nothing of the products' library leaks, where it could meet another copy in the process."""
    exported = [
        line.split()[-1]
        for line in tool("nm", "-D", "--defined-only", str(LIBRARY)).splitlines()
        if " T " in line
    ]
    assert exported
    assert [name for name in exported if "dnnl" in name.lower()] == []


def test_c31_import_touches_nothing() -> None:
    said = child(
        "import threading, os, sys\n"
        "import torch\n"
        "before = set(os.listdir('/proc/self/task'))\n"
        "import logitless\n"
        "from logitless import _library\n"
        "assert _library._module is None\n"
        "assert 'tvm_ffi' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
        "with open('/proc/self/maps') as maps:\n"
        "    assert 'liblogitless' not in maps.read()\n"
        "assert set(os.listdir('/proc/self/task')) == before\n"
        "assert logitless.last_backend() is None\n"
        "print(logitless.__version__)\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert re.search(r"^\d+\.\d+", said, re.MULTILINE)
    assert "Warning" not in said


def test_c31_a_missing_library_is_said_once_and_the_loss_is_right() -> None:
    said = child(
        "import torch, logitless\n"
        "x, w = torch.randn(6, 8), torch.randn(30, 8)\n"
        "t = torch.arange(6)\n"
        "for _ in range(2):\n"
        "    loss = logitless.linear_cross_entropy(x, w, t)\n"
        "assert logitless.last_backend() == 'chunked-pytorch'\n"
        "want = torch.nn.functional.cross_entropy(x @ w.T, t, reduction='none')\n"
        "assert (loss - want).abs().max() < 1e-5\n"
        "print(logitless.select_backend('cpu', torch.float32))\n",
        LOGITLESS_LIBRARY="/nowhere/liblogitless_ffi.so",
    )
    assert said.count("using chunked PyTorch") == 1
    assert "/nowhere/liblogitless_ffi.so" in said


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "liblogitless_ffi.so"
    broken.write_text("not a library")
    said = child(
        "import torch, logitless\nprint(logitless.select_backend('cpu', torch.bfloat16))\n",
        LOGITLESS_LIBRARY=str(broken),
    )
    assert "chunked-pytorch" in said
    assert str(broken) in said
    assert "cannot be loaded" in said


def test_the_process_ends_cleanly_after_a_call() -> None:
    said = child(
        "import torch, logitless\n"
        "x = torch.randn(6, 8, requires_grad=True)\n"
        "logitless.linear_cross_entropy(x, torch.randn(30, 8), torch.arange(6)).sum().backward()\n"
        "print(logitless.last_backend())\n"
    )
    assert said.strip() == "cpu"


def test_narrow_dtype_without_the_processors_help() -> None:
    """On a processor without bfloat16 products operands are widened; the same tests hold."""
    limit = {"DNNL_MAX_CPU_ISA": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    said = child(
        "from logitless import _library; print(_library.build_info()['native_bf16'])", **limit
    )
    assert said.strip() in ("False", "0")
    chosen = [
        "test_numerics.py::test_our_part_of_the_error_is_small",
        "test_numerics.py::test_c03_upstream_not_uniform",
        "test_numerics.py::test_c05_opposite_gradients_of_nll_and_lse",
        "test_numerics.py::test_c29_single_rows_equal_their_batch",
        "test_numerics.py::test_rows_that_need_another_anchor",
        "test_special_values.py::test_c09_nan_in_an_ignored_row_reaches_nothing",
        "test_shapes.py::test_c15_any_hidden_size",
        "test_ffi.py::test_into_poisoned_memory",
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, **limit},
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert " passed" in ran.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_call_too() -> None:
    """A data loader forks after training began; threads of the parent do not exist there."""
    said = child(
        "import os, torch, logitless\n"
        "torch.manual_seed(1)\n"
        "x, w = torch.randn(200, 32).bfloat16(), torch.randn(900, 32).bfloat16()\n"
        "t = torch.randint(0, 900, (200,))\n"
        "def call():\n"
        "    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()\n"
        "    loss = logitless.linear_cross_entropy(a, b, t)\n"
        "    loss.sum().backward()\n"
        "    assert logitless.last_backend() == 'cpu'\n"
        "    return loss.detach(), a.grad, b.grad\n"
        "torch.set_num_threads(2)\n"
        "want = call()\n"
        "def forked():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            got = call()\n"
        "            os._exit(0 if all(torch.equal(a, b) for a, b in zip(got, want)) else 1)\n"
        "        except BaseException as problem:\n"
        "            print(problem, flush=True)\n"
        "            os._exit(2)\n"
        "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "assert forked() == 0\n"
        "assert all(torch.equal(a, b) for a, b in zip(call(), want))\n"
        "assert forked() == 0\n"
        "print('both')\n"
    )
    assert said.strip().endswith("both")


def test_last_backend_is_what_ran() -> None:
    p = make_problem(8, 8, 20, dtype=torch.float32)
    first = run(p)
    logitless.linear_cross_entropy(p.x.double(), p.weight.double(), p.target)
    assert logitless.last_backend() == "chunked-pytorch"
    assert same(run(p), first)
    assert logitless.last_backend() == "cpu"


def test_public_names_are_documented() -> None:
    for name in logitless.__all__:
        if not name.startswith("__"):
            assert getattr(logitless, name).__doc__, name
    assert (Path(logitless.__file__).parent / "py.typed").is_file()
