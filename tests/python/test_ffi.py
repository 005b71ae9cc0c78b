# SPDX-License-Identifier: Apache-2.0
"""The functions of the native library as another framework would call them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from truth import (
    BF16,
    FP32,
    TILE,
    Problem,
    check_gradients,
    check_values,
    error,
    make_problem,
    run,
    truth,
)

from logitless import _library


def call(p: Problem) -> tuple[Any, ...]:
    """Return the arguments that all four functions share."""
    tau = p.temperature
    per_token = tau if isinstance(tau, torch.Tensor) else None
    number = 1.0 if per_token is not None else float(tau)
    size = -1 if p.vocab_size is None else p.vocab_size
    return (p.x, p.weight, p.target, per_token, number, p.ignore_index, -1, size, False, False)


def poison(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("columns", [0, TILE, 2 * TILE, 1700])
@pytest.mark.parametrize("upstream", ["g", "g h q", "h"])
def test_into_poisoned_memory(columns: int, upstream: str, dtype: torch.dtype) -> None:
    p = make_problem(45, 40, 1700, dtype=dtype, upstream=upstream, ignored=0.25, spread=3.0)
    p = replace(p, temperature=torch.linspace(0.5, 2.0, 45))
    nll, lse, entropy, rows = poison(45), poison(45), poison(45), poison(6, 45)
    stash = poison(columns, 48, dtype=dtype) if columns else None
    _library.forward_into(*call(p), nll, lse, entropy, rows, stash, 0)
    assert _library.last_backend() == "cpu"
    if stash is not None:
        assert bool(stash.isfinite().all()), "a part of the stash was not written"
    kept = [t.clone() for t in (rows, stash) if t is not None]
    dx, dw = poison(45, 40, dtype=dtype), poison(1700, 40, dtype=dtype)
    for _ in range(2):
        grads = (p.g, p.h, p.q)
        _library.backward_into(*grads, *call(p), rows, stash, dx, dw, False, 0)
    assert all(
        torch.equal(a, b) for a, b in zip((rows, stash), kept, strict=False) if a is not None
    )
    wanted = truth(p)
    result = run(p)._replace(nll=nll, lse=lse, entropy=entropy, dx=dx, dw=dw)
    check_values(result, wanted, 40)
    check_gradients(result, wanted, p)


def test_new_tensors_equal_the_callers(dtype: torch.dtype) -> None:
    p = make_problem(45, 40, 1700, dtype=dtype, upstream="g h q")
    plain = run(p, memory="stash")
    out = _library.forward(*call(p), True, True, -2, 0)
    assert _library.last_backend() == "cpu"
    assert out.stash is not None and tuple(out.stash.shape) == (1700, 48)
    assert out.rows is not None and tuple(out.rows.shape) == (6, 45)
    back = _library.backward(p.g, p.h, p.q, *call(p), out.rows, out.stash, True, True, 0)
    tensors = (out.nll, out.lse, out.entropy, back.dx, back.dw)
    wanted = (plain.nll, plain.lse, plain.entropy, plain.dx, plain.dw)
    for got, want in zip(tensors, wanted, strict=True):
        assert torch.equal(torch.from_dlpack(got), want)
    bare = _library.forward(*call(p), False, False, -2, 0)
    assert bare.entropy is None and bare.rows is None and bare.stash is None
    some = _library.backward(p.g, None, None, *call(p), out.rows, out.stash, False, True, 0)
    assert some.dx is None and some.dw is not None


def test_c04_strided_upstream_and_outputs(dtype: torch.dtype) -> None:
    p = make_problem(45, 40, 700, dtype=dtype, upstream="g h q")
    plain = run(p, memory="recompute")
    wide = poison(45, 9)
    nll, lse, entropy, rows = wide[:, 1], wide[:, 4], wide[:, 7], poison(6, 45)
    _library.forward_into(*call(p), nll, lse, entropy, rows, None, 0)
    assert _library.last_backend() == "cpu"
    assert torch.equal(nll, plain.nll)
    assert torch.equal(lse, plain.lse)
    assert torch.equal(entropy, plain.entropy)
    assert bool(wide[:, [0, 2, 3, 5, 6, 8]].isnan().all())
    grads = poison(45, 7)
    for column, values in enumerate((p.g, p.h, p.q)):
        grads[:, 2 * column] = values
    dx_room, dw_room = poison(45, 50, dtype=dtype), poison(700, 44, dtype=dtype)
    dx, dw = dx_room[:, 3:43], dw_room[:, 1:41]
    given = (grads[:, 0], grads[:, 2], grads[:, 4])
    _library.backward_into(*given, *call(p), rows, None, dx, dw, False, 0)
    assert torch.equal(dx, plain.dx)
    assert torch.equal(dw, plain.dw)
    assert bool(dx_room[:, :3].isnan().all() and dx_room[:, 43:].isnan().all())
    assert bool(dw_room[:, :1].isnan().all() and dw_room[:, 41:].isnan().all())


def test_broadcast_upstream(dtype: torch.dtype) -> None:
    p = make_problem(45, 40, 700, dtype=dtype)
    out = _library.forward(*call(p), False, True, -2, 0)
    one = torch.tensor([0.25]).expand(45)
    wide = _library.backward(one, None, None, *call(p), out.rows, out.stash, True, True, 0)
    full = torch.full((45,), 0.25)
    dense = _library.backward(full, None, None, *call(p), out.rows, out.stash, True, True, 0)
    assert _library.last_backend() == "cpu"
    assert torch.equal(torch.from_dlpack(wide.dx), torch.from_dlpack(dense.dx))
    assert torch.equal(torch.from_dlpack(wide.dw), torch.from_dlpack(dense.dw))


@pytest.mark.parametrize("kind", [BF16, FP32], ids=["into bf16", "into fp32"])
def test_accumulate_and_write_the_weights_gradient(kind: torch.dtype) -> None:
    p = make_problem(45, 40, 1100, dtype=BF16)
    wanted = truth(p).dw
    rows, nll, lse, stash = poison(6, 45), poison(45), poison(45), poison(1100, 48, dtype=BF16)
    _library.forward_into(*call(p), nll, lse, None, rows, stash, 0)
    begun = torch.randn(1100, 40, generator=torch.Generator().manual_seed(2)).to(kind)
    for saved in (stash, None):
        dw = begun.clone()
        _library.backward_into(p.g, None, None, *call(p), rows, saved, None, dw, True, 0)
        assert error(dw, begun.double() + wanted) <= 4e-3
        dw = poison(1100, 40, dtype=kind)
        _library.backward_into(p.g, None, None, *call(p), rows, saved, None, dw, False, 0)
        assert error(dw, wanted) <= 3e-3


def test_numpy_without_torch() -> None:
    """Arrays of any framework that speaks DLPack."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    p = make_problem(20, 16, 300, dtype=FP32)
    arrays = {name: getattr(p, name).numpy() for name in ("x", "weight", "target")}
    nll, lse = np.full(20, np.nan, np.float32), np.full(20, np.nan, np.float32)
    x, weight, target, out, norm = (tvm_ffi.from_dlpack(a) for a in (*arrays.values(), nll, lse))
    options = (None, 1.0, -100, -1, -1, False, False)
    _library.forward_into(x, weight, target, *options, out, norm, None, None, None, 0)
    assert _library.last_backend() == "cpu"
    assert np.array_equal(nll, run(p).nll.numpy())
    assert np.isfinite(lse).all()


