# SPDX-License-Identifier: Apache-2.0
"""The command line: what it says, its exit status, and that `validate` sees a wrong result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import logitless
from logitless import _ops, cli, demo
from logitless._backends import CHUNKED, CPU, VARIABLE
from logitless.validate.cases import draw
from logitless.validate.job import Job
from logitless.validate.measure import measure
from logitless.validate.truth import expected


@pytest.fixture(autouse=True)
def _unforced(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def refused(capsys, *arguments):
    """Return the last line of a command that must end with status 2."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_version_and_help(capsys):
    for arguments, text in (
        (["--version"], f"logitless {logitless.__version__}"),
        (["--help"], "validate"),
        (["validate", "--help"], "--ranks"),
        (["demo", "--help"], str(demo.DEFAULT_VOCAB)),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 0
        assert text in capsys.readouterr().out
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("validate --ranks 0", "expected a whole number from 1 to 64, got '0'"),
        ("validate --cases some", "expected a whole number at least 1, got 'some'"),
        ("validate --dtype fp8", "'fp8'"),
        ("validate --backend cpu --dtype fp64", "takes bfloat16 and float32, not torch.float64"),
        ("validate --json no/such/file", "expected a file in an existing folder"),
        ("validate --case -1", "expected a whole number at least 0, got '-1'"),
        ("demo --steps 0", "expected a whole number at least 1, got '0'"),
        ("train", "'train'"),
    ],
)
def test_wrong_arguments_end_with_2_and_a_sentence(capsys, arguments, sentence):
    assert sentence in refused(capsys, *arguments.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_a_wrong_argument(capsys):
    assert "expected a GPU" in refused(capsys, "validate", "--device", "cuda")


def test_doctor_says_that_the_backend_works(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "The C++ backend works on this CPU." in text
    assert "there are no native kernels for cuda yet" in text
    assert max(map(len, text.splitlines())) <= 100


def test_doctor_as_json(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"]
    assert found["troubles"] == []
    assert found["library"]["loads"] and Path(found["library"]["path"]).is_file()
    picks = {(pick["device"], pick["dtype"]): pick["backend"] for pick in found["picks"]}
    assert picks == {
        ("cpu", "bfloat16"): CPU,
        ("cpu", "float32"): CPU,
        ("cpu", "float16"): CHUNKED,
        ("cpu", "float64"): CHUNKED,
        ("cuda", "bfloat16"): CHUNKED,
    }
    assert [test["passed"] for test in found["self_test"]] == [True, True]
    assert all(test["error"] > 0 for test in found["self_test"])


def test_doctor_reports_a_library_that_does_not_load(tmp_path):
    broken = tmp_path / "liblogitless_ffi.so"
    broken.write_text("no library")
    ended = subprocess.run(
        [sys.executable, "-m", "logitless.cli", "doctor"],
        env={**os.environ, "LOGITLESS_LIBRARY": str(broken)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "cannot be loaded" in ended.stdout
    assert "FAILED" in ended.stdout


def test_doctor_sees_a_wrong_gradient(monkeypatch, capsys):
    corrupt(monkeypatch, lambda dx, dw: (dx * 1.05, dw))
    assert cli.main(["doctor"]) == 1
    assert "expected a relative error of at most" in capsys.readouterr().out


def test_the_variable_forces_a_backend(monkeypatch, recwarn):
    monkeypatch.setenv(VARIABLE, CHUNKED)
    assert logitless.select_backend("cpu", torch.float32) == (CHUNKED, f"{VARIABLE} asks for it")
    logitless.linear_cross_entropy(torch.ones(1, 8), torch.ones(3, 8), torch.tensor([1]))
    assert logitless.last_backend() == CHUNKED
    assert not recwarn.list
    monkeypatch.setenv(VARIABLE, CPU)
    with pytest.raises(ValueError, match=r"LOGITLESS_BACKEND: .*not torch\.float64"):
        logitless.select_backend("cpu", torch.float64)
    monkeypatch.setenv(VARIABLE, "gpu")
    with pytest.raises(ValueError, match="expected auto, cpu or chunked-pytorch, got 'gpu'"):
        logitless.select_backend("cpu", torch.float32)


def test_validate_on_one_rank(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert cli.main(["validate", "--cases", "60", "--json", str(report)]) == 0
    assert "60 of 60 cases passed on 1 rank" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["passed"]
    for case in found["cases"]:
        assert case["backend"] == (CHUNKED if case["dtype"] == "fp64" else CPU)
        for pairs in case["ranks"][0]["errors"].values():
            assert all(error <= limit for error, limit in pairs)
    # Nobody compared nothing: each quantity was there, and was off by a rounding.
    for name in ("nll", "lse", "entropy", "dX", "dW"):
        assert sum(case["ratios"].get(name, 0) > 0 for case in found["cases"]) >= 10


def test_validate_chunked(capsys):
    assert cli.main(["validate", "--cases", "12", "--seed", "5", "--backend", CHUNKED]) == 0
    text = capsys.readouterr().out
    assert "backends: chunked-pytorch 12;" in text
    assert os.environ.get(VARIABLE) is None


def test_validate_on_two_ranks(tmp_path, capsys):
    report = tmp_path / "report.json"
    arguments = ["--ranks", "2", "--cases", "12", "--seed", "3", "--json", str(report)]
    assert cli.main(["validate", *arguments]) == 0
    assert "12 of 12 cases passed on 2 ranks" in capsys.readouterr().out
    for case in json.loads(report.read_text())["cases"]:
        first, second = (rank["digests"] for rank in case["ranks"])
        assert first and first == second


def corrupt(monkeypatch, change):
    """Let `change` falsify what backward returns: dX and dW, each [0] where not wanted."""
    right = _ops._gradients
    monkeypatch.setattr(_ops, "_gradients", lambda *call: change(*right(*call)))


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dX", lambda dx, dw: (dx * 1.02, dw)),
        ("dW", lambda dx, dw: (dx, -dw)),
        ("dX", lambda dx, dw: (dx * float("nan"), dw)),
    ],
)
def test_validate_sees_a_wrong_gradient(monkeypatch, capsys, dtype, name, change):
    corrupt(monkeypatch, change)
    arguments = ["validate", "--cases", "6", "--seed", "3", "--dtype", dtype]
    assert cli.main(arguments) == 1
    text = capsys.readouterr().out
    assert f"{name}: expected an error of at most" in text
    assert "of 6 cases passed" in text and "6 of 6" not in text
    assert f"repeat: logitless validate --seed 3 --dtype {dtype} --case " in text


def test_validate_sees_a_wrong_value(monkeypatch, capsys):
    right = logitless.linear_cross_entropy

    def wrong(*args, **options):
        out = right(*args, **options)
        return out * 1.001 if isinstance(out, torch.Tensor) else out._replace(loss=out.loss * 1.001)

    monkeypatch.setattr(logitless, "linear_cross_entropy", wrong)
    assert cli.main(["validate", "--cases", "6", "--seed", "3"]) == 1
    assert "nll: expected an error of at most" in capsys.readouterr().out


def test_validate_sees_another_backend(monkeypatch, capsys):
    monkeypatch.setattr(logitless, "last_backend", lambda: CHUNKED)
    arguments = ["validate", "--case", "2", "--backend", CPU, "--dtype", "bf16"]
    assert cli.main(arguments) == 1
    assert "backend: expected cpu, got chunked-pytorch" in capsys.readouterr().out


# Loaded by every Python that finds it: what a rank does that the test cannot reach otherwise.
_SABOTAGE = """
import sys
if "logitless.validate.worker" in " ".join(sys.orig_argv):
    import os
    from logitless import _ops
    from logitless.validate import measure
    right = _ops._gradients
    rank = []
    def wrong(*call):
        import torch.distributed as dist
        dx, dw = right(*call)
        if dist.get_rank() == 1:
            if {death}:
                os._exit(3)
            dx = dx.clone()
            if dx.numel():
                dx.view(-1)[0] += dx.abs().max() * 2.0**-20 + dx.new_tensor(1e-30)
        return dx, dw
    _ops._gradients = wrong
"""


@pytest.mark.parametrize("death", [False, True])
def test_validate_sees_what_one_rank_does(monkeypatch, capsys, tmp_path, death):
    (tmp_path / "sitecustomize.py").write_text(_SABOTAGE.format(death=death))
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{inherited}")
    # A case whose dX every rank has whole.
    index = next(
        k
        for k in range(20)
        if (case := draw(3, k, torch.float32, 2)).want_input_grad
        and case.token_ends is None
        and expected(case, torch.float64).dx.any()
    )
    arguments = ["--ranks", "2", "--case", str(index), "--seed", "3", "--dtype", "fp32"]
    assert cli.main(["validate", *arguments]) == 1
    text = capsys.readouterr().out
    if death:
        assert "rank 1: process: expected exit status 0, got 3" in text
    else:
        assert "dX: expected the same bits on every rank" in text
        assert "error of at most" not in text


def test_a_case_is_a_function_of_seed_and_index():
    one, other = (draw(7, 3, torch.bfloat16, ranks) for ranks in (1, 4))
    for name in ("x", "weight", "target"):
        bits = (getattr(case, name).contiguous().view(torch.uint8) for case in (one, other))
        assert torch.equal(*bits)
    assert one.options() == other.options()
    assert other.vocab_ends[0] == 0 and other.vocab_ends[-1] == len(other.weight)
    assert not torch.equal(one.x.flatten()[:8], draw(8, 3, torch.bfloat16, 1).x.flatten()[:8])


def test_cases_cover_the_options():
    cases = [draw(0, k, torch.float32, 2) for k in range(120)]
    assert {case.kind for case in cases} >= {"flat", "peaked", "confident", "offset", "negative"}
    assert {case.reduction for case in cases} == {"none", "sum", "mean"}
    assert {str(case.memory) for case in cases} >= {"auto", "stash", "recompute"}
    for property_ in (
        lambda case: isinstance(case.memory, int),
        lambda case: isinstance(case.temperature, torch.Tensor),
        lambda case: case.vocab_size < len(case.weight),
        lambda case: case.main_grad is not None,
        lambda case: case.token_ends is not None,
        lambda case: case.rows_are_nan,
        lambda case: not case.live.any(),
        lambda case: not case.want_input_grad,
        lambda case: not case.want_weight_grad,
        lambda case: "entropy" in case.upstream and "lse" in case.upstream,
    ):
        assert 3 <= sum(map(property_, cases)) < len(cases)
    assert all((g < 0).any() for c in cases for g in c.upstream.values() if g.numel() > 30)


def test_the_truth_of_a_confident_row_is_exact():
    # Two ids, logits 40 and 0: nll = log(1 + e^-40) and dz = e^-40 · (−1, 1), lost in 1 − p.
    case = draw(0, 0, torch.float64, 1)
    case.x, case.weight = torch.ones(1, 1).double(), torch.tensor([[40.0], [0.0]]).double()
    case.target, case.temperature, case.vocab_size = torch.tensor([0]), 1.0, 2
    case.reduction, case.upstream = "none", {"loss": torch.ones(1)}
    truth, rest = expected(case, torch.float64), torch.tensor(-40.0).double().exp()
    torch.testing.assert_close(truth.loss[0], rest, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(truth.dw[:, 0], torch.stack((-rest, rest)), rtol=1e-12, atol=0.0)


def test_an_exception_fails_the_case_and_not_the_run(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no luck")

    monkeypatch.setattr(logitless, "linear_cross_entropy", broken)
    found = measure(Job(0, (0,), 1, ("fp32",), "cpu", {"fp32": CPU}, 1), 0, None)
    assert found.raised
    assert found.failures == ["RuntimeError: no luck"]


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(demo, "run", lambda **options: calls.append(options) or 1)
    words = "demo --steps 3 --vocab 600 --tokens 64 --hidden 8 --seed 9 --out".split()
    assert cli.main([*words, str(tmp_path)]) == 1
    assert cli.main(["demo"]) == 1
    assert calls[0] == {
        "steps": 3,
        "vocab": 600,
        "tokens": 64,
        "hidden": 8,
        "seed": 9,
        "out": tmp_path,
    }
    assert calls[1] == {
        "steps": demo.DEFAULT_STEPS,
        "vocab": demo.DEFAULT_VOCAB,
        "tokens": demo.DEFAULT_TOKENS,
        "hidden": demo.DEFAULT_HIDDEN,
        "seed": demo.DEFAULT_SEED,
        "out": demo.DEFAULT_OUT,
    }
