# SPDX-License-Identifier: Apache-2.0
"""What is refused, and how it is said."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from truth import BF16, FP32, error, make_problem, run, same, truth

import logitless
from logitless import _backends, linear_cross_entropy

P = make_problem(12, 16, 50, dtype=FP32)


def refused(kind: type[Exception], text: str, **changes: object) -> None:
    arguments = {"x": P.x, "weight": P.weight, "target": P.target, **changes}
    with pytest.raises(kind, match=text):
        linear_cross_entropy(**arguments)  # type: ignore[arg-type]


def test_no_labels() -> None:
    refused(TypeError, "^target: expected a tensor, got NoneType", target=None)


def test_no_weight_or_input() -> None:
    refused(TypeError, "^weight: expected a tensor, got NoneType", weight=None)
    refused(TypeError, "^x: expected a tensor, got list", x=[[1.0]])


def test_a_module_in_place_of_its_weight() -> None:
    refused(TypeError, "^weight: .*module Linear", weight=nn.Linear(16, 50, bias=False))


class Adapter(nn.Module):
    """Shaped like a low-rank adapter around a head: it has a weight, which is not all."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.low = nn.Linear(base.in_features, 2, bias=False)
        self.high = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.high(self.low(x))


class WiderLinear(nn.Linear):
    pass


def test_an_adapter_is_not_taken_for_its_base() -> None:
    wrapped = Adapter(nn.Linear(16, 50, bias=False))
    refused(TypeError, "^weight: .*module Adapter .*adapter", weight=wrapped)
    with pytest.raises(TypeError, match="^linear: expected a plain nn.Linear, got Adapter"):
        logitless.LinearCrossEntropy.from_linear(wrapped)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got WiderLinear"):
        logitless.LinearCrossEntropy.from_linear(WiderLinear(16, 50, bias=False))
    with pytest.raises(ValueError, match="^linear: expected no bias"):
        logitless.LinearCrossEntropy.from_linear(nn.Linear(16, 50))


@pytest.mark.parametrize("shape", [(0,), (0, 16), (0, 0)])
def test_a_weight_that_is_not_gathered(shape: tuple[int, ...]) -> None:
    refused(ValueError, "^weight: .*ZeRO-3 or FSDP", weight=torch.empty(shape))
    refused(ValueError, "^weight: .*ZeRO-3 or FSDP", weight=nn.Parameter(torch.empty(shape)))


def test_a_dtensor_is_refused() -> None:
    class DTensor(Tensor):
        """Named as torch's: it is refused by name, without an import of torch.distributed."""

    fake = torch.Tensor._make_subclass(DTensor, P.weight)
    refused(TypeError, "^weight: expected a plain tensor, got a DTensor", weight=fake)


def test_a_real_dtensor_is_refused(tmp_path: object) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(P.weight, mesh, [Shard(0)])
        refused(TypeError, "^weight: expected a plain tensor, got a DTensor", weight=weight)
        wrapped = nn.Parameter(weight)
        refused(TypeError, "^weight: expected a plain tensor, got a DTensor", weight=wrapped)
        linear_cross_entropy(P.x, weight.to_local(), P.target)
        assert logitless.last_backend() == "cpu"
    finally:
        dist.destroy_process_group()


def test_tokens_that_do_not_match() -> None:
    refused(ValueError, r"^tokens: .*\(12,\) and \(11,\)", target=P.target[:11])
    refused(ValueError, r"^tokens: .*\(12,\) and \(3, 4\)", target=P.target.reshape(3, 4))
    refused(ValueError, r"^tokens: .*\(3, 4\) and \(12,\)", x=P.x.reshape(3, 4, 16))


def test_hidden_sizes_that_do_not_match() -> None:
    refused(ValueError, r"^hidden: .*\(12, 16\) and \(50, 15\)", weight=P.weight[:, :15])
    refused(
        ValueError, r"^weight: expected \[V_r, H\], got shape \(800,\)", weight=P.weight.reshape(-1)
    )


