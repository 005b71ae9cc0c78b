# SPDX-License-Identifier: Apache-2.0
"""The two halves of the instruction layer, and what nvcc makes of one; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from cpp_headers import Function, code_only, functions

ROOT = Path(__file__).resolve().parents[3]
LAYER = ROOT / "src/cuda/hw"
FILES = ("thread", "barrier", "memory", "copy", "wgmma", "tcgen05", "peer", "numbers")
ARCHITECTURES = {"sm90": "90a", "sm100": "100f"}
SOURCES = {chip: f"instructions_{chip}.cu" for chip in ARCHITECTURES}


def header(half: str, name: str) -> list[Function]:
    return functions((LAYER / half / f"{name}.h").read_text())


# --- the halves --------------------------------------------------------------


def test_both_folders_hold_the_same_headers() -> None:
    for half in ("ptx", "model"):
        assert {path.stem for path in (LAYER / half).glob("*.h")} == {*FILES, "launch"}


@pytest.mark.parametrize("name", FILES)
def test_a_header_declares_the_same_functions_in_both_halves(name: str) -> None:
    """Names, template parameters, types of arguments and result; only the model takes a Site."""
    ptx, model = (Counter(map(str, header(half, name))) for half in ("ptx", "model"))
    assert sum(ptx.values()) >= 4  # a reader that finds nothing compares nothing
    assert sorted((ptx - model).elements()) == [], "only in ptx/"
    assert sorted((model - ptx).elements()) == [], "only in model/"


# --- CUDA stays in its room --------------------------------------------------

WORDS = re.compile(r"\b(asm|__asm__|threadIdx|blockIdx|__shared__|__device__|__global__)\b")
# The device model switches between stacks, which C++ cannot; that assembly is a CPU's.
CPU_ASSEMBLY = LAYER / "model/engine/fiber.cpp"


def cuda_words() -> Iterator[str]:
    sources = (p for room in ("src", "tests/model/kernels") for p in (ROOT / room).rglob("*"))
    for path in sorted(sources):
        if path.suffix not in {".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh"}:
            continue
        if path.parent == LAYER / "ptx":
            continue
        text = path.read_text()
        # The macros are the one place where the two halves may differ.
        lines = (text if path != LAYER / "macros.h" else "").splitlines()
        code = code_only(text).splitlines()
        for number, line in enumerate(code, start=1):
            for word in WORDS.findall(line):
                if path != CPU_ASSEMBLY or word != "asm":
                    yield f"{path.relative_to(ROOT)}:{number}: {word}"
        # code_only takes preprocessor lines out: a macro may not smuggle CUDA in.
        for number, line in enumerate(lines, start=1):
            if line.lstrip().startswith("#") and WORDS.search(line.split("//")[0]):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_cuda_is_spoken_only_in_the_instruction_layer() -> None:
    assert (ROOT / "tests/model/kernels").is_dir()
    assert list(cuda_words()) == []


# --- the PTX -----------------------------------------------------------------

TMA = r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global\.tile\.mbarrier::complete_tx::bytes"
HINT = r"\.L2::cache_hint"
STRONG = [
    f"{order}.{scope}" for order in ("relaxed", "%s") for scope in ("cta", "cluster", "gpu", "sys")
]


def strong(what: str, order: str, types: str = "b") -> tuple[str, ...]:
    """Every scope and width of a strong access, relaxed and ordered."""
    names = [name.replace("%s", order).replace(".", r"\.") for name in STRONG]
    return tuple(rf"{what}\.{name}\.global\.{types}{bits}\b" for name in names for bits in (32, 64))


# What has to be among the instructions that come from each function; of all its overloads and
# variants together. A function without a pattern leaves no instruction of its own.
BOTH: dict[str, tuple[str, ...]] = {
    # thread.h
    "thread": (r"mov\.u32 .*%tid\.x",),
    "warp": (r"shr\.u32 .*, 5;",),
    "lane": (r"and\.b32 .*, 31;",),
    "cta_rank": (r"mov\.u32 .*%cluster_ctarank",),
    "cluster_id": (r"mov\.u32 .*%clusterid\.x",),
    "cluster_count": (r"mov\.u32 .*%nclusterid\.x",),
    "cta_sync": (r"bar(rier)?\.(cta\.)?sync\s+0;",),
    "warp_sync": (r"bar\.warp\.sync",),
    "named_sync": (r"bar\.sync \S+, \S+;",),
    "named_arrive": (r"bar\.arrive \S+, \S+;",),
    "cluster_arrive": (r"barrier\.cluster\.arrive\.release\.aligned",),
    "cluster_arrive_relaxed": (r"barrier\.cluster\.arrive\.relaxed\.aligned",),
    "cluster_wait": (r"barrier\.cluster\.wait\.acquire\.aligned",),
    "elect_one": (r"elect\.sync",),
    "shfl": (r"shfl\.sync\.idx\.b32",),
    "shfl_xor": (r"shfl\.sync\.bfly\.b32",),
    "uniform": (r"shfl\.sync\.idx\.b32",),
    "ballot": (r"vote\.sync\.ballot\.b32",),
    "registers_down": (r"setmaxnreg\.dec\.sync\.aligned\.u32 24;",),
    "registers_up": (r"setmaxnreg\.inc\.sync\.aligned\.u32 240;",),
    "pause": (r"nanosleep\.u32",),
    # barrier.h
    "address": (),
    "leader_address": (r"and\.b32 .*, -16777217;",),
    "cta_address": (r"mapa\.shared::cluster\.u32",),
    "barrier_init": (r"mbarrier\.init\.shared::cta\.b64",),
    "fence_barrier_init": (r"fence\.mbarrier_init\.release\.cluster",),
    "arrive": (r"mbarrier\.arrive\.shared::cta\.b64 _,",),
    "arrive_at": (
        r"mbarrier\.arrive\.shared::cluster\.b64 _,",
        r"mbarrier\.arrive\.release\.cluster\.shared::cluster\.b64 _,",
    ),
    "arrive_expect": (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _,",),
    "arrive_expect_at": (r"mbarrier\.arrive\.expect_tx\.shared::cluster\.b64 _,",),
    "expect": (r"mbarrier\.expect_tx\.relaxed\.cta\.shared::cta\.b64",),
    "wait": (
        r"mbarrier\.try_wait\.parity\.shared::cta\.b64",
        r"mbarrier\.try_wait\.parity\.acquire\.cluster\.shared::cta\.b64",
        r"%globaltimer",
        r"trap;",
    ),
    "test": (
        r"mbarrier\.test_wait\.parity\.shared::cta\.b64",
        r"mbarrier\.test_wait\.parity\.acquire\.cluster\.shared::cta\.b64",
    ),
    "store_async": (r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.b32",),
    # memory.h
    "st_shared": (r"st\.shared\.b32", r"st\.shared\.f32", r"st\.shared\.v2", r"st\.shared\.v4"),
    "ld_shared": (r"ld\.shared\.b32", r"ld\.shared\.f32", r"ld\.shared\.v2", r"ld\.shared\.v4"),
    "store_matrix": (r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared::cta\.b16",),
    "Cell::load": (r"ld\.volatile(\.shared)?\.u32", r"ld\.volatile(\.shared)?\.u64"),
    "Cell::store": (r"st\.volatile(\.shared)?\.u32", r"st\.volatile(\.shared)?\.u64"),
    "fence_proxy_async": (r"fence\.proxy\.async\.shared::cta",),
    "fence_proxy_async_global": (r"fence\.proxy\.async\.global",),
    "ld": (
        r"ld\.global\.[ub]16",
        r"ld\.global\.[fub]32",
        r"ld\.global\.([ub]64|v2\.[ub]32)",
        r"ld\.global\.v4\.[fub]32",
        *strong("ld", "acquire"),
    ),
    "st": (
        r"st\.global\.[ub]16",
        r"st\.global\.[fub]32",
        r"st\.global\.([ub]64|v2\.[ub]32)",
        r"st\.global\.v4\.[fub]32",
        *strong("st", "release"),
    ),
    "add": (
        *strong(r"atom\.add", "acquire", "u"),
        *strong(r"atom\.add", "release", "u"),
        *strong(r"atom\.add", "acq_rel", "u"),
    ),
    "fence": tuple(rf"fence\.acq_rel\.{scope};" for scope in ("cta", "cluster", "gpu", "sys")),
    "wait_flag": (
        *(rf"ld\.acquire\.{scope}\.global\.b32" for scope in ("cta", "cluster", "gpu", "sys")),
        *(rf"ld\.relaxed\.{scope}\.global\.b32" for scope in ("cta", "cluster", "gpu", "sys")),
        r"%globaltimer",
        r"trap;",
    ),
    # copy.h
    "prefetch": (r"prefetch\.tensormap",),
    "tma_load": (rf"{TMA} \[", rf"{TMA}{HINT} \["),
    "tma_load_multicast": (
        rf"{TMA}\.multicast::cluster \[",
        rf"{TMA}\.multicast::cluster{HINT} \[",
    ),
    "tma_store": (
        r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.tile\.bulk_group \[",
        rf"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.tile\.bulk_group{HINT} \[",
    ),
    "tma_reduce_add": (r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add\.tile",),
    "bulk_load": (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes",),
    "bulk_store": (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group",),
    "bulk_reduce_add": (r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32",),
    "bulk_commit": (r"cp\.async\.bulk\.commit_group",),
    "bulk_wait_read": (r"cp\.async\.bulk\.wait_group\.read 1;",),
    "bulk_wait": (r"cp\.async\.bulk\.wait_group 0;",),
    # peer.h
    "multimem_load_add": (
        r"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.v4\.f32",
        r"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.acc::f32\.v4\.bf16x2",
    ),
    "multimem_store": (r"multimem\.st\.relaxed\.sys\.global\.v4\.f32",),
    "multimem_add": tuple(
        rf"multimem\.red\.{order}\.{scope}\.global\.add\.u32"
        for order in ("relaxed", "release")
        for scope in ("gpu", "sys")
    ),
    "fence_proxy_alias": (r"fence\.proxy\.alias",),
    "wait_peer": (
        r"ld\.acquire\.sys\.global\.b32",
        r"ld\.acquire\.gpu\.global\.b64",
        r"ld\.relaxed\.gpu\.global\.b32",  # abort.raised
        r"atom\.(\w+\.)*exch\.b32",  # raises abort: who finds 0 reports
        r"st\.release\.sys\.global\.b32",  # the report
        r"nanosleep\.u32",
        r"%globaltimer",
    ),
    # numbers.h
    "exp2": (r"ex2\.approx\.ftz\.f32",),
    "log2": (r"lg2\.approx\.ftz\.f32",),
    "fma": (r"fma\.rn\.f32",),
    "ceil": (r"cvt\.rpi\.f32\.f32",),
    "max": (r"max\.f32",),
    "min": (r"min\.f32",),
    "as_float": (),
    "as_bits": (),
    "bf16_bits": (r"cvt\.rn\.bf16\.f32",),
    "bf16_value": (r"shl\.b32 .*, 16;",),
    "pack_bf16": (r"cvt\.rn\.bf16x2\.f32",),
}
HOPPER: dict[str, tuple[str, ...]] = {
    "wgmma_fence": (r"wgmma\.fence\.sync\.aligned",),
    "wgmma": tuple(
        rf"wgmma\.mma_async\.sync\.aligned\.m64n{n}k16\.f32\.bf16\.bf16 .*, p, 1, 1, {a}, {b};"
        for n, a, b in ((64, 0, 0), (128, 1, 0), (192, 0, 1), (256, 1, 1))
    ),
    "wgmma_commit": (r"wgmma\.commit_group\.sync\.aligned",),
    "wgmma_wait": (r"wgmma\.wait_group\.sync\.aligned 1;", r"wgmma\.wait_group\.sync\.aligned 0;"),
}


def by_group(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.replace("GROUP", rf"cta_group::{group}") for group in (1, 2))


COMMIT = r"tcgen05\.commit\.GROUP\.mbarrier::arrive::one\.shared::cluster"
BLACKWELL: dict[str, tuple[str, ...]] = {
    "tma_load_pair": (rf"{TMA}\.cta_group::2 \[", rf"{TMA}\.cta_group::2{HINT} \["),
    "tma_load_pair_multicast": (
        rf"{TMA}\.multicast::cluster\.cta_group::2 \[",
        rf"{TMA}\.multicast::cluster\.cta_group::2{HINT} \[",
    ),
    "tmem_alloc": by_group(r"tcgen05\.alloc\.GROUP\.sync\.aligned\.shared::cta\.b32"),
    "tmem_relinquish": by_group(r"tcgen05\.relinquish_alloc_permit\.GROUP\.sync\.aligned"),
    "tmem_dealloc": by_group(r"tcgen05\.dealloc\.GROUP\.sync\.aligned\.b32"),
    "tcgen05_mma": by_group(r"tcgen05\.mma\.GROUP\.kind::f16 "),
    "tcgen05_commit": by_group(COMMIT + r"\.b64"),
    "tcgen05_commit_multicast": by_group(COMMIT + r"\.multicast::cluster\.b64"),
    "tcgen05_after_sync": (r"tcgen05\.fence::after_thread_sync",),
    "tcgen05_before_sync": (r"tcgen05\.fence::before_thread_sync",),
    "tmem_ld": tuple(rf"tcgen05\.ld\.sync\.aligned\.32x32b\.x{n}\.b32" for n in (8, 16, 32, 64)),
    "tmem_wait_ld": (r"tcgen05\.wait::ld\.sync\.aligned",),
    "tmem_st": tuple(rf"tcgen05\.st\.sync\.aligned\.32x32b\.x{n}\.b32" for n in (8, 16, 32, 64)),
    "tmem_wait_st": (r"tcgen05\.wait::st\.sync\.aligned",),
}
# For hosts; and NVSHMEM's, whose headers are not everywhere.
ELSEWHERE = {"tensor_map", "put_signal"}
EXPECTED = {"sm90": BOTH | HOPPER, "sm100": BOTH | BLACKWELL}


def test_every_function_has_a_row_and_a_call() -> None:
    declared = {function.name for name in FILES for function in header("ptx", name)}
    assert declared == {*BOTH, *HOPPER, *BLACKWELL, *ELSEWHERE}
    here = Path(__file__).parent
    sources = (here / name for name in ("instructions.h", *SOURCES.values()))
    text = "\n".join(code_only(path.read_text()) for path in sources)
    called = set(re.findall(r"hw::(\w+)(?=[<(])", text))
    called |= {f"Cell::{name}" for name in re.findall(r"\.(load|store)\(", text)}
    assert declared - called <= ELSEWHERE


@cache
def spans() -> dict[Path, list[Function]]:
    return {LAYER / "ptx" / f"{name}.h": header("ptx", name) for name in FILES}


def instructions_by_function(ptx: str) -> dict[str, str]:
    """What each function of the layer left in the PTX, by the line numbers of -lineinfo; what was
    inlined into a function counts as its own."""
    files = {
        int(n): Path(path).resolve() for n, path in re.findall(r'\.file\s+(\d+) "([^"]+)"', ptx)
    }
    Place = tuple[int, int, int]
    callers: dict[Place, Place | None] = {}
    where: Place | None = None
    found: dict[str, list[str]] = defaultdict(list)
    for line in ptx.splitlines():
        text = line.strip()
        if loc := re.match(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?", text):
            numbers = [int(n) if n else 0 for n in loc.groups()]
            where = (numbers[0], numbers[1], numbers[2])
            callers[where] = (numbers[3], numbers[4], numbers[5]) if numbers[3] else None
        elif text and not text.startswith(("//", ".")) and where is not None:
            place: Place | None = where
            names: set[str] = set()
            for _ in range(20):  # of callers of callers
                if place is None:
                    break
                for f in spans().get(files[place[0]], []):
                    if f.first_line <= place[1] <= f.last_line:
                        names.add(f.name)
                place = callers.get(place)
            for name in names:
                found[name].append(text)
    return {name: "\n".join(lines) for name, lines in found.items()}


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("no nvcc on the path")
    return found


def compile_for(nvcc: str, source: str, architecture: str, *options: str) -> tuple[int, str]:
    """(exit status, what the compiler said)."""
    command = [nvcc, "-std=c++20", "-O3", f"-I{ROOT}/src", *options]
    command += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    command += [str(Path(__file__).with_name(source))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", ARCHITECTURES)
def test_instructions(nvcc: str, chip: str, tmp_path: Path) -> None:
    status, said = compile_for(
        nvcc, SOURCES[chip], ARCHITECTURES[chip], "-c", "-o", str(tmp_path / "object"),
        "-lineinfo", "-keep", "-keep-dir", str(tmp_path),
        "-Xptxas", "-v,-warn-spills,-warn-lmem-usage", "-Werror", "all-warnings",
    )  # fmt: skip
    assert status == 0, said
    assert said.count(" 0 bytes spill stores, 0 bytes spill loads") == said.count(
        "Function properties"
    )
    assert "Potential Performance Loss" not in said, said  # wgmma serialised, setmaxnreg ignored
    found = instructions_by_function((tmp_path / f"instructions_{chip}.ptx").read_text())
    missing = [
        f"{name}: {pattern}"
        for name, patterns in EXPECTED[chip].items()
        for pattern in patterns
        if not re.search(pattern, found.get(name, ""))
    ]
    assert missing == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("chip", "other"), [("sm90", "sm100"), ("sm100", "sm90")])
def test_a_kernel_does_not_compile_for_the_other_chip(nvcc: str, chip: str, other: str) -> None:
    """Because each of the functions that only its own chip has is missing there."""
    status, said = compile_for(nvcc, SOURCES[chip], ARCHITECTURES[other], "-ptx", "-o", "/dev/null")
    assert status != 0
    missing = set(re.findall(r'namespace "hw" has no member "(\w+)"', said))
    assert missing == EXPECTED[chip].keys() - EXPECTED[other].keys(), said


@pytest.mark.timeout(600)
def test_host_side(nvcc: str, tmp_path: Path) -> None:
    program = tmp_path / "host_side"
    status, said = compile_for(
        nvcc, "host_side.cu", "90a", "-Werror", "all-warnings", "-o", str(program)
    )
    assert status == 0, said
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "3f80 3f82 7fff c0003f80",  # ties to even, down and up; NaN; a pair
        "3.14062 80000000",
        "tensor map: expected a base address that is a multiple of 16",
        "block 5 (cluster 2 cta 1) warp 4 thread 137 waited 20 s for inputs.arrived[2]: "
        "expected the phase with parity 0 to complete, the last that did has parity 1",
        "block 5 (cluster 5 cta 0) warp 4 thread 137 waited 20 s for the flag at 0xabc0: "
        "expected 7, seen 1",
    ]
