# SPDX-License-Identifier: Apache-2.0
"""The tool itself: which calls it finds, when a list is stale, what a survivor needs."""

from __future__ import annotations

from pathlib import Path

import mutate
import pytest
from calls import Call, synchronising_calls
from mutations import (
    ListError,
    Mutation,
    Result,
    Survivor,
    judge,
    read_list,
    read_lists,
    read_survivors,
    survival_rate,
    too_many_survive,
)

KERNEL = """\
// hw::wait(in_a_comment);
#include "cuda/hw/hw.h"
struct Toy {
  static HW_FN void load(const Params& p, Smem& s) {
    for (int k = 0; k < 2; ++k) {
      hw::wait(s.ring.finished[k % (1 + 1)],
               k & 1);  // hw::warp_sync()
      if (hw::lane() == 0) hw::arrive_expect(s.ring.arrived[k], 64);
    }
    hw::st(p.data, 1);
    hw::st<hw::Order::kRelease, hw::Scope::kGpu>(p.flag, 1);
  }
  static HW_FN void run(const Params& p, Smem& s) {
    if (warp == 0 && hw::elect_one()) load(p, s);
    const uint32_t before = hw::add<hw::Order::kAcqRel, hw::Scope::kGpu>(p.count, 1);
    if (!hw::wait_peer(p.flag, before, p.abort, who("hw::cta_sync()"))) return;
    hw::cta_sync();
    hw::cta_sync();
  }
};
"""
LIST = """\
[[mutation]]
name = "load: too few bytes"
kind = "bytes"
short = true
old = "s.ring.arrived[k], 64"
new = "s.ring.arrived[k], 32"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one kernel."""
    for room in ("tests/model/kernels", "src/cuda/tile", "lists"):
        (tmp_path / room).mkdir(parents=True)
    (tmp_path / "tests/model/kernels/toy.h").write_text(KERNEL)
    (tmp_path / "lists/toy.toml").write_text(LIST)
    return tmp_path


def calls() -> dict[str, Call]:
    return {call.name: call for call in synchronising_calls(KERNEL)}


def test_every_synchronising_call_is_found_once() -> None:
    assert [
        (call.function, call.kind, call.replacement) for call in synchronising_calls(KERNEL)
    ] == [
        ("load", "wait", "(void)0"),
        ("load", "bytes", "(void)0"),
        ("load", "order", "(void)0"),
        ("run", "mask", "true"),
        ("run", "order", "0"),
        ("run", "wait", "true"),
        ("run", "wait", "(void)0"),
        ("run", "wait", "(void)0"),
    ]


def test_a_call_ends_at_its_own_parenthesis() -> None:
    call = calls()["delete load: hw::wait(s.ring.finished[k % (1 + 1)], k & 1)"]
    assert KERNEL[call.begin : call.end].endswith("k & 1)")


def test_the_same_call_twice_has_two_names() -> None:
    assert {"delete run: hw::cta_sync()", "delete run: hw::cta_sync() #2"} <= set(calls())


def test_names_survive_other_line_breaks() -> None:
    moved = "\n\n" + KERNEL.replace("hw::arrive_expect(s.ring", "hw::arrive_expect(\n   s.ring")
    assert [call.name for call in synchronising_calls(moved)] == list(calls())


def test_an_open_parenthesis_is_an_error() -> None:
    with pytest.raises(ValueError, match="closing parenthesis for line 1"):
        synchronising_calls("void f() { hw::wait(a, (b); }")


def test_a_list_has_its_own_mutations_and_the_deletions(root: Path) -> None:
    kernel = read_list(root / "lists/toy.toml", root)
    assert kernel.test == "tests/model/toy_test.cpp"
    written, deleted = kernel.mutations[0], kernel.mutations[1:]
    assert (written.kind, written.short, written.automatic) == ("bytes", True, False)
    assert written.text == KERNEL.replace(", 64", ", 32")
    assert len(deleted) == 8
    assert all(mutation.automatic and not mutation.short for mutation in deleted)
    assert deleted[-1].text == KERNEL.replace("hw::cta_sync();\n  }\n", "(void)0;\n  }\n")


