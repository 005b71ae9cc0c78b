# SPDX-License-Identifier: Apache-2.0
"""The demo at a small size, end to end, and that each of its checks fails on bad figures."""

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

from logitless import demo
from logitless.demo import memory, show
from logitless.demo.checks import (
    HeadResult,
    RankResult,
    check_backend,
    check_curves,
    check_memory,
    check_ranks,
    failures,
)
from logitless.demo.job import Job
from logitless.demo.processes import events
from logitless.demo.text import Batches, encode, train_tokenizer
from logitless.demo.train import train

MIB = 2**20


def good_pair():
    losses = [9.0, 8.0, 7.0, 6.0]
    seconds = [0.1] * 4
    ordinary = HeadResult([RankResult(growth=200 * MIB, method="VmHWM")], losses, seconds)
    rank = RankResult(["cpu"], "a" * 64, "b" * 64, 45 * MIB, "VmHWM")
    logitless = HeadResult([rank, replace(rank)], [loss + 0.01 for loss in losses], seconds)
    return ordinary, logitless


def test_small_run_passes(tmp_path, capfd):
    assert demo.run(steps=4, vocab=2048, tokens=2048, hidden=16, seed=1, out=tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    assert [rank["backends"] for rank in report["logitless"]["ranks"]] == [["cpu"], ["cpu"]]
    for head in ("ordinary", "logitless"):
        losses = report[head]["losses"]
        assert len(losses) == 4
        assert losses[0] == pytest.approx(math.log(2048), abs=0.2)
    # Softmax and its two gradients, M x V floats each, are what ordinary logits cannot do without.
    assert report["ordinary"]["memory"] > 2 * 2048 * 2048 * 4
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    output = capfd.readouterr().out
    assert "equal bits on all ranks" in output
    assert "FAILED" not in output


def test_run_with_bad_figures_fails_and_says_why(tmp_path, capfd, monkeypatch):
    good_ordinary, good_logitless = good_pair()

    def train_both(console, job, ordinary, logitless):
        ordinary.losses, ordinary.seconds = good_ordinary.losses, good_ordinary.seconds
        logitless.losses, logitless.seconds = good_logitless.losses, good_logitless.seconds
        logitless.ranks = [replace(rank, growth=0) for rank in good_logitless.ranks]

    def measure(head, job, result):
        for rank in range(len(result.ranks)):
            result.record(rank, {"growth": 60 * MIB, "method": "VmHWM"})

    monkeypatch.setattr(show, "prepare_text", lambda console, job: job)
    monkeypatch.setattr(show, "train_both", train_both)
    monkeypatch.setattr(show, "measure", measure)
    assert demo.run(steps=4, out=tmp_path) == 1
    assert "FAILED memory: expected" in capfd.readouterr().out
    assert len(json.loads((tmp_path / "report.json").read_text())["failures"]) == 1


def test_the_model_learns(tmp_path):
    texts = ["def f(x):\n    return x + 1\n" * 40]
    tokenizer = train_tokenizer(texts, 270)
    torch.save(encode(tokenizer, texts), tmp_path / "tokens.pt")
    job = Job(steps=40, vocab=270, tokens=64, hidden=32, seed=0, folder=str(tmp_path))
    seen = []
    train(job, None, seen.append)
    losses = [event["loss"] for event in seen[:-1]]
    assert losses[0] == pytest.approx(math.log(270), abs=0.2)
    assert losses[-1] < losses[0] - 1


def test_uneven_shards_cover_the_vocabulary():
    job = Job(steps=1, vocab=517, tokens=128, hidden=8, seed=0, folder="unused")
    shards = [member.shard for member in job.members("logitless", "train")]
    assert shards == [slice(0, 258), slice(258, 517)]


def test_good_figures_have_no_failure():
    assert failures(*good_pair()) == []


def test_another_backend_fails():
    assert check_backend([["cpu"], ["chunked-pytorch"]]) == [
        "backend: expected cpu on every rank, got chunked-pytorch on rank 1"
    ]
    assert check_backend([["chunked-pytorch", "cpu"], ["cpu"]]) == [
        "backend: expected cpu on every rank, got chunked-pytorch and cpu on rank 0"
    ]
    assert check_backend([[], ["cpu"]]) == [
        "backend: expected cpu on every rank, got none on rank 0"
    ]


def test_curves_apart_in_the_last_half_fail():
    ordinary = [9.0, 8.0, 7.0, 6.0]
    assert check_curves(ordinary, [9.5, 8.0, 7.0, 6.019]) == []
    assert check_curves(ordinary, [9.0, 8.0, 7.021, 6.0]) == [
        "curves: expected a difference of at most 0.02 nats in steps 2 to 3, got 0.0210 at step 2"
    ]
    assert len(check_curves(ordinary, [9.0, 8.0, 7.0, math.nan])) == 1
    assert len(check_curves(ordinary, ordinary[:3])) == 1
    assert len(check_curves([9.0], [9.1])) == 1


def test_memory_above_half_fails():
    assert check_memory(200 * MIB, 100 * MIB) == []
    assert check_memory(200 * MIB, 101 * MIB) == [
        "memory: expected more than 0 and at most 100.0 MiB, half of the ordinary head's, "
        "got 101.0 MiB over all ranks"
    ]
    assert len(check_memory(200 * MIB, 0)) == 1, "a measurement that saw nothing proves nothing"


def test_different_bits_fail():
    assert check_ranks("trunk parameters", ["a" * 64, "b" * 64]) == [
        f"trunk parameters: expected rank 0's bits {'a' * 16} on every rank, "
        f"got {'b' * 16} on rank 1"
    ]


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("backends", ["chunked-pytorch"], "backend"),
        ("growth", 60 * MIB, "memory"),
        ("input_grads", "c" * 64, "dX"),
        ("trunk", "c" * 64, "trunk"),
    ],
)
def test_one_bad_rank_fails_the_run(field, value, word):
    ordinary, logitless = good_pair()
    logitless.record(1, {field: value})
    (sentence,) = failures(ordinary, logitless)
    assert sentence.startswith(word)


