"""Every kernel compiles for every architecture that it takes, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs the package triton")

from interposer import Capability, Request  # noqa: E402
from interposer.judges import Direct, judge_declared  # noqa: E402
from interposer.records import Kernel  # noqa: E402
from interposer_ops.triton.ahead import TARGETS, Report, all_reports, table  # noqa: E402
from interposer_ops.triton.build import Build  # noqa: E402
from interposer_ops.triton.builds import BUILDS  # noqa: E402
from interposer_ops.triton_records import triton_records  # noqa: E402

DOCUMENT = Path(__file__).parents[3] / "docs/triton-targets.md"
KERNELS = {r.name: r for r in triton_records() if isinstance(r, Kernel)}


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    if triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET unset: kernels are not compiled")
    return all_reports()


def test_every_kernel_has_a_build() -> None:
    assert {build.kernel for build in BUILDS} == set(KERNELS)
    labels = [(build.kernel, build.label) for build in BUILDS]
    assert len(labels) == len(set(labels))


def test_code_comes_out_for_every_target(reports: list[Report]) -> None:
    made = {(r.build.kernel, r.build.label, r.target.architecture) for r in reports}
    assert made == {
        (build.kernel, build.label, target.architecture)
        for build in BUILDS
        for target in TARGETS
        if target.architecture not in build.without
    }
    assert all(report.code_bytes for report in reports)


def test_no_register_is_spilled(reports: list[Report]) -> None:
    assert [(r.build.kernel, r.build.label, r.target) for r in reports if r.spilled] == []


def test_shared_memory_fits(reports: list[Report]) -> None:
    assert [r for r in reports if r.shared_bytes > r.target.shared_bytes] == []


def test_matrix_instructions_come_out_where_they_have_to(reports: list[Report]) -> None:
    multiplying = {(r.build.kernel, r.build.label, r.target) for r in reports if r.matrix}
    wanted = {(r.build.kernel, r.build.label, r.target) for r in reports if r.build.matrix}
    assert wanted - multiplying == set()  # of several launches, not all multiply matrices


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build.kernel}-{build.label}")
def test_a_target_without_a_build_is_refused_by_the_record(build: Build) -> None:
    """A kernel is refused where it does not compile, with a reason, and accepted where it does."""
    record = KERNELS[build.kernel]
    for target in TARGETS:
        capability = Capability(target.architecture, frozenset({"triton"}))
        request = Request("kernel", record.op, "any", capability, build.dtype, build.dims)
        verdict = judge_declared(record, Direct())(request)
        assert verdict.accepted == (target.architecture not in build.without), verdict.reason


def test_the_table_in_the_documentation_is_up_to_date(reports: list[Report]) -> None:
    if triton.__version__ != "3.7.1":
        pytest.skip("needs triton 3.7.1, which the table was written with")
    hint = "python -m interposer_ops.triton.ahead --write docs/triton-targets.md"
    assert table(reports) == DOCUMENT.read_text(encoding="utf-8"), f"run {hint}"
