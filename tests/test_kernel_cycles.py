"""Kernels are not slower than they were on processors that nobody here has, by models of these."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interposer_cpu.native import NEEDS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that compiles for minutes. One worker does so for all of them."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.timeout(3600),
        pytest.mark.xdist_group("native levels"),
    ):
        test = mark(test)
    return test


ARM = """
level.o:     file format elf64-littleaarch64

0000000000000000 <void (anonymous namespace)::outer<F, 2>(Block const&)>:
       0:\tldr\tq1, [x0]
       4:\tbfmmla\tv0.4s, v1.8h, v2.8h
       8:\tb.ne\t4 <void (anonymous namespace)::outer<F, 2>(Block const&)+0x4>  // b.any
       c:\tbfdot\tv0.4s, v1.8h, v2.2h[0]
      10:\tcbnz\tx3, 0 <void (anonymous namespace)::outer<F, 2>(Block const&)>

0000000000000014 <other>:
      14:\tadd\tx0, x0, #0x1
      18:\tbl\t14 <other>
      1c:\tret
"""
S390X = """
0000000000000000 <(anonymous namespace)::scale_rows(Call const&)>:
       0:\tvl\t%v1,0(%r2)
       6:\tvfmasb\t%v2,%v1,%v3,%v2
       c:\tvst\t%v2,0(%r4),3
      12:\tbrctg\t%r1,0 <(anonymous namespace)::scale_rows(Call const&)>
"""
X86 = """
0000000000000000 <add_up>:
       0:\tvmovups (%rdi),%zmm1
       6:\tvfmadd231ps 0x0(%rip),%zmm1,%zmm0        # 10 <add_up+0x10>
      10:\tcmp    %rax,%rdi
      13:\tjne    0 <add_up>
      15:\tret
"""


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("listing", "function", "first_words", "multiply_adds", "num_bytes"),
    [
        (ARM, "outer<F, 2>", ["bfmmla", "b.ne"], 16, 0),
        (S390X, "scale_rows", ["vl", "vfmasb", "vst", "brctg"], 4, 16),
        (X86, "add_up", ["vmovups", "vfmadd231ps", "cmp", "jne"], 16, 64),
    ],
    ids=["aarch64", "s390x", "x86_64"],
)
def test_inner_loops_are_found_and_their_work_is_counted(
    listing: str, function: str, first_words: list[str], multiply_adds: int, num_bytes: int
) -> None:
    (loop,) = module("machine_code.listing").loops_of(listing)
    assert loop.function == function
    assert [text.split()[0] for text in loop.instructions] == first_words
    work = module("machine_code.work")
    assert work.multiply_adds(loop) == multiply_adds
    assert work.vector_bytes(loop) == num_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fmla v0.4s, v1.4s, v2.s[0]", 4),
        ("fmla z0.s, p0/m, z1.s, z2.s", 8),
        ("sdot v0.4s, v1.16b, v2.4b[1]", 16),
        ("smmla v0.4s, v1.16b, v2.16b", 32),
        ("{vex} vpdpbusd %ymm0,%ymm1,%ymm2", 32),
        ("vpdpbusd %zmm0,%zmm1,%zmm2", 64),
        ("vdpbf16ps (%rax){1to16},%zmm1,%zmm2", 32),
        ("tdpbf16ps %tmm2,%tmm1,%tmm0", 8192),
        ("fmul v0.4s, v1.4s, v2.4s", 0),
    ],
)
def test_products_count_as_wide_as_they_are(text: str, expected: int) -> None:
    loop = module("machine_code.listing").Loop("f", (text,))
    assert module("machine_code.work").multiply_adds(loop) == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["ldp q0, q1, [x1], #32", "str q0, [x2]"], 16),
        (["ldp q0, q1, [x1], #32", "stp q0, q1, [sp, #64]"], 32),
        (["add x9, sp, #0x40", "stp q0, q1, [x9]", "ldr q2, [x1]"], 16),
        (["ld1 {v0.16b, v1.16b}, [x0]"], 32),
        (["vst %v0,312(%r15),3", "vl %v1,0(%r2)"], 16),
        (["vmovups %ymm0,(%rdi)", "vmovups (%rsi),%ymm0"], 32),
        (["vmovaps 0x0(%rip),%zmm3", "vmovups (%rsi,%rax,4),%zmm0"], 64),
        (["ldr x0, [x1]"], 0),
    ],
)
def test_memory_counts_aside_from_the_stack(texts: list[str], expected: int) -> None:
    listing = module("machine_code.listing")
    lines = [f"{4 * at:8x}:\t{text}" for at, text in enumerate([*texts, "b.ne 0 <f>"])]
    (loop,) = listing.loops_of("00000000 <f>:\n" + "\n".join(lines))
    assert module("machine_code.work").vector_bytes(loop) == expected


def test_ends_of_rows_do_not_count() -> None:
    listing, figures = module("machine_code.listing"), module("machine_code.figures")
    product, other = "fmla v0.4s, v1.4s, v2.4s", "mov w0, w1"
    dense = listing.Loop("f", (product,) * 4 + (other,) * 4)
    looser = listing.Loop("f", (product,) * 4 + (other,) * 16)
    sparse = listing.Loop("f", (product,) * 4 + (other,) * 40)
    short = listing.Loop("f", (product,))
    work = module("machine_code.work").multiply_adds
    assert figures.main_loops([sparse, dense, short, looser], work) == [dense, looser]
    assert figures.main_loops([listing.Loop("f", (other,))], work) == []


def figure(function: str, **cycles: float) -> Any:
    return module("machine_code.figures").Figure("neon", "linear", function, 2, 12.0, cycles)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = module("machine_code.table")
    figures = (figure("f<A, 1>", n1=3.5, v1=1.25), figure("g", n1=0.8275, v1=0.5))
    other = replace(figures[0], level="dotprod", cycles={"n2": 123.4})
    written = table.Table("12.2.0", "19.1.7", (*figures, other))
    table.write(written, tmp_path / "table.txt")
    assert table.read(tmp_path / "table.txt") == written
    (tmp_path / "table.txt").write_text("compiler\t12.2.0\nsomething\n")
    with pytest.raises(table.TableError, match="no line of a table: 'something'"):
        table.read(tmp_path / "table.txt")


def test_worse_and_better_figures_are_named() -> None:
    compare = module("machine_code.table").compare
    old = [figure("f", n1=10.0, v1=10.0), figure("g", n1=10.0), figure("gone", n1=1.0)]
    found = compare(old, [figure("f", n1=10.4, v1=10.6), figure("g", n1=9.0), figure("h", n1=1.0)])
    assert found.worse == ["linear at neon, f: cycles on v1 10, now 10.6 (x1.06)"]
    assert found.better == ["linear at neon, g: cycles on n1 10, now 9 (x0.90)"]
    assert found.missing == ["linear at neon, gone: no longer found"]
    assert found.unknown == ["linear at neon, h: not in the table"]
    assert found.faults == [*found.worse, *found.missing, *found.unknown]
    assert compare(old, old).faults == []


@pytest.mark.parametrize("architecture", NEEDS)
def test_tables_hold_every_level_and_family(architecture: str) -> None:
    models = module("machine_code.objects").MODELS[architecture]
    table = module("machine_code.table").read(module("kernel_cycles").path_of(architecture))
    assert list(models) == list(NEEDS[architecture])
    for level, processors in models.items():
        figures = [found for found in table.figures if found.level == level]
        assert {"attention", "linear"} <= {found.family for found in figures}
        assert {tuple(found.cycles) for found in figures} == {processors}
        assert min(cycles for found in figures for cycles in found.cycles.values()) > 0
    families = {found.family for found in table.figures}
    assert families >= {"dense", "elementwise", "experts", "lora", "recurrence", "sampling"}


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function from an architecture to its build folder, or to a skipped test.

    The folders of other architectures are those of tests/test_native_levels.py.
    """
    cache = request.config.cache
    assert cache is not None

    def folder(architecture: str) -> Path:
        objects, models = module("machine_code.objects"), module("machine_code.models")
        try:
            models.analyser()
            objects.require("cmake", objects.compiler_of(architecture))
        except (models.AnalyserError, objects.ToolError) as error:
            pytest.skip(f"needs more than there is: {error}")
        kind = "cycles" if architecture == platform.machine() else "tests"
        return Path(cache.mkdir(f"kernel-{kind}-{architecture}"))

    return folder


