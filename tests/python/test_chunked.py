# SPDX-License-Identifier: Apache-2.0
"""The chunked fallback on one rank."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from chunked_truth import IGNORE, PRECISION, check, error, make_case, run, shrink_tiles
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logitless import _chunked
from logitless._groups import SingleRank


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_random_signed_upstreams(dtype: torch.dtype, scale: float, small_tiles: None) -> None:
    case = make_case(dtype=dtype, scale=scale).with_upstream()
    values, gradients = PRECISION[dtype]
    result = run(case)
    check(result, case.truth(), values=values * max(1.0, scale), gradients=gradients)
    assert result.dx is not None
    assert result.dw is not None
    assert result.dx.dtype == result.dw.dtype == dtype
    assert result.out.nll.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("names", ["nll", "entropy", "lse", "nll lse", "entropy lse", ""])
def test_absent_upstreams_are_zero(names: str, small_tiles: None) -> None:
    case = make_case().with_upstream(names)
    check(run(case), case.truth(), values=1e-12, gradients=1e-11)


def test_float64_gradients_are_derivatives() -> None:
    """Central differences of the forward itself; nothing of the reference is involved."""
    case = make_case(tokens=5, hidden=4, vocab=9).with_upstream()
    result = run(case)
    assert result.dx is not None
    assert result.dw is not None

    def loss() -> float:
        out = run(case, want_input_grad=False, want_weight_grad=False).out
        assert out.entropy is not None
        named = {"nll": out.nll, "entropy": out.entropy, "lse": out.lse}
        return float(sum((named[n] * g).sum() for n, g in case.upstream.items()))

    for tensor, gradient in ((case.x, result.dx), (case.weight, result.dw)):
        for index in ((0, 0), (2, 3), (4, 1)):
            saved = float(tensor[index])
            tensor[index] = saved + 1e-5
            above = loss()
            tensor[index] = saved - 1e-5
            below = loss()
            tensor[index] = saved
            assert (above - below) / 2e-5 == pytest.approx(float(gradient[index]), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_per_token_temperature(dtype: torch.dtype, small_tiles: None) -> None:
    case = make_case(dtype=dtype).with_upstream()
    case.temperature = torch.linspace(0.3, 3.0, len(case.target))
    values, gradients = PRECISION[dtype]
    check(run(case), case.truth(), values=4 * values, gradients=2 * gradients)


@pytest.mark.parametrize("vocab_size", [1, 300, 512, 611])
def test_padded_vocabulary_counts_for_nothing(vocab_size: int, small_tiles: None) -> None:
    case = make_case().with_upstream()
    case.vocab_size = vocab_size
    case.target %= vocab_size
    case.weight[vocab_size:] = float("nan")
    result = run(case)
    assert result.dw is not None
    assert torch.equal(result.dw[vocab_size:], torch.zeros_like(result.dw[vocab_size:]))
    case.weight[vocab_size:] = 0.0
    check(result, case.truth(), values=1e-12, gradients=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_ignored_rows_are_exactly_zero(dtype: torch.dtype, small_tiles: None) -> None:
    case = make_case(dtype=dtype).with_upstream()
    case.target[::3] = IGNORE
    truth = case.truth()
    ignored = case.target == IGNORE
    case.x[ignored] = float("nan")
    for upstream in case.upstream.values():
        upstream[ignored] = float("nan")
    result = run(case)
    assert result.dx is not None
    for tensor in (result.out.nll, result.out.lse, result.out.entropy, result.dx):
        assert tensor is not None
        assert torch.equal(tensor[ignored], torch.zeros_like(tensor[ignored]))
    values, gradients = PRECISION[dtype]
    check(result, truth, values=values, gradients=gradients)


def test_all_ignored_and_empty() -> None:
    case = make_case().with_upstream()
    case.target[:] = IGNORE
    result = run(case)
    assert result.dw is not None
    assert not result.dw.any()
    assert not result.out.nll.any()
    empty = make_case(tokens=0).with_upstream()
    result = run(empty)
    assert result.dx is not None
    assert result.dw is not None
    assert result.dx.shape == empty.x.shape
    assert not result.dw.any()
    assert result.out.rows.shape == (6, 0)


def test_rows_with_nan_or_inf_logits_are_nan_and_alone(small_tiles: None) -> None:
    case = make_case(dtype=torch.float32)
    clean = run(case).out
    case.x[3, 2] = float("nan")
    case.x[7] = case.weight[400] * 1e38  # +inf among others
    case.x[7, 0] = 3e38
    out = run(case).out
    assert out.entropy is not None
    assert clean.entropy is not None
    bad = torch.tensor([3, 7])
    fine = torch.ones(len(case.target), dtype=torch.bool)
    fine[bad] = False
    for got, want in ((out.nll, clean.nll), (out.lse, clean.lse), (out.entropy, clean.entropy)):
        assert got[bad].isnan().all()
        assert torch.equal(got[fine], want[fine])


def test_masked_logits_have_probability_zero(small_tiles: None) -> None:
    """Finite weights whose logits overflow to −inf; those of a target make nll = inf only."""
    case = make_case(dtype=torch.float32).with_upstream()
    case.x[:, 0] = 1e20
    case.weight[:, 0] = 0.0
    case.weight[100:500, 0] = -1e20
    case.target %= 100
    result = run(case)
    check(result, case.truth(), values=2e-5, gradients=1e-5)
    assert result.dw is not None
    assert not result.dw[100:500].any()
    # A masked target: its loss is infinite, and its gradient that of a row without a target.
    case.target[5] = 250
    result = run(case)
    assert result.out.nll[5] == float("inf")
    assert result.dx is not None
    assert result.dw is not None
    assert result.dx.isfinite().all()
    assert result.dw.isfinite().all()
    assert error(result.dw[250], -case.upstream["nll"][5] * case.x[5]) < 1e-6
    case.weight[:, 0] = -1e20
    out = run(case).out
    for values in (out.nll, out.lse, out.entropy):
        assert values is not None
        assert values.isnan().all()


def test_ignored_rows_are_zero_next_to_infinite_weights() -> None:
    case = make_case().with_upstream()
    case.target[2] = IGNORE
    case.weight[9, 3] = float("inf")
    dx = run(case).dx
    assert dx is not None
    assert not dx[2].any()
    assert dx[3].isnan().any()


@pytest.mark.parametrize("rest", [1e-1, 1e-4, 1e-6, 1e-13, 1e-26])
def test_confident_rows_keep_their_digits(rest: float) -> None:
    """1 − p near `rest`: nll, and the target's gradient −g·(1 − p), to float32's digits."""
    vocab, owner = 131072, 70001
    case = make_case(tokens=16, hidden=8, vocab=vocab, dtype=torch.float32, scale=0.5)
    case.x[:, 0] = 1.0
    case.weight[:, 0] = 0.0
    case.weight[owner, 0] = math.log(vocab / rest)
    case.target[:] = owner
    g = case.with_upstream("nll").upstream["nll"]
    x, weight = case.x.double(), case.weight.double()
    s = x @ (weight - weight[owner]).T
    s[:, owner] = -math.inf
    odds = s.exp().sum(1)  # Σ over v ≠ y of exp(s_v − s_y)
    nll, miss = odds.log1p(), odds / (1.0 + odds)
    result = run(case)
    assert result.dw is not None
    # What is left is the rounding of the float32 logits, which nobody can undo.
    assert error(result.out.nll, nll) < 2e-5
    assert error(result.dw[owner], -(g.double() * miss) @ x) < 2e-5


def test_common_offset_costs_nothing(small_tiles: None) -> None:
    """Logits at 30,000 with exact differences: the results carry no trace of the offset."""
    case = make_case(tokens=8, hidden=2, vocab=600, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    case.weight[:, 0] = 30000.0
    case.weight[:, 1] = torch.randint(-64, 64, (600,), generator=generator) / 16
    case.x[:] = 1.0
    case.temperature = 0.7
    case.with_upstream("nll entropy")
    truth, result = case.truth(), run(case)
    assert result.out.entropy is not None
    torch.testing.assert_close(result.out.nll.double(), truth.nll, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.out.entropy.double(), truth.entropy, rtol=1e-6, atol=1e-6)


def test_peaked_and_very_negative_logits(small_tiles: None) -> None:
    case = make_case(dtype=torch.float32, scale=40.0).with_upstream()
    check(run(case), case.truth(), values=5e-5, gradients=5e-5)
    case = make_case(dtype=torch.float32, scale=1.0).with_upstream()
    case.temperature = 0.004  # exponents down to −2000: float32's 2^x is 0 for most
    check(run(case), case.truth(), values=1e-3, gradients=2e-3)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = make_case(tokens=64, dtype=torch.float64)
    whole = run(case).out
    case.x, case.target = case.x[:8], case.target[:8]
    torch.testing.assert_close(run(case).out.nll, whole.nll[:8], rtol=1e-14, atol=1e-14)


def test_transposed_weight_and_int32_targets(small_tiles: None) -> None:
    case = make_case().with_upstream()
    truth = case.truth()
    case.weight = case.weight.t().contiguous().t()
    case.target = case.target.to(torch.int32)
    check(run(case), truth, values=1e-12, gradients=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_main_grad_is_added_to(dtype: torch.dtype, small_tiles: None) -> None:
    case = make_case(dtype=dtype).with_upstream("nll")
    before = torch.randn(case.weight.shape, dtype=torch.float64).float()
    main_grad = before.clone()
    result = run(case, main_grad=main_grad)
    assert result.dw is None
    # Accumulated without the rounding of bfloat16.
    assert error(main_grad.double() - before.double(), case.truth().dw) < 3e-6


def test_only_what_is_wanted() -> None:
    case = make_case().with_upstream()
    assert run(case, want_input_grad=False).dx is None
    assert run(case, want_weight_grad=False).dw is None
    check(run(case, want_input_grad=False), case.truth(), values=1e-12, gradients=1e-11)
    check(run(case, want_weight_grad=False), case.truth(), values=1e-12, gradients=1e-11)


def test_autocast_does_not_reach_inside() -> None:
    case = make_case(dtype=torch.float32).with_upstream()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = run(case)
    check(result, case.truth(), values=3e-6, gradients=2e-6)


def test_without_entropy_its_gradient_is_nan_not_wrong() -> None:
    case = make_case()
    call = (case.x, case.weight, case.target, 1.0, IGNORE, SingleRank())
    out = _chunked.forward(*call)
    assert out.entropy is None
    ones = torch.ones(len(case.target))
    dx, _ = _chunked.backward(None, ones, None, *call, out.rows)
    assert dx is not None
    assert dx.isnan().all()
    dx, _ = _chunked.backward(ones, None, ones, *call, out.rows)
    assert dx is not None
    assert dx.isfinite().all()


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements of any tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_tensor_comes_near_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunked, "_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(_chunked, "_TILE_BYTES", 1 << 18)
    case = make_case(tokens=1024, hidden=8, vocab=4096, dtype=torch.float32).with_upstream()
    sizes = cast("Any", _Sizes)()
    with sizes:
        run(case)
    assert sizes.largest == (1 << 18) // 4  # a tile of logits; all of them are 64 times that


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"target": 36}, ValueError, r"tokens: expected x.shape\[0\] == target.shape\[0\], got 37"),
        ({"hidden": 23}, ValueError, r"hidden: expected .* got 23 and 24"),
        (
            {"dtype": torch.float32},
            TypeError,
            r"dtype: expected .* torch.float32 and torch.float64",
        ),
        (
            {"at": (11, 611)},
            ValueError,
            r"target: expected ids in \[0, 611\) .* 611 at position 11",
        ),
        ({"at": (4, -1)}, ValueError, r"target: .*ignore_index -100, got -1 at position 4"),
        ({"temperature": 0.0}, ValueError, r"temperature: expected a positive number.*got 0.0"),
        ({"temperature": float("nan")}, ValueError, r"temperature: .* got nan"),
        ({"temperature": 1e-39}, ValueError, r"temperature: .* got 1e-39"),
        ({"vocab_size": 612}, ValueError, r"vocab_size: expected at most .* got 612 and 611"),
        ({"tau_at": 9}, ValueError, r"temperature: .* got -1.0 at position 9"),
    ],
)
def test_errors_are_one_sentence(change: dict[str, Any], kind: type, sentence: str) -> None:
    case = make_case()
    if "target" in change:
        case.target = case.target[: change["target"]]
    if "hidden" in change:
        case.x = case.x[:, : change["hidden"]]
    if "dtype" in change:
        case.x = case.x.to(change["dtype"])
    if "at" in change:
        case.target[change["at"][0]] = change["at"][1]
    if "tau_at" in change:
        case.temperature = torch.ones(len(case.target))
        case.temperature[change["tau_at"]] = -1.0
    case.temperature = change.get("temperature", case.temperature)
    case.vocab_size = change.get("vocab_size", -1)
    with pytest.raises(kind, match=sentence):
        run(case)