def expect(kind: type[Exception], text: str, function: Any, *arguments: Any) -> None:
    with pytest.raises(kind, match=text):
        function(*arguments)


def test_errors_of_the_boundary() -> None:
    p = make_problem(20, 16, 300, dtype=FP32)
    good = call(p)
    out = (poison(20), poison(20), None, None, None, 0)

    def forward(**changes: Any) -> None:
        names = ("x", "weight", "target", "per_token", "tau", "ignore", "start", "size")
        arguments = [changes.get(n, v) for n, v in zip(names, good, strict=False)]
        outputs = [changes.get(n, v) for n, v in zip(("nll", "lse"), out, strict=False)]
        _library.forward_into(*arguments, False, False, *outputs, *out[2:])

    forward()
    for kind, text, changes in (
        (ValueError, "^tokens: .*20 and 19", {"target": p.target[:19]}),
        (ValueError, "^hidden: .*15 and 16", {"weight": p.weight[:, :15].contiguous()}),
        (ValueError, "^x: expected 2 dimensions", {"x": p.x[0]}),
        (TypeError, "^x: expected .*float32.*, got float16", {"x": p.x.half()}),
        (TypeError, "^weight: expected float32, got bfloat16", {"weight": p.weight.bfloat16()}),
        (TypeError, "^target: expected .*int64.*, got int16", {"target": p.target.short()}),
        (ValueError, r"^nll: expected shape \[20\], got \[21\]", {"nll": poison(21)}),
        (TypeError, "^nll: expected float32", {"nll": poison(20, dtype=BF16)}),
        (ValueError, "^weight: .*strides", {"weight": p.weight.repeat(2, 2)[::2, ::2]}),
        (ValueError, "^weight: .*not gathered", {"weight": p.weight[:0]}),
        (ValueError, "^temperature: ", {"tau": -1.0}),
        (
            ValueError,
            "^temperature: .*position 3",
            {"per_token": torch.tensor([1.0] * 3 + [0.0] * 17)},
        ),
        (
            TypeError,
            "^temperature.*: expected float32.*, got float64",
            {"per_token": torch.ones(20).double()},
        ),
        (ValueError, "^vocab_size: ", {"size": 0}),
    ):
        expect(kind, text, lambda changes=changes: forward(**changes))
    expect(RuntimeError, "^context: ", _library.forward_into, *good, *out[:-1], 987654)
    rows = poison(6, 20)
    _library.forward_into(*good, *out[:3], rows, None, 0)
    back = (p.g, p.h, None)
    expect(
        RuntimeError,
        "^gradient of entropy: expected a forward that returned the entropy",
        _library.backward_into,
        None,
        p.g,
        None,
        *good,
        rows,
        None,
        poison(20, 16),
        None,
        False,
        0,
    )
    expect(
        ValueError,
        r"^gradient of x: expected shape \[20, 16\]",
        _library.backward_into,
        p.g,
        *back[2:],
        None,
        *good,
        rows,
        None,
        poison(20, 15),
        None,
        False,
        0,
    )
    expect(
        ValueError,
        "^stash: .*multiple of 512",
        _library.backward_into,
        p.g,
        None,
        None,
        *good,
        rows,
        poison(100, 32),
        poison(20, 16),
        None,
        False,
        0,
    )
    forward()


def test_contexts_are_independent() -> None:
    p = make_problem(60, 32, 900, upstream="g h q")
    plain = run(p)
    contexts = [_library.context_create(0, 1, None, None, None, threads) for threads in (1, 2)]
    try:
        for context in contexts:
            out = _library.forward(*call(p), True, True, -1, context)
            assert torch.equal(torch.from_dlpack(out.nll), plain.nll)
            back = _library.backward(
                p.g, p.h, p.q, *call(p), out.rows, out.stash, True, True, context
            )
            assert torch.equal(torch.from_dlpack(back.dw), plain.dw)
    finally:
        for context in contexts:
            _library.context_destroy(context)
    expect(RuntimeError, "^context: ", _library.workspace_query, contexts[0], 1, 1, 1, "float32")
    expect(ValueError, "^rank: .*3 of 2", _library.context_create, 3, 2, None, None, None, 1)
    expect(ValueError, "^group: ", _library.context_create, 0, 2, None, None, None, 1)


def test_build_info() -> None:
    info = _library.build_info()
    assert info["products"].startswith("oneDNN")
    assert isinstance(info["native_bf16"], bool | int)
    assert info["threads"] >= 1
    assert info["version"]
