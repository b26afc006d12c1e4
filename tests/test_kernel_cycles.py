"""Kernels are not slower than they were on processors that nobody here has, by models of these."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from interposer_cpu.native import NEEDS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that compiles for minutes. One worker does so for all of them."""
    for mark in (
        pytest.mark.process,
        pytest.mark.slow,
        pytest.mark.timeout(3600),
        pytest.mark.xdist_group("native levels"),
    ):
        test = mark(test)
    return test


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.slow
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