def test_a_hidden_size_of_zero() -> None:
    refused(ValueError, r"\(50, 0\)", x=torch.zeros(12, 0), weight=torch.zeros(50, 0))


def test_dtypes() -> None:
    refused(TypeError, "^dtype: .*float32 and torch.bfloat16", weight=P.weight.to(BF16))
    refused(TypeError, "^dtype: .*int64", x=P.x.long(), weight=P.weight.long())
    refused(TypeError, "^dtype: .*complex64", x=P.x.to(torch.complex64), weight=P.weight)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int8, torch.bool, torch.float32])
def test_c14_other_target_dtypes_are_refused(kind: torch.dtype) -> None:
    refused(TypeError, f"^target: expected int64 or int32, got {kind}", target=P.target.to(kind))


def test_c14_int32_equals_int64(dtype: torch.dtype) -> None:
    p = make_problem(30, 16, 300, dtype=dtype, ignored=0.2)
    assert same(run(replace(p, target=p.target.int())), run(p))


def test_c14_devices_that_differ() -> None:
    refused(
        TypeError, "^target: expected the device of x, cpu, got meta", target=P.target.to("meta")
    )
    refused(
        TypeError, "^weight: expected the device of x, cpu, got meta", weight=P.weight.to("meta")
    )


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-39, 1e-45])
def test_c26_bad_temperature(bad: float) -> None:
    refused(ValueError, "^temperature: expected a positive number", temperature=bad)
    refused(ValueError, "^temperature: ", temperature=torch.tensor(bad))
    each = torch.ones(12)
    each[7] = bad
    refused(ValueError, "^temperature: .*position 7", temperature=each)
    assert same(run(P), run(P))


@pytest.mark.parametrize("bad", [None, "1", True, [1.0]])
def test_c26_temperature_of_another_type(bad: object) -> None:
    refused(TypeError, "^temperature: expected a number or a tensor", temperature=bad)


def test_c26_temperature_tensors() -> None:
    refused(ValueError, r"^temperature: .*\(12,\), got shape \(11,\)", temperature=torch.ones(11))
    refused(ValueError, "^temperature: .*gradient", temperature=torch.ones(12, requires_grad=True))
    refused(TypeError, "^temperature: .*device", temperature=torch.ones(12, device="meta"))
    for kind in (torch.float64, torch.float16, torch.int64):
        assert same(
            run(replace(P, temperature=torch.full((12,), 2, dtype=kind))),
            run(replace(P, temperature=2.0)),
        )


def test_a_bad_temperature_of_an_ignored_row_is_not_looked_at(dtype: torch.dtype) -> None:
    p = make_problem(12, 16, 50, dtype=dtype)
    p.target[3] = -100
    good = torch.full((12,), 0.7)
    bad = good.clone()
    bad[3] = 0.0
    want, got = run(replace(p, temperature=good)), run(replace(p, temperature=bad))
    assert got.nll[3] == 0
    assert torch.equal(got.nll, want.nll)
    assert got.dx is not None and want.dx is not None
    assert torch.equal(got.dx, want.dx)


def test_other_options() -> None:
    refused(ValueError, "^reduction: .*'average'", reduction="average")
    refused(ValueError, "^memory: .*'small'", memory="small")
    refused(ValueError, "^memory: expected at least 0 bytes, got -5", memory=-5)
    refused(TypeError, "^memory: .*float", memory=1e9)
    refused(TypeError, "^memory: .*bool", memory=True)
    refused(TypeError, "^group: ", group="world")
    refused(ValueError, "^vocab_size: ", vocab_size=0)
    refused(ValueError, "^vocab_start: ", vocab_start=-3)
    refused(ValueError, "^main_grad: .*shape", main_grad=torch.zeros(50, 15))
    refused(TypeError, "^main_grad: .*float16", main_grad=torch.zeros(50, 16, dtype=torch.float16))


