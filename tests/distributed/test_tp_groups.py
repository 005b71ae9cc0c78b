# SPDX-License-Identifier: Apache-2.0
"""Several groups of one process, and the workspace of a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from head_cases import Case, Step, call, check, leaves, make_case, run_step, same_bits
from ranks import Ranks

import logitless
from logitless import _groups, workspace

# --- groups ---------------------------------------------------------------------------------------


def rank_and_steps(
    group: dist.ProcessGroup, cases: dict[tuple[int, ...], Case]
) -> tuple[int, list[Step]]:
    workers = set(dist.get_process_group_ranks(group))
    case = next(case for members, case in cases.items() if set(members) == workers)
    return dist.get_rank(group), [run_step(group, case) for _ in range(3)]


@pytest.mark.parametrize(
    "groups", [[[0, 2], [1, 3]], [[0, 1], [2, 3, 4]], [[4, 1], [0, 2, 3]], [[2], [0, 3, 4, 1]]]
)
def test_groups_side_by_side(ranks: Ranks, groups: list[list[int]]) -> None:
    """Strided, of different sizes: what counts is the rank in the group, not in the world."""
    cases = {
        tuple(group): make_case(30 + 11 * i, 24, [50 + 7 * r for r in range(len(group))], seed=i)
        for i, group in enumerate(groups)
    }
    outcomes = ranks.attempt_groups(groups, rank_and_steps, cases)
    for group in groups:
        case = cases[tuple(group)]
        usual = ranks.run(len(group), run_step, case)
        check(case, usual)
        for worker in group:
            assert not outcomes[worker].kind, outcomes[worker].trace
            rank, steps = outcomes[worker].value
            assert all(same_bits(step, usual[rank]) for step in steps)
        assert sorted(outcomes[worker].value[0] for worker in group) == list(range(len(group)))


def on_all_my_groups(*arguments: Any) -> dict[tuple[int, ...], list[Step]]:
    """Take turns between this worker's groups, the same turns on every worker."""
    *groups, cases = arguments
    found: dict[tuple[int, ...], list[Step]] = {}
    for _ in range(2):
        for group in groups:
            members = tuple(dist.get_process_group_ranks(group))
            found.setdefault(members, []).append(run_step(group, cases[members]))
    return found


def test_member_of_several_groups(ranks: Ranks) -> None:
    """A process in a group of one, one of two and one of three, used in turns."""
    groups = [[0], [0, 1], [0, 1, 2]]
    cases = {
        tuple(group): make_case(20, 16 + 8 * i, [50 + 7 * r for r in range(len(group))], seed=i)
        for i, group in enumerate(groups)
    }
    outcomes = ranks.attempt_groups(groups, on_all_my_groups, cases)[:3]
    for outcome in outcomes:
        assert not outcome.kind, outcome.trace
    for group in groups:
        steps = [outcomes[worker].value[tuple(group)] for worker in group]
        for turn in zip(*steps, strict=True):
            check(cases[tuple(group)], turn)


def group_of_one(group: dist.ProcessGroup, case: Case) -> bool:
    x, weight = leaves(case, 0)
    inside = call(case, group, x, weight)
    alone = call(case, None, x, weight)
    return all(torch.equal(a, b) for a, b in zip(inside, alone, strict=True))


def test_group_of_one_is_no_group(ranks: Ranks) -> None:
    assert ranks.run(1, group_of_one, make_case(20, 24, [50])) == [True]


def not_a_group(group: dist.ProcessGroup, given: object) -> None:
    logitless.linear_cross_entropy(
        torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), group=given
    )


def test_not_a_group(ranks: Ranks) -> None:
    outside = ranks.attempt(1, not_a_group, -100)[0]  # new_group's answer to those not in it
    assert outside.kind == "ValueError"
    assert "expected a group that this process is a member of, got none" in outside.message
    text = ranks.attempt(1, not_a_group, "tp")[0]
    assert text.kind == "TypeError"
    assert "expected a torch.distributed.ProcessGroup or None, got str" in text.message


def released_between(group: dist.ProcessGroup, case: Case) -> list[Step]:
    """Forget the group's contexts between calls, on one rank more often than on the other."""
    steps = [run_step(group, case)]
    _groups.release(group)
    steps.append(run_step(group, case))
    if dist.get_rank(group) == 1:
        _groups.release(group)
        _groups.release(group)
    steps.append(run_step(group, case))
    return steps


def test_release_is_local(ranks: Ranks) -> None:
    case = make_case(20, 24, [50, 60])
    for first, *others in ranks.run(2, released_between, case):
        assert all(same_bits(first, other) for other in others)