def test_a_list_may_leave_functions_to_another_kernel(root: Path) -> None:
    path = root / "lists/toy.toml"
    path.write_text('automatic = ["tests/model/kernels/toy.h:load"]\n' + LIST)
    assert len(read_list(path, root).mutations) == 1 + 3
    with pytest.raises(ListError, match=r"toy.h:run'\], got none"):
        read_lists(root / "lists", root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("s.ring.arrived[k], 64", "s.ring.left[k], 64"), "stale: expected exactly once, found 0"),
        (("s.ring.arrived[k], 64", "hw::cta_sync();"), "stale: expected exactly once, found 2"),
        (('"bytes"', '"byte"'), "expected kind of wait, fence"),
        (("new = ", "now = "), "expected new = a string, got None"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(
    root: Path, change: tuple[str, str], message: str
) -> None:
    path = root / "lists/toy.toml"
    path.write_text(LIST.replace(*change))
    with pytest.raises(ListError, match=message):
        read_list(path, root)


def test_a_change_may_be_meant_everywhere(root: Path) -> None:
    path = root / "lists/toy.toml"
    path.write_text(
        '[[mutation]]\nname="x"\nkind="other"\nold="hw::cta_sync"\nnew="no"\nall=true\n'
    )
    assert "hw::cta_sync" not in read_list(path, root).mutations[0].text.replace('"hw::cta', "")


def mutation(kind: str, automatic: bool = False, name: str = "m") -> Mutation:
    return Mutation("toy", name, kind, "tests/model/kernels/toy.h", "", automatic)


def verdict(result: str, changed: Mutation, *entries: Survivor, root: Path) -> list[str]:
    """What is wrong with one result among many that were caught."""
    others = [Result(mutation("order", name=f"other {i}"), "caught") for i in range(50)]
    results = [Result(changed, result), *others]
    return judge(results, list(entries), [r.mutation for r in results], root)


REASON = "the second synchronisation behind it covers this"
TOY = "tests/model/kernels/toy.h"


def test_what_is_caught_passes(root: Path) -> None:
    for caught in ("caught", "crashed", "timed out"):
        assert verdict(caught, mutation("wait"), root=root) == []


def test_a_survivor_needs_a_reason(root: Path) -> None:
    assert verdict("survived", mutation("order"), root=root) == [
        "toy: m: survived, without a reason"
    ]
    assert verdict("survived", mutation("order"), Survivor("toy", "m", REASON), root=root) == []


def test_a_written_wait_is_never_excused(root: Path) -> None:
    for kind in ("wait", "phase", "bytes", "scope"):
        wrong = verdict("survived", mutation(kind), Survivor("toy", "m", REASON), root=root)
        assert wrong == [f"toy: m: survived, and a mutation of kind {kind} has to be caught"]


def test_a_deleted_wait_needs_what_covers_it(root: Path) -> None:
    changed = mutation("wait", automatic=True)
    entry = Survivor("toy", "m", REASON, TOY)
    assert "needs covered_by" in verdict("survived", changed, entry, root=root)[0]
    entry = Survivor("toy", "m", REASON, TOY, "hw::cluster_wait()")
    assert "covered_by is not in" in verdict("survived", changed, entry, root=root)[0]
    entry = Survivor("toy", "m", REASON, TOY, "hw::cta_sync()")
    assert verdict("survived", changed, entry, root=root) == []


def test_a_survivor_that_is_caught_now_is_stale(root: Path) -> None:
    wrong = verdict("caught", mutation("order"), Survivor("toy", "m", REASON), root=root)
    assert wrong == ["toy: m: survivors.toml is stale: it is caught now"]
    wrong = verdict("caught", mutation("order"), Survivor("toy", "gone", REASON), root=root)
    assert wrong == ["toy: gone: survivors.toml is stale: no such mutation"]
    assert verdict("caught", mutation("order"), Survivor("not run", "x", REASON), root=root) == []


def test_only_a_deletion_may_fail_to_compile(root: Path) -> None:
    assert verdict("invalid", mutation("wait", automatic=True), root=root) == []
    assert "does not compile" in verdict("invalid", mutation("wait"), root=root)[0]


def test_too_many_survivors_fail_though_each_has_a_reason(root: Path) -> None:
    few = [Result(mutation("order", name=str(i)), "survived") for i in range(9)]
    many = [Result(mutation("order", name=str(i)), "caught") for i in range(9, 100)]
    invalid = [Result(mutation("order", True, name=str(i)), "invalid") for i in range(100, 200)]
    entries = [Survivor("toy", str(i), REASON) for i in range(9)]
    results = few + many + invalid
    assert survival_rate(results) == pytest.approx(0.09)
    assert judge(results, entries, [r.mutation for r in results], root) == []
    assert too_many_survive(results) == ["expected at most 8% survivors, got 9.0%"]
    assert too_many_survive(results[1:]) == ["expected at most 8% survivors, got 8.1%"]
    assert too_many_survive(results[2:]) == []


def test_the_first_message_of_a_test_is_found() -> None:
    said = (
        "toy_test.cpp:9: ERROR: CHECK( failed == 0 ) is NOT correct!\n"
        "  logged: 2 of 9 seeds failed [X.......X] seed 0: deadlock:\n"
        "  cluster 0 cta 0 warp 0: mbarrier wait\n\n[doctest] ...\n"
    )
    message, seeds = mutate.first_message(said)
    assert seeds == "2 of 9"
    assert message == "seed 0: deadlock: cluster 0 cta 0 warp 0: mbarrier wait"


def test_a_test_that_runs_on_is_ended() -> None:
    status, _ = mutate.command(["sleep", "60"], 0.1)
    assert status is None


def test_the_lists_of_this_repository_fit_its_kernels() -> None:
    kernels = read_lists()
    mutations = [m for kernel in kernels for m in kernel.mutations]
    assert sum(not m.automatic for m in mutations) >= 110
    assert sum(m.short for m in mutations) >= 50
    labels = [(m.label, m.file) for m in mutations]
    assert len(set(labels)) == len(labels)
    names = {m.label for m in mutations}
    assert all(f"{s.kernel}: {s.name}" in names for s in read_survivors())
