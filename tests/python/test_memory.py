# SPDX-License-Identifier: Apache-2.0
"""What is kept and what is used at most, and the workspace calls."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from truth import BF16, FP32, IGNORE, TILE, budget, make_problem, run, same, truth

import logitless
from logitless import workspace

MIB = 2**20
TOKENS, HIDDEN, VOCAB = 2048, 64, 131072  # 1 GiB of logits in float32

# Prints by how much the process grew at most beyond what it held before, in bytes.
CHILD = """
import json, sys, torch, logitless
o = json.loads(sys.argv[1])
torch.set_num_threads(2)
torch.manual_seed(1)
small = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
logitless.linear_cross_entropy(small, small, torch.zeros(4, dtype=torch.long)).sum().backward()
x = torch.randn(o["tokens"], o["hidden"]).bfloat16().requires_grad_(o["x"])
w = torch.empty(o["vocab"], o["hidden"], dtype=torch.bfloat16).normal_().requires_grad_(o["w"])
target = torch.randint(0, o["vocab"], (o["tokens"],))
g = torch.randn(o["tokens"])
def status(name):
    with open("/proc/self/status") as lines:
        line = next(l for l in lines if l.startswith(name))
    return int(line.split()[1]) * 1024
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak begins here
before = status("VmRSS")
out = logitless.linear_cross_entropy(
    x, w, target, return_entropy=o["entropy"], return_lse=True, memory=o["memory"])
if o["x"] or o["w"]:
    out.loss.backward(g)
