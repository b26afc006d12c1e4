"""Every kernel compiles for every architecture that it takes, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

triton = pytest.importorskip("triton", reason="needs the package triton")

from interposer import Capability, Request  # noqa: E402
from interposer.tooling import acceptance_of  # noqa: E402
from interposer_ops._records import triton_kernels  # noqa: E402
from interposer_ops._triton.aot import (  # noqa: E402
    TARGETS,
    Report,
    Target,
    all_reports,
    build_reports,
    table,
)
from interposer_ops._triton.build import Build  # noqa: E402
from interposer_ops._triton.builds import BUILDS  # noqa: E402

KERNELS = {r.name: r for r in triton_kernels()}


TARGET_OF = {target.architecture: target for target in TARGETS}
# The first build of a kernel stands for it where compiling all of them would take too long.
FIRST = list({build.kernel: build for build in reversed(BUILDS)}.values())[::-1]


# The fast test compiles each kernel for one GPU, in turns, so that every GPU has its share of the
# kernels. The slow test compiles all of them for all.
LARGE = ("sm_80", "gfx1100", "sm_90", "gfx942", "gfx1201", "sm_100", "gfx908", "gfx90a", "gfx950")
# What has little shared memory differs in what fits.
SMALL = ("sm_75", "sm_89", "sm_120")
# What the matrix instructions of AMD are called: CDNA's, and RDNA's.
INSTRUCTIONS = {"gfx9": ("v_mfma_", "v_smfmac_"), "gfx1": ("v_wmma_",)}
TURNS = list(enumerate(FIRST))


def some_targets(turn: int, build: Build) -> list[Target]:
    """Return one supported target of ``build``, a different one for each ``turn``."""
    able = [name for name in LARGE if name not in build.without]
    return [TARGET_OF[able[turn % len(able)]]] if able else []


def assert_compiled(
    build: Build, reports: list[Report], targets: Sequence[Target] = TARGETS
) -> None:
    """Assert that every target has code without spills that fits and uses matrix instructions."""
    expected_targets = {target.architecture for target in targets} - build.without
    assert {report.architecture for report in reports} == expected_targets
    assert all(report.code_bytes for report in reports)
    assert [(r.name, r.architecture, r.spilled) for r in reports if r.spilled] == []
    shared = [(r, TARGET_OF[r.architecture].shared_bytes) for r in reports]
    assert [(r.name, r.architecture) for r, max_bytes in shared if r.shared_bytes > max_bytes] == []
    # Of several launches, one may only add up the results of the others.
    multiplying = {report.architecture for report in reports if report.matrix}
    for report in reports:
        prefixes = INSTRUCTIONS.get(report.architecture[:4], ("",))
        assert all(name.startswith(prefixes) for name in report.matrix), report
    able = {a for a in expected_targets if TARGET_OF[a].has_matrix}
    assert multiplying <= able
    assert not build.matrix or multiplying == able


def test_every_kernel_has_a_build() -> None:
    assert {build.kernel for build in BUILDS} == set(KERNELS)
    labels = [(build.kernel, build.label) for build in BUILDS]
    assert len(labels) == len(set(labels))


def test_the_sample_of_builds_covers_every_target() -> None:
    for is_matrix in (True, False):
        tried = {
            target.architecture
            for turn, build in TURNS
            if build.matrix == is_matrix
            for target in some_targets(turn, build)
        }
        assert tried | set(SMALL) == set(TARGET_OF)


@pytest.mark.landing(2)
@pytest.mark.process
@pytest.mark.parametrize(
    ("turn", "build"),
    [
        pytest.param(turn, build, id=build.kernel, marks=[pytest.mark.slow] if turn % 8 else [])
        for turn, build in TURNS
    ],
)
def test_a_kernel_compiles_for_some_gpus(turn: int, build: Build) -> None:
    targets = some_targets(turn, build)
    assert targets
    assert_compiled(build, build_reports(build, targets), targets)


# Tiles that are loaded while others are multiplied take most of the shared memory.
LARGEST = {
    "fused_experts_triton": "64 tokens, 64 of 2048 x 1408",
    "w8a16_linear_triton": "64 tokens, 4096 to 4096, one scale per output",
    "ragged_attention_with_lse_triton": "latent, 128 heads of 192 and 128",
}
SMALLEST = dict(zip(LARGEST, SMALL, strict=True))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("kernel", LARGEST)
def test_the_largest_tiles_fit_where_shared_memory_is_small(kernel: str) -> None:
    small = [TARGET_OF[SMALLEST[kernel]]]
    build = next(b for b in BUILDS if (b.kernel, b.label) == (kernel, LARGEST[kernel]))
    assert not build.without
    assert_compiled(build, build_reports(build, small), small)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_build_compiles_for_every_target() -> None:
    reports = all_reports()
    for build in BUILDS:
        reports_of_build = [
            r for r in reports if (r.kernel, r.label) == (build.kernel, build.label)
        ]
        assert_compiled(build, reports_of_build)
    page = table(reports)
    assert [kernel for kernel in KERNELS if f"\n## {kernel}\n" not in page] == []


@pytest.mark.landing(39)
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build.kernel}-{build.label}")
def test_a_target_without_a_build_is_refused_by_the_record(build: Build) -> None:
    """A kernel is refused where it does not compile, with a reason, and accepted where it does."""
    record = KERNELS[build.kernel]
    for target in TARGETS:
        capability = Capability(target.architecture, frozenset({"triton"}))
        request = Request("kernel", record.op, "any", capability, build.dtype, build.dims)
        verdict = acceptance_of(record)(request)
        assert verdict.accepted == (target.architecture not in build.without), verdict.reason
