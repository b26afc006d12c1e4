"""Where a Triton kernel is refused, and what the refusal says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from interposer import Capability, Request, current_registry, place
from interposer.errors import install_command
from interposer.records import Kernel
from interposer.tooling import acceptance_of
from interposer_ops._records import triton_kernels
from interposer_ops._triton import availability as triton_availability
from interposer_ops._triton.availability import INTERPRETER, judge, judge_fp8

KERNELS = triton_kernels()


def request(architecture: str, *features: str, **dims: str) -> Request:
    capability = Capability(architecture, frozenset({"triton", *features}))
    return Request("kernel", "an_op", "any", capability, "bfloat16", dims)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    for remembered in (triton_availability.judge_package, triton_availability._backends):
        remembered.cache_clear()
    yield
    for remembered in (triton_availability.judge_package, triton_availability._backends):
        remembered.cache_clear()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of a triton that is installed, of version 3.6.0 and with one backend."""
    folder = tmp_path / "triton"
    (folder / "backends/nvidia").mkdir(parents=True)
    (folder / "backends/nvidia/compiler.py").touch()
    spec = ModuleSpec("triton", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(triton_availability, "find_spec", lambda _: spec)
    monkeypatch.setattr(triton_availability, "version", lambda _: "3.6.0")
    monkeypatch.setattr(triton_availability, "entry_points", lambda group: ())
    return folder


@pytest.mark.parametrize("spec", [None, ModuleSpec("triton", None)], ids=["none", "a mere folder"])
def test_a_missing_package_is_refused_with_an_install_command(
    spec: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_availability, "find_spec", lambda _: spec)
    assert judge(request("sm_90")).reason == (
        "needs the package triton, which is not installed: "
        f"{install_command('interposer-ops[triton]')}"
    )


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("found", ["3.5.1", "2.1.0", "3.0.0+git"])
def test_an_old_package_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_availability, "version", lambda _: found)
    verdict = judge(request("sm_90"))
    assert verdict.reason.startswith(f"needs triton 3.6 or newer, found {found}")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("found", ["3.6.0", "3.7.1", "3.10.0", "4.0.0"])
def test_a_new_package_is_accepted(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_availability, "version", lambda _: found)
    assert judge(request("sm_90"))


@pytest.mark.usefixtures("package")
def test_a_package_of_a_vendor_or_from_source_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "pytorch-triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.5.0"

    monkeypatch.setattr(triton_availability, "version", version)
    assert "found 3.5.0" in judge(request("sm_90")).reason
    triton_availability.judge_package.cache_clear()

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(triton_availability, "version", unknown)
    assert judge(request("sm_90"))


@pytest.mark.usefixtures("package")
def test_a_device_without_a_backend_is_refused() -> None:
    assert judge(request("sm_90"))
    reason = judge(request("gfx942")).reason
    assert reason.startswith("the installed triton has no backend 'amd' for gfx942; it has nvidia.")
    assert judge(request("gfx942", INTERPRETER))
    assert judge(request("xe2")), "the platform says that it has a backend"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("dim", ["out_dtype", "cache_dtype"])
@pytest.mark.parametrize(
    ("architecture", "dtype", "accepted"),
    [
        ("sm_80", "float8_e4m3fn", False),
        ("sm_86", "float8_e4m3fn", False),
        ("sm_89", "float8_e4m3fn", True),
        ("sm_90a", "float8_e4m3fn", True),
        ("sm_100", "float8_e4m3fn", True),
        ("sm_80", "float8_e5m2", True),
        ("sm_90", "float8_e4m3fnuz", False),
        ("gfx950", "float8_e5m2fnuz", False),
        ("gfx942", "float8_e4m3fnuz", True),
        ("gfx942", "float8_e4m3fn", True),
        ("gfx1100", "float8_e4m3fn", True),
    ],
)
def test_8_bit_floats_are_accepted_where_triton_converts_to_them(
    architecture: str, dtype: str, accepted: bool, dim: str, package: Path
) -> None:
    (package / "backends/amd").mkdir()
    (package / "backends/amd/compiler.py").touch()
    verdict = judge_fp8(request(architecture, **{dim: dtype}))
    assert verdict.accepted == accepted
    assert accepted or (dtype in verdict.reason and architecture in verdict.reason)


@pytest.mark.landing(49)
@pytest.mark.parametrize("record", KERNELS, ids=lambda record: record.name)
def test_a_processor_is_refused_with_a_reason(record: Kernel) -> None:
    cpu_request = Request(
        "kernel", record.op, "cpu", place().device.capability, record.requires.dtypes[0]
    )
    verdict = acceptance_of(record)(cpu_request)
    assert verdict.reason == "needs triton, which the device lacks"


@pytest.mark.landing(48)
@pytest.mark.parametrize("record", KERNELS, ids=lambda record: record.name)
def test_a_record_names_an_op_and_a_function_that_is_there(record: Kernel) -> None:
    assert record.op in current_registry().ops
    module, _, function = record.target.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"def {function}(" in Path(spec.origin).read_text(encoding="utf-8")