assert logitless.last_backend() == "cpu"
print(json.dumps([status("VmHWM") - before, float(out.loss.detach().mean())]))
"""


def peak(
    memory: str | int,
    *,
    entropy: bool = False,
    x: bool = True,
    w: bool = True,
    hidden: int = HIDDEN,
    tokens: int = TOKENS,
    vocab: int = VOCAB,
) -> int:
    options = {"memory": memory, "entropy": entropy, "x": x, "w": w}
    options |= {"hidden": hidden, "tokens": tokens, "vocab": vocab}
    # What is freed goes back at once, so that the peak is what is alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    grown, mean = json.loads(ran.stdout)
    assert 10 < mean < 300
    return int(grown)


def planned(
    memory: str | int,
    *,
    entropy: bool = False,
    x: bool = True,
    w: bool = True,
    hidden: int = HIDDEN,
    tokens: int = TOKENS,
    vocab: int = VOCAB,
) -> int:
    plan = workspace.plan(
        tokens,
        hidden,
        vocab,
        entropy=entropy,
        input_grad=x,
        weight_grad=w,
        memory=memory,
        threads=2,
    )
    gradients = 2 * hidden * (tokens * x + vocab * w)
    saved = plan.rows_bytes + plan.stash_bytes if x or w else 0
    return saved + plan.workspace_bytes + gradients


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("memory", ["stash", "recompute", 200 * MIB])
def test_peak_is_what_the_plan_says(memory: str | int) -> None:
    bound = planned(memory)
    assert bound < {"stash": 640, "recompute": 128}.get(memory, 320) * MIB  # of 1024
    assert peak(memory) <= bound + 64 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_entropy_without_gradient_costs_no_memory() -> None:
    assert peak("recompute", entropy=True) <= planned("recompute") + 64 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_c20_without_gradients_nothing_is_kept() -> None:
    assert peak("stash", x=False, w=False) <= planned("stash", x=False, w=False) + 64 * MIB
    assert planned("stash", x=False, w=False) < 64 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_c20_a_frozen_weight_costs_no_gradient_of_it() -> None:
    shape = {"hidden": 1024, "vocab": 65536, "tokens": 64}
    size = 2 * shape["hidden"] * shape["vocab"]  # 128 MiB
    assert peak("stash", w=False, **shape) <= planned("stash", w=False, **shape) + size // 2


def forward_bytes(plan: workspace.Plan) -> int:
    found = re.search(r"workspace of forward\s+(\d+) bytes", plan.text)
    assert found is not None
    return int(found[1])


def test_entropy_costs_nothing_in_the_plan(dtype: torch.dtype) -> None:
    """Forward with it keeps nothing more; only its gradient needs the logits again."""
    for memory in ("stash", "recompute", 2**24):
        plain, more = (
            workspace.plan(512, 64, 8192, dtype=dtype, memory=memory, entropy=entropy)
            for entropy in (False, True)
        )
        assert more.rows_bytes == plain.rows_bytes
        assert more.stash_bytes == plain.stash_bytes
        # One more number for a row and 512 columns of it.
        assert forward_bytes(more) - forward_bytes(plain) <= 512 * (8192 // TILE) * 8
        assert str(more.stash_columns) in more.text
    nothing_kept = {"dtype": dtype, "input_grad": False, "weight_grad": False}
    plain = workspace.plan(512, 64, 8192, **nothing_kept)
    more = workspace.plan(512, 64, 8192, entropy=True, **nothing_kept)
    assert more.workspace_bytes - plain.workspace_bytes <= 512 * (8192 // TILE) * 8


def test_plan_of_the_policies(dtype: torch.dtype) -> None:
    size = 2 if dtype == BF16 else 4
    shape = (1000, 64, 5000)
    stash = workspace.plan(*shape, dtype=dtype, memory="stash")
    assert stash.stash_columns == 5000
    assert stash.token_pitch == 1008
    assert stash.stash_bytes == 5000 * 1008 * size
    assert stash.rows_bytes == 24 * 1000
    assert workspace.plan(*shape, dtype=dtype, memory="recompute").stash_bytes == 0
    p = make_problem(*shape, dtype=dtype)
    bound = budget(p, 2 * TILE)
    mixed = workspace.plan(*shape, dtype=dtype, memory=bound)
    assert mixed.stash_columns == 2 * TILE
    assert mixed.stash_bytes + mixed.rows_bytes <= bound
    assert workspace.plan(*shape, dtype=dtype, memory=bound - 1).stash_columns == TILE
    assert workspace.plan(*shape, dtype=dtype, memory=2**40).stash_columns == 5000
    with pytest.raises(ValueError, match=f"{budget(p, 0)}"):
        workspace.plan(*shape, dtype=dtype, memory=budget(p, 0) - 1)


def test_a_stash_larger_than_the_automatic_budget() -> None:
    """8 GiB would be needed: auto keeps at most 1 GiB, in whole tiles."""
    plan = workspace.plan(32768, 4096, 131072)
    assert plan.stash_columns % TILE == 0
    assert 0 < plan.stash_columns < 131072
    assert 2**30 - TILE * 2 * 32768 < plan.stash_bytes <= 2**30


@pytest.fixture
def released() -> Iterator[None]:
    workspace.release()
    yield
    workspace.release()


@pytest.mark.usefixtures("released")
def test_c28_a_configured_workspace(dtype: torch.dtype) -> None:
    problems = {m: make_problem(m, 16, 600, dtype=dtype, seed=m) for m in (8192, 100, 5000, 8193)}
    fresh = {m: run(p) for m, p in problems.items()}
    workspace.release()
    wanted = workspace.query(8192, 16, 600, dtype=dtype)
    assert wanted > 0
    workspace.configure(8192, 16, 600, dtype=dtype)
    assert workspace.query(8192, 16, 600, dtype=dtype) == wanted
    workspace.configure(8192, 16, 600, dtype=dtype)  # the same again changes nothing
    for tokens in (4096, 8193):
        with pytest.raises(RuntimeError, match=rf"(?s)({tokens}.*8192|8192.*{tokens})"):
            workspace.query(tokens, 16, 600, dtype=dtype)
        with pytest.raises(RuntimeError, match=rf"(?s)({tokens}.*8192|8192.*{tokens})"):
            workspace.configure(tokens, 16, 600, dtype=dtype)
    for tokens in (8192, 100, 5000, 8192):
        assert same(run(problems[tokens]), fresh[tokens]), tokens
    with pytest.raises(RuntimeError, match=r"(?s)(8193.*8192|8192.*8193)"):
        run(problems[8193])
    assert same(run(problems[100]), fresh[100])
    workspace.release()
    assert same(run(problems[8193]), fresh[8193])


@pytest.mark.usefixtures("released")
def test_c28_other_dimensions_beyond_the_workspace() -> None:
    workspace.configure(64, 32, 700)
    for p in (make_problem(64, 33, 700), make_problem(64, 32, 701)):
        with pytest.raises(RuntimeError, match=r"(33|701)"):
            run(p)
    with pytest.raises(RuntimeError, match="float32"):
        run(make_problem(64, 32, 700, dtype=FP32))
    run(make_problem(64, 32, 700))


@pytest.mark.usefixtures("released")
def test_c28_sizes_up_and_down_without_configuration(dtype: torch.dtype) -> None:
    problems = [make_problem(m, 16, v, dtype=dtype) for m, v in ((300, 900), (10, 40), (900, 2000))]
    first = [run(p) for p in problems]
    for i in (2, 1, 0, 1, 2):
        assert same(run(problems[i]), first[i])


@pytest.mark.usefixtures("released")
def test_c28_a_workspace_that_cannot_be_had() -> None:
    """The bytes are named, and the next call works."""
    with pytest.raises((MemoryError, RuntimeError, ValueError)) as caught:
        workspace.configure(2**31 - 65, 2**20, 2**31 - 513)
    assert any(len(word) > 9 for word in str(caught.value).split() if word.isdigit())
    p = make_problem(20, 16, 100)
    run(p)


def test_query_allocates_nothing_and_needs_no_configuration() -> None:
    workspace.release()
    assert workspace.query(2**17, 8192, 2**18) > workspace.query(128, 64, 1024) > 0


def test_all_ignored_rows_of_a_hybrid_plan(dtype: torch.dtype) -> None:
    p = make_problem(40, 32, 3000, dtype=dtype, upstream="g h q")
    result = run(replace(p, target=torch.full((40,), IGNORE)), memory=budget(p, TILE))
    assert not any(v.any() for v in result if v is not None)
    assert logitless.last_backend() == "cpu"
    assert truth(p).nll.shape == (40,)
