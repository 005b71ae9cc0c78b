# SPDX-License-Identifier: Apache-2.0
"""The chunked fallback on a GPU: the truth is computed on the host."""

from __future__ import annotations

import pytest
import torch
from chunked_truth import IGNORE, Case, Result, check, make_case, run, shrink_tiles

from logitless import _chunked

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

PRECISION = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (2e-5, 5e-6),
    torch.float16: (2e-5, 5e-4),
    torch.bfloat16: (2e-5, 3e-3),
}


def on_gpu(case: Case) -> Case:
    temperature = case.temperature
    return Case(
        case.x.cuda(),
        case.weight.cuda(),
        case.target.cuda(),
        temperature.cuda() if isinstance(temperature, torch.Tensor) else temperature,
        case.vocab_size,
        {name: values.cuda() for name, values in case.upstream.items()},
    )


def on_host(result: Result) -> Result:
    nll, lse, entropy, rows = result.out
    assert entropy is not None
    assert result.dx is not None
    assert result.dw is not None
    out = _chunked.Output(nll.cpu(), lse.cpu(), entropy.cpu(), rows.cpu())
    return Result(out, result.dx.cpu(), result.dw.cpu())


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("small", [False, True])
def test_gpu_agrees_with_the_truth(
    dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        shrink_tiles(monkeypatch)
    case = make_case(tokens=61, hidden=64, vocab=1511, dtype=dtype, scale=3.0).with_upstream()
    case.target[::5] = IGNORE
    case.temperature = torch.linspace(0.6, 2.0, 61)
    case.vocab_size = 1500
    case.target %= 1500
    case.target[::5] = IGNORE
    truth = case.truth()
    case.x[::5] = float("nan")
    values, gradients = PRECISION[dtype]
    result = run(on_gpu(case))
    assert result.out.nll.is_cuda
    check(on_host(result), truth, values=values, gradients=gradients)


def test_nothing_waits_for_the_gpu() -> None:
    case = on_gpu(make_case(dtype=torch.bfloat16, hidden=64).with_upstream())
    run(case)  # the first call probes what this PyTorch can do
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_tokens_are_nan_and_without_gradient() -> None:
    case = make_case(dtype=torch.float32, hidden=64).with_upstream()
    case.temperature = torch.ones(37)
    case.target[2], case.target[3] = -7, 611
    case.temperature[8] = 0.0
    bad = torch.tensor([2, 3, 8])
    result = on_host(run(on_gpu(case)))
    assert result.dx is not None
    for values in (result.out.nll, result.out.lse, result.out.entropy):
        assert values is not None
        assert values[bad].isnan().all()
        assert values.isnan().sum() == 3
    assert not result.dx[bad].any()
    case.target[bad] = IGNORE
    case.temperature[8] = 1.0
    truth = case.truth()
    kept = torch.ones(37, dtype=torch.bool)
    kept[bad] = False
    torch.testing.assert_close(result.out.nll.double()[kept], truth.nll[kept], rtol=1e-5, atol=1e-5)
    check(result._replace(out=run(case).out), truth, values=1e-5, gradients=1e-5)


def test_memory_stays_within_the_tiles() -> None:
    """4096 tokens of a vocabulary of 131,072: 2 GiB of float32 logits, of which 64 MiB exist."""
    case = on_gpu(make_case(tokens=64, hidden=512, vocab=64, dtype=torch.bfloat16))
    case.x = case.x.repeat(64, 1)
    case.weight = case.weight.repeat(2048, 1)
    case.target = case.target.repeat(64)
    case.with_upstream("nll")
    case.upstream = {name: values.cuda() for name, values in case.upstream.items()}
    run(case)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(case)
    own = 131072 * 512 * 2 + 3 * 4096 * 512 * 4  # the gradients that are returned, dX in float32
    assert torch.cuda.max_memory_allocated() - before < own + 4 * (64 << 20)
