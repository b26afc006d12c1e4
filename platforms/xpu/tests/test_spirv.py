"""The Triton kernels compile to SPIR-V, with a triton for XPU in a temporary folder.

The tests download 180 MB and need 600 MB of temporary space. Only ``make test-spirv`` runs these
tests. A kernel that compiles may still compute wrong results.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs the package triton, whose builds are compiled")

from interposer import Capability, Request
from interposer.tooling import acceptance_of
from interposer_ops.triton import BUILDS, Build, triton_kernels

HERE = Path(__file__).parent
# The only triton for XPU on PyPI. It is older than the kernels are written for.
TRITON = "triton-xpu==3.3.0b1"
SHARED_BYTES = 128 * 1024
RECORDS = {r.name: r for r in triton_kernels()}


def taken(build: Build) -> bool:
    """Say whether a build's record takes it on such a GPU; most have no format without infinity."""
    record = RECORDS[build.kernel]
    capability = Capability("pvc", frozenset({"triton"}))
    request = Request("kernel", record.op, "xpu", capability, build.dtype, build.dims)
    return bool(acceptance_of(record)(request))


TAKEN = {(build.kernel, build.label) for build in BUILDS if taken(build)}
pytestmark = [pytest.mark.versions, pytest.mark.timeout(5400)]


@pytest.fixture(scope="module")
def triton_xpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder that has triton-xpu, which is removed afterwards."""
    folder = tmp_path_factory.mktemp("triton-xpu")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-cache-dir", "--no-compile"]
    subprocess.run([*command, "--no-deps", "--target", str(folder), TRITON], check=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def found(triton_xpu: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "spirv_builds.py")],
        env={**os.environ, "PYTHONPATH": str(triton_xpu)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_build_was_tried(found: list[dict[str, Any]]) -> None:
    tried = [(report["kernel"], report["label"]) for report in found]
    assert tried == [(build.kernel, build.label) for build in BUILDS]


def test_every_build_compiles(found: list[dict[str, Any]]) -> None:
    faults = {
        (report["kernel"], report["label"]): report["fault"]
        for report in found
        if "fault" in report and (report["kernel"], report["label"]) in TAKEN
    }
    print(f"{len(TAKEN) - len(faults)} of {len(TAKEN)} builds compile with {TRITON}")
    # The kernels are written for 3.6 and newer, and this triton broadcasts less.
    assert {key for key, fault in faults.items() if "Cannot broadcast" in fault} == {
        ("gather_cache_fp8_triton", "float8_e5m2, one scale"),
        ("qk_norm_triton", "32 and 8 heads of 128"),
    }
    assert [fault for fault in faults.values() if "Cannot broadcast" not in fault] == []


def test_the_output_is_valid_spirv(found: list[dict[str, Any]]) -> None:
    launches = [launch for report in found for launch in report.get("launches", [])]
    assert launches
    assert [launch for launch in launches if not launch["bytes"]] == []
    assert [launch for launch in launches if launch["shared"] > SHARED_BYTES] == []


def test_matmuls_use_matrix_extensions(found: list[dict[str, Any]]) -> None:
    wanted = {(build.kernel, build.label) for build in BUILDS if build.matrix}
    multiplying = {
        (report["kernel"], report["label"])
        for report in found
        if any(launch["matrix"] for launch in report.get("launches", []))
    }
    assert wanted & TAKEN
    assert (wanted & TAKEN) - multiplying == set()