def test_growth_is_what_the_call_touched():
    def touch(mebibytes):
        torch.ones(mebibytes * MIB // 4).sum()

    small, _ = memory.resident_growth(lambda: touch(32))
    large, _ = memory.resident_growth(lambda: touch(96))
    assert small == pytest.approx(32 * MIB, abs=4 * MIB)
    assert large == pytest.approx(96 * MIB, abs=4 * MIB)


def test_growth_without_a_peak_that_can_be_reset(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    growth, method = memory.resident_growth(lambda: torch.ones(128 * MIB // 4).sum())
    assert method == "ru_maxrss"
    assert growth >= 124 * MIB, "an upper bound of what the call touched"


def test_tokenizer_and_batches_repeat(tmp_path):
    texts = ["def f(x):\n    return x + 1\n" * 40, "class A:\n    pass\n" * 40]
    first, second = (train_tokenizer(texts, 280) for _ in range(2))
    assert first.to_str() == second.to_str()
    ids = encode(first, texts)
    assert first.decode(ids.tolist()) == "".join(texts)
    torch.save(ids, tmp_path / "tokens.pt")
    job = Job(steps=2, vocab=280, tokens=16, hidden=8, seed=5, folder=str(tmp_path))
    inputs, target = Batches(job)[1]
    assert inputs.shape == (1, 16)
    assert torch.equal(inputs[0, 1:], target[:-1])
    assert torch.equal(target, Batches(job)[1][1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tokens": 200}, "tokens: expected a multiple of the sequence length 128, got 200"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"hidden": 12}, "hidden: expected a multiple of 8, got 12"),
        ({"vocab": 255}, "vocab: expected at least 256, one id for each byte, got 255"),
    ],
)
def test_bad_options_are_one_sentence(tmp_path, capfd, options, sentence):
    good = {"steps": 1, "vocab": 512, "tokens": 128, "hidden": 8, "seed": 0}
    assert demo.run(**{**good, **options}, out=tmp_path) == 1
    assert capfd.readouterr().err == sentence + "\n"


def test_missing_package_is_one_sentence(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(demo, "_NEEDED", ("rich", "no_such_package"))
    assert demo.run(out=tmp_path / "out") == 1
    assert "got no no_such_package" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_failing_process_ends_the_others(tmp_path):
    job = Job(steps=1, vocab=300, tokens=16, hidden=8, seed=0, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"train, logitless head, rank [01] of 2.*tokens\.pt"):
        list(events(job.members("logitless", "train")))