def used_after_destruction(group: dist.ProcessGroup, case: Case) -> str:
    x, weight = leaves(case, dist.get_rank(group))
    out = call(case, group, x, weight)
    dist.destroy_process_group(group)
    try:
        out.loss.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_group_destroyed_before_backward(ranks: Ranks) -> None:
    """An error, at once, on every rank; nothing waits and nothing crashes."""
    case = make_case(20, 24, [50, 60], upstream="nll")
    for outcome in ranks.attempt(2, used_after_destruction, case):
        assert not outcome.kind and outcome.seconds < 10, outcome
        assert outcome.value.startswith("RuntimeError: ") and "group" in outcome.value


# --- the workspace --------------------------------------------------------------------------------


def configured(group: dist.ProcessGroup, cases: list[Case]) -> dict[str, Any]:
    """Configure for 8192 tokens; then query, configure and call with other numbers."""
    rows = [last - first for first, last in cases[0].shards][dist.get_rank(group)]
    hidden, dtype = cases[0].x.shape[1], cases[0].x.dtype
    options = {"group": group, "dtype": dtype}
    errors: dict[str, str] = {}

    def attempt(name: str, body: Any) -> None:
        try:
            body()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    wanted = workspace.query(8192, hidden, rows, **options)
    workspace.configure(8192, hidden, rows, **options)
    workspace.configure(8192, hidden, rows, **options)
    same = workspace.query(8192, hidden, rows, **options)
    attempt("smaller query", lambda: workspace.query(4096, hidden, rows, **options))
    attempt("larger query", lambda: workspace.query(8193, hidden, rows, **options))
    attempt("configure", lambda: workspace.configure(4096, hidden, rows, **options))
    steps = []
    for i, case in enumerate(cases):
        attempt(f"call {i}", lambda case=case: steps.append(run_step(group, case)))
    workspace.release(group=group)
    attempt("after", lambda: steps.append(run_step(group, cases[2])))
    return {"errors": errors, "steps": steps, "bytes": (wanted, same)}


def test_configured_workspace(ranks: Ranks) -> None:
    """Calls up to the configured size work, a larger one is an error on every rank."""
    sizes = [8192, 100, 8193, 5000, 8192]
    cases = [make_case(m, 8, [40, 30], seed=m, upstream="nll lse") for m in sizes]
    usual = [ranks.run(2, run_step, case) for case in cases]
    for rank, found in enumerate(ranks.run(2, configured, cases)):
        errors, steps = found["errors"], found["steps"]
        assert found["bytes"][0] == found["bytes"][1] > 0
        assert set(errors) == {"smaller query", "larger query", "configure", "call 2"}
        for name, text in errors.items():
            assert "RuntimeError: " in text or "rank" in text, text
            assert "workspace: configured for" in text, text
            other = "4096" if name in ("smaller query", "configure") else "8193"
            assert "8192" in text and other in text, text
        expected = [usual[i][rank] for i in (0, 1, 3, 4, 2)]
        assert all(same_bits(a, b) for a, b in zip(steps, expected, strict=True))
    for case, steps in zip(cases, usual, strict=True):
        check(case, steps)


def configured_apart(group: dist.ProcessGroup, case: Case, by: str) -> tuple[str, Step]:
    rank = dist.get_rank(group)
    first, last = case.shards[rank]
    hidden = case.x.shape[1]
    try:
        if by == "tokens":
            workspace.configure(100 + rank, hidden, last - first, group=group)
        elif by == "one rank":  # rank 0 configures, rank 1 calls
            if rank == 0:
                workspace.configure(100, hidden, last - first, group=group)
            else:
                run_step(group, case)
        else:  # enough on rank 0, too little on rank 1
            workspace.configure(100, hidden, (last - first) >> rank, group=group)
            run_step(group, case)
        text = ""
    except Exception as error:
        text = str(error)
    workspace.release(group=group)
    return text, run_step(group, case)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("tokens", "tokens: expected the same on every rank, got 100 on rank 0 and 101 on rank 1"),
        ("one rank", "got configure on rank 0 and forward on rank 1"),
        ("rows", "workspace: configured for at most 100 tokens x 24 hidden x 30 vocabulary rows"),
    ],
)
def test_configured_differently(ranks: Ranks, by: str, message: str) -> None:
    """One error on all ranks; after release, calls work as ever."""
    case = make_case(50, 24, [50, 60])
    usual = ranks.run(2, run_step, case)
    for rank, (text, step) in enumerate(ranks.run(2, configured_apart, case, by)):
        assert message in text
        assert same_bits(step, usual[rank])


def queried_on_one(group: dist.ProcessGroup) -> int:
    """Query, which is local, on rank 0 only; rank 1 goes on."""
    if dist.get_rank(group) == 0:
        return workspace.query(100, 24, 50, group=group)
    return 0


def test_query_is_local(ranks: Ranks) -> None:
    first, second = ranks.attempt(2, queried_on_one)
    assert first.value > 0 and not second.kind
    assert first.seconds < 5