def test_a_bound_below_the_least_is_named() -> None:
    x = P.x.clone().requires_grad_()
    least = 24 * 12 + 50 * 16 * 4
    text = f"^memory: expected at least {least} bytes for 12 tokens, got {least - 1}"
    with pytest.raises(ValueError, match=text):
        linear_cross_entropy(x, P.weight, P.target, memory=least - 1)
    linear_cross_entropy(x, P.weight, P.target, memory=least)
    assert logitless.last_backend() == "cpu"


def test_nothing_is_shifted() -> None:
    """Token i is scored against target i."""
    weight = torch.eye(16) * 40
    ids = torch.randint(0, 16, (10,), generator=torch.Generator().manual_seed(1))
    p = replace(P, x=torch.eye(16)[ids], weight=weight, target=ids)
    assert not run(replace(p, g=None)).nll.gt(1e-6).any()
    assert run(replace(p, g=None, target=(ids + 1) % 16)).nll.min() > 39


@pytest.fixture
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "_warned", set())
    torch.compiler.reset()


def test_autocast_to_bfloat16_stays_native() -> None:
    p = make_problem(40, 32, 900, dtype=FP32)
    x, weight = p.x.clone().requires_grad_(), p.weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        loss = linear_cross_entropy(x, weight, p.target)
    assert isinstance(loss, Tensor)
    assert logitless.last_backend() == "cpu"
    loss.backward(p.g)
    narrow = run(replace(p, x=p.x.to(BF16), weight=p.weight.to(BF16)))
    assert loss.dtype == FP32
    assert torch.equal(loss.detach(), narrow.nll)
    assert x.grad is not None and x.grad.dtype == FP32
    assert torch.equal(x.grad, narrow.dx.float())
    assert weight.grad is not None
    assert torch.equal(weight.grad, narrow.dw.float())


def test_autocast_to_float16_falls_back_with_one_warning(fresh_warnings: None) -> None:
    p = make_problem(40, 32, 900, dtype=FP32)
    x, weight = p.x.clone().requires_grad_(), p.weight.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = linear_cross_entropy(x, weight, p.target)
            assert logitless.last_backend() == "chunked-pytorch"
    ours = [str(w.message) for w in caught if "logitless" in str(w.message)]
    assert len(ours) == 1
    assert "float16" in ours[0]
    assert isinstance(loss, Tensor)
    loss.backward(p.g)
    assert logitless.last_backend() == "chunked-pytorch"
    narrow = replace(p, x=p.x.half(), weight=p.weight.half())
    wanted = truth(narrow)
    assert x.grad is not None
    assert error(x.grad, wanted.dx) <= 2e-3
    assert error(weight.grad, wanted.dw) <= 2e-3


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_other_dtypes_run_in_chunks(kind: torch.dtype, fresh_warnings: None) -> None:
    p = make_problem(20, 16, 300, dtype=kind)
    if kind == torch.float64:
        p = replace(p, g=p.g.double())
    assert logitless.select_backend("cpu", kind)[0] == "chunked-pytorch"
    with pytest.warns(UserWarning, match="chunked PyTorch"):
        out = linear_cross_entropy(p.x, p.weight, p.target)
    assert isinstance(out, Tensor)
    assert logitless.last_backend() == "chunked-pytorch"
    assert out.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    result = run(p, backend="chunked-pytorch")
    wanted = truth(p)
    assert error(result.nll, wanted.nll) <= (1e-12 if kind == torch.float64 else 1e-5)
    assert error(result.dx, wanted.dx) <= (1e-11 if kind == torch.float64 else 1e-3)


def test_backend_names() -> None:
    name, reason = logitless.select_backend("cpu", BF16)
    assert (name, bool(reason)) == ("cpu", True)
    name, reason = logitless.select_backend("cuda", BF16)
    assert name == "chunked-pytorch"
    assert "cuda" in reason
