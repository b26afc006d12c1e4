"""vllm-xpu-kernels is used if a matching version is installed; a stand-in computes on the CPU.

The real ops were not run. The schemas are those of the published wheels, and the stand-ins check
their arguments as the sources and tests of the real ops define.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forks import forks
from tests.landing import landing_sample

from interposer_xpu._packages.kernel_package import SCHEMAS, USES
from interposer_xpu._packages.optional_packages import exit_text, version_numbers

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
FAKE = runpy.run_path(str(HERE / "fake_package.py"))
MINOR = ".".join(torch.__version__.split(".")[:2])
FITS = f"- **PyTorch**: {MINOR}.0+xpu"
JUDGE = """
import json, sys
from interposer_xpu._packages import kernel_package
said = {use: kernel_package.judge_ops(use).reason for use in kernel_package.USES}
said["here"] = sorted(name for name in sys.modules if name.startswith("vllm_xpu_kernels"))
print(json.dumps(said))
"""


def run(folder: Path | None, *command: str) -> Any:
    """Return the JSON that a program prints; it finds the packages of ``folder``."""
    paths = {"PYTHONPATH": str(folder)} if folder else {}
    done = forks().run(*command, env={**os.environ, "OMP_NUM_THREADS": "1", **paths}, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def install(folder: Path, version: str = "0.1.16.2", *given: Any, **named: Any) -> Path:
    """Return the folder of a wheel installed by pip, with the given differences."""
    wheel = FAKE["wheel"](folder, version, *given, **named)
    site: Path = FAKE["installed"](wheel, folder / "site")
    return site


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("package"), description=FITS)


def test_a_matching_package_is_accepted_without_an_import_here(package: Path) -> None:
    said = run(package, "-c", JUDGE)
    assert said.pop("here") == []
    assert said == dict.fromkeys(USES, "")


def test_a_missing_package_is_named() -> None:
    said = run(None, "-c", JUDGE)
    assert said.pop("here") == []
    assert set(said.values()) == {
        "needs the package vllm-xpu-kernels, which is not installed: pip install vllm-xpu-kernels"
    }


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("version", "description", "expected"),
    [
        ("0.2.0", FITS, "was written for vllm-xpu-kernels below 0.2, found 0.2.0"),
        (
            "0.1.16.2",
            "Currently we use PyTorch 2.10, oneapi 2025.3.",
            "vllm-xpu-kernels 0.1.16.2 is built for torch 2.10, installed is ",
        ),
        ("0.0.1", FITS, "needs vllm-xpu-kernels 0.1.3 or newer, found 0.0.1"),
    ],
)
def test_a_package_with_unsuitable_metadata_is_not_imported(
    tmp_path: Path, version: str, description: str, expected: str
) -> None:
    heads = {"_xpu_C": "raise SystemExit('was imported')"}
    site = install(tmp_path, version, description, heads=heads)
    assert expected in run(site, "-c", JUDGE)["int4"]


@pytest.mark.slow
def test_an_older_version_serves_the_uses_of_its_schemas(tmp_path: Path) -> None:
    schemas = {"_moe_C::topk_softmax": ""}
    site = install(tmp_path, "0.1.3.1", FITS, schemas)
    said = run(site, "-c", JUDGE)
    assert said["int4"] == said["fp8"] == said["view_of_host"] == ""
    assert said["experts"] == "needs vllm-xpu-kernels 0.1.12 or newer, found 0.1.3.1"


def test_every_op_is_checked_separately(tmp_path: Path) -> None:
    schemas = {
        "_xpu_C::int4_gemm_w4a16": SCHEMAS["_xpu_C::int4_gemm_w4a16"].replace(
            ", Tensor? g_idx", ""
        ),
        "_xpu_C::fp8_gemm": "",
    }
    heads = {"_moe_C": "raise ImportError('libsycl.so.9: cannot open shared object file')"}
    site = install(tmp_path, "0.1.16.2", FITS, schemas, heads)
    said = run(site, "-c", JUDGE)
    assert said["int4"].startswith(
        "_xpu_C::int4_gemm_w4a16 of vllm-xpu-kernels 0.1.16.2 has another schema: "
    )
    assert said["fp8"] == "_xpu_C::fp8_gemm of vllm-xpu-kernels 0.1.16.2 does not exist"
    assert said["fp8_weights"] == said["view_of_host"] == ""
    missing = "cannot be had, its module _moe_C fails: libsycl.so.9: cannot open shared object file"
    assert said["routing"] == f"_moe_C::topk_softmax of vllm-xpu-kernels 0.1.16.2 {missing}"
    assert said["experts"].endswith(missing)


@pytest.mark.parametrize(
    ("head", "expected"),
    landing_sample(
        [
            ("import os; os.abort()", "(signal 6): "),
            (
                "raise SystemExit('another torch is needed')",
                "(exit status 1): another torch is needed",
            ),
            ("import os; os._exit(3)", "(exit status 3): it printed nothing"),
        ],
        every=3,
    ),
)
def test_the_end_of_the_importing_process_is_reported(
    tmp_path: Path, head: str, expected: str
) -> None:
    site = install(tmp_path, "0.1.16.2", FITS, heads={"_C": head})
    said = run(site, "-c", JUDGE)
    assert len(set(said.values() if said.pop("here") == [] else ())) == 1
    assert said["int4"].startswith("vllm-xpu-kernels 0.1.16.2 ends the process that imports it ")
    assert expected in said["int4"]


# How many cases each accepts at least.
KERNELS = {
    "w4a16_linear_int4_gemm": 10,
    "fp8_linear_fp8_gemm": 20,
    "fp8_linear_fp8_gemm_w8a16": 10,
    "fused_experts_mxfp4_grouped_gemm": 10,
    "topk_softmax_moe": 10,
}


def test_kernels_match_the_ops(package: Path) -> None:
    found = run(package, str(HERE / "kernel_package_results.py"), *KERNELS)
    assert [results["faults"] for results in found.values()] == [[]] * len(KERNELS)
    assert [name for name, least in KERNELS.items() if found[name]["accepted"] < least] == []


@pytest.mark.slow
def test_memory_is_mapped_by_the_package(package: Path) -> None:
    program = """
import json
import torch
from interposer_xpu._hardware import host_mapping
pinned = torch.arange(6.0).view(2, 3)
torch.Tensor.is_pinned = lambda self: True  # there is no memory that could be
view = host_mapping.device_view(pinned)
view[0, 0] = 7
print(json.dumps([view.tolist(), pinned[0, 0].item()]))
"""
    assert run(package, "-c", program) == [[[7, 1, 2], [3, 4, 5]], 7]


def test_versions_and_exit_codes_are_parsed() -> None:
    assert version_numbers("0.1.16.2") == (0, 1, 16, 2)
    assert version_numbers("2.13.0+xpu") == (2, 13, 0)
    assert version_numbers("2.13.0a1") == (2, 13)
    assert [exit_text(-11), exit_text(127)] == ["signal 11", "exit status 127"]
