# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from logitless import cli, evidence

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROW: dict[str, Any] = {
    "kind": "speed",
    "what": "forward+backward",
    "provider": "logitless",
    "variant": "stash",
    "dtype": "bf16",
    "m": 4,
    "h": 8,
    "v": 16,
    "ranks": 1,
    "mode": "alternating",
    "ms": 2.0,
}


def record(root: Path, rows: list[dict[str, Any]], commit: str = COMMIT) -> Path:
    return evidence.record("benchmark", commit, "bench", rows, [], [], root)


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    done = subprocess.run(
        ("git", *identity, *arguments), cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "source").write_text("1")
    git(tmp_path, "add", "source")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_recorded_file_passes_and_a_second_run_keeps_the_first(tmp_path: Path) -> None:
    first, second = record(tmp_path, [ROW]), record(tmp_path, [{**ROW, "ms": 1.0}])
    assert first != second
    assert first.name.startswith("benchmark-")
    assert first.name.endswith("-01234567.json")
    assert evidence.check(first.parent) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"topic": "gossip"}, "topic: expected one of"),
        ({"commit": "1234"}, "commit: expected 40 hexadecimal digits, got '1234'"),
        ({"dirty": True}, "dirty: expected false"),
        ({"date": "yesterday"}, "date: expected UTC"),
        ({"device": {}}, "device: expected a name"),
        ({"rows": [{**ROW, "kind": "rumour"}]}, "rows[0]: expected kind"),
        ({"rows": [{"kind": "memory", "what": "x"}]}, "rows[0]: expected provider, variant"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = record(tmp_path, [ROW])
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    problems = evidence.check(path.parent)
    assert any(sentence in problem for problem in problems)
    assert cli.main(["evidence", "check", "--root", str(tmp_path)]) == 1


def test_the_newest_row_of_a_key_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = record(tmp_path, [ROW, {**ROW, "v": 32, "ms": 7.0}])
    content = json.loads(old.read_text())
    old.write_text(json.dumps({**content, "date": "2020-01-01T00:00:00Z"}))
    record(tmp_path, [{**ROW, "ms": 1.5}], COMMIT[::-1])
    times = sorted(row["ms"] for _, row in evidence.newest_rows(old.parent))
    assert times == [1.5, 7.0]
    assert cli.main(["evidence", "check", "--root", str(tmp_path)]) == 0
    assert "1.5 ms" in capsys.readouterr().out.replace("\n", " ")


def test_changed_sources_are_refused(repository: Path) -> None:
    assert evidence.clean_commit(repository) == git(repository, "rev-parse", "HEAD")
    (repository / "source").write_text("2")
    with pytest.raises(ValueError, match="expected a clean tree"):
        evidence.clean_commit(repository)


def test_a_copy_without_git_needs_a_stamp(repository: Path, tmp_path_factory: Any) -> None:
    stamp = evidence.stamp(repository)
    copy = tmp_path_factory.mktemp("copy")
    (copy / stamp.name).write_text(stamp.read_text())
    assert evidence.clean_commit(copy) == git(repository, "rev-parse", "HEAD")


def test_repository_evidence_is_valid() -> None:
    folder = Path(__file__).parents[2] / "docs" / "evidence"
    assert list(folder.glob("*.json")), f"expected evidence files in {folder}, got none"
    assert evidence.check(folder) == []