@compiles
@pytest.mark.parametrize("architecture", NEEDS)
def test_no_kernel_is_slower_than_in_the_table(
    architecture: str, build: Callable[[str], Path]
) -> None:
    try:
        found = module("kernel_cycles").checked(architecture, build(architecture))
    except module("machine_code.table").TableError as error:
        pytest.skip(f"needs the programs of the table: {error}")
    renew = f"python benchmarks/kernel_cycles.py --write --architectures {architecture}"
    print(*found.better, f"To keep what is better: {renew}", sep="\n")
    assert not found.faults, "\n".join([*found.faults, f"Where that is right: {renew}"])


@compiles
def test_slower_code_is_seen(build: Callable[[str], Path]) -> None:
    program, folder = module("kernel_cycles"), build("aarch64")
    table = module("machine_code.table").read(program.path_of("aarch64"))
    of_lora = [found for found in table.figures if found.family == "lora"]
    # With eight registers for vectors, sums go to memory and back.
    fewer = " ".join(f"-ffixed-v{number}" for number in range(8, 32))
    slower = program.current("aarch64", folder, fewer, "lora")
    found = module("machine_code.table").compare(of_lora, slower.figures)
    assert any("shrink_tokens<0, 1>: cycles on neoverse-n1" in line for line in found.worse)


@compiles
def test_sums_of_matrices_stay_in_registers(build: Callable[[str], Path]) -> None:
    objects, work = module("machine_code.objects"), module("machine_code.work")
    of_level = {
        level: file
        for level, _, file in objects.objects_of("aarch64", build("aarch64"), family="attention")
    }
    listing = objects.listing_of("aarch64", of_level["bf16_i8mm"])
    found = [loop for loop in module("machine_code.listing").loops_of(listing)
             if work.multiply_adds(loop)]  # fmt: skip
    for rows in (4, 6, 8):
        for product in ("score", "weigh"):
            name = f"{product}_matrices<BFloat16OnPairs, {rows}>"
            own = [loop for loop in found if loop.function == name]
            assert own, name
            for loop in own:
                products = sum(text.startswith("bfmmla") for text in loop.instructions)
                assert not any("[sp" in text for text in loop.instructions), (name, loop)
                assert len(loop.instructions) <= 2.5 * products, (name, loop)
