# SPDX-License-Identifier: Apache-2.0
"""What this machine can run, and why not: `logitless doctor`."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

import logitless

from . import _library
from ._backends import CPU, VARIABLE

__all__ = ["doctor"]

_PICKS = (
    ("cpu", torch.bfloat16),
    ("cpu", torch.float32),
    ("cpu", torch.float16),
    ("cpu", torch.float64),
    ("cuda", torch.bfloat16),
)
_SELF_TEST_LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
_PLAIN_WIDTH = 100  # columns where the output is no terminal


@dataclass
class _Pick:
    """The backend that a call would get."""

    device: str
    dtype: str
    backend: str | None  # None: the call would raise
    reason: str


@dataclass
class _SelfTest:
    """The native CPU backend on a small problem, against float64."""

    dtype: str
    passed: bool
    error: float | None  # the largest of loss, dX and dW, each relative to its norm
    limit: float
    reason: str


def doctor(*, as_json: bool = False) -> int:
    """Print what this machine can run. Returns 0 where the C++ backend works for CPU, else 1."""
    found = _examine()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _show(found)
    return 0 if found["works"] else 1


def _examine() -> dict[str, Any]:
    available, reason = _library.is_available()
    path = next((str(p) for p in _library._candidates() if p.is_file()), None)
    build = _library.build_info() if available else {}
    picks = [_pick(device, dtype) for device, dtype in _PICKS]
    tests = [_self_test(dtype, limit) for dtype, limit in _SELF_TEST_LIMIT.items()]
    troubles = [] if available else [reason]
    if available and "products" not in build:
        troubles.append("this build has no CPU backend (oneDNN was not found)")
    # What the variable says is no fault of the backend, unless no call can be made.
    troubles += sorted(
        {pick.reason for pick in picks if pick.backend is None and "cpu" in pick.device}
    )
    if not troubles:
        troubles += [f"self-test, {test.dtype}: {test.reason}" for test in tests if not test.passed]
    return {
        "works": not troubles,
        "troubles": troubles,
        "versions": {
            "logitless": logitless.__version__,
            "library": build.get("version"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tvm_ffi": _version("apache-tvm-ffi"),
            "products": build.get("products"),
        },
        "library": {"path": path, "loads": available, "reason": reason},
        "cpu": {
            "native_bf16": build.get("native_bf16"),
            "library_threads": build.get("threads"),
            "torch_threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
        "gpus": _gpus(),
        "distributed": _distributed(),
        "forced": os.environ.get(VARIABLE),
        "picks": [asdict(pick) for pick in picks],
        "self_test": [asdict(test) for test in tests],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    """Return the names and capabilities of the GPUs; allocates nothing on them."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def _distributed() -> dict[str, bool]:
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}


def _pick(device: str, dtype: torch.dtype) -> _Pick:
    name = str(dtype).removeprefix("torch.")
    try:
        return _Pick(device, name, *logitless.select_backend(device, dtype))
    except ValueError as error:
        return _Pick(device, name, None, str(error))


def _self_test(dtype: torch.dtype, limit: float) -> _SelfTest:
    name = str(dtype).removeprefix("torch.")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = CPU
    try:
        error = _error(dtype)
    except Exception as problem:
        return _SelfTest(name, False, None, limit, f"{type(problem).__name__}: {problem}")
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
    if not error <= limit:
        why = f"expected a relative error of at most {limit:.0e}, got {error:.1e}"
        return _SelfTest(name, False, error, limit, why)
    return _SelfTest(name, True, error, limit, "agrees with float64")


def _error(dtype: torch.dtype) -> float:
    """Return the largest relative error of loss, dX and dW on a problem with ragged sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 48, generator=generator).to(dtype)
    weight = (torch.randn(701, 48, generator=generator) / 4).to(dtype)
    target = torch.randint(0, 701, (33,), generator=generator)
    upstream = torch.randn(33, generator=generator)
    exact = x.double().requires_grad_(), weight.double().requires_grad_()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = logitless.linear_cross_entropy(x, weight, target)
    assert isinstance(loss, torch.Tensor)
    got = (loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream))
    want_loss = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target, reduction="none")
    want = (want_loss.detach(), *torch.autograd.grad(want_loss, exact, upstream.double()))
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return float("nan") if any(error != error for error in errors) else max(errors)


def _show(found: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    versions, library, cpu = found["versions"], found["library"], found["cpu"]
    facts = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("logitless", str(versions["logitless"]))
    tvm_ffi = versions["tvm_ffi"] or "not installed"
    facts.add_row(
        "with", f"Python {versions['python']}, torch {versions['torch']}, apache-tvm-ffi {tvm_ffi}"
    )
    state = "" if library["loads"] else f"{library['reason']}"
    facts.add_row("native library", state or f"{library['path']} (version {versions['library']})")
    facts.add_row("CPU backend", _cpu_text(cpu, versions["products"]))
    facts.add_row("GPUs", _gpu_text(found["gpus"]))
    groups = [name for name, there in found["distributed"].items() if there]
    facts.add_row("process groups", ", ".join(groups) or "none: this PyTorch has no distributed")
    if found["forced"]:
        facts.add_row(VARIABLE, found["forced"])
    console.print(facts, highlight=False)

    picks = Table(title="Which backend runs a call", title_justify="left")
    for name in ("device", "dtype", "backend", "reason"):
        picks.add_column(name, overflow="fold")
    for pick in found["picks"]:
        backend = pick["backend"] or Text("error", "bold red")
        picks.add_row(pick["device"], pick["dtype"], backend, Text(pick["reason"]))
    console.print()
    console.print(picks)

    console.print()
    for test in found["self_test"]:
        figures = ""
        if test["error"] is not None:
            figures = f", relative error {test['error']:.1e}, limit {test['limit']:.0e}"
        word = Text("passed", "green") if test["passed"] else Text("FAILED", "bold red")
        console.print(
            Text("self-test of the C++ backend, ").append(test["dtype"] + ": ").append(word),
            Text(figures if test["passed"] else f": {test['reason']}"),
            sep="",
        )
    for trouble in found["troubles"]:
        console.print(Text("doctor: ", "bold red").append(Text(trouble, "default")))
    if found["works"]:
        console.print(Text("The C++ backend works on this CPU.", "green"))


def _cpu_text(cpu: dict[str, Any], products: str | None) -> str:
    if products is None:
        return "none"
    bf16 = "native" if cpu["native_bf16"] else "widened to fp32"
    return (
        f"products by {products}, bf16 {bf16}; {cpu['library_threads']} cores, "
        f"{cpu['torch_threads']} threads of PyTorch"
    )


def _gpu_text(gpus: list[dict[str, Any]]) -> str:
    if not gpus:
        return "none seen by PyTorch"
    return "\n".join(f"{g['name']}, capability {g['capability']}, {g['gib']} GiB" for g in gpus)
