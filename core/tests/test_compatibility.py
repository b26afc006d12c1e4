"""Versions are negotiated with what is really installed; a mismatch is refused with both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import importlib_metadata
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import interposer
from interposer._validation.compatibility import API_VERSION, check_api, check_requirements
from interposer._validation.distribution import Distribution, read_distribution

TORCH = importlib_metadata.version("torch")
CORE = importlib_metadata.version("interposer")

Install = Callable[..., Distribution]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return an installer: a name, a version and requirements, found before anything else."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def write(name: str, version: str, *requires: str) -> Distribution:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = "".join(f"Requires-Dist: {text}\n" for text in requires)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n{lines}")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n")
        return read_distribution(importlib_metadata.Distribution.at(str(info)))

    return write


def module(**members: object) -> ModuleType:
    module = ModuleType("acme.plugin")
    vars(module).update(members)
    return module


def test_the_api_version_is_public() -> None:
    assert interposer.API_VERSION == API_VERSION
    assert Version(API_VERSION).release[:1] == (1,)


@pytest.mark.parametrize(
    "requirement",
    [
        "interposer",
        "Interposer>=0.1,<99",
        "torch>=2",
        "torch (>=2)",
        f"torch=={TORCH}",
        f"torch=={Version(TORCH).public}",
        f"torch<={Version(TORCH).public}",
        "torch @ https://acme.example/torch.whl",
        "interposer-nonsense; extra == 'fast'",
        "interposer-nonsense; python_version < '3'",
        "torch>=99; sys_platform == 'nowhere'",
        "numpy>=99",
        "interposerlike>=99",
        "torchvision>=99",
    ],
)
def test_satisfied_and_inapplicable_requirements_are_accepted(
    requirement: str, install: Install
) -> None:
    assert check_requirements(install("acme", "1.0", requirement))


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("interposer>=99", f"it requires interposer>=99, installed is {CORE}"),
        ("interposer-ops==0.0.1", "it requires interposer-ops==0.0.1, installed is "),
        ("Interposer_Ops==0.0.1", "it requires Interposer_Ops==0.0.1, installed is "),
        ("torch<2", f"it requires torch<2, installed is {TORCH}"),
        (f"torch!={Version(TORCH).public}", f"installed is {TORCH}"),
        ("torch>=2; python_version > '3'", ""),
        ("torch>=99; python_version > '3'", "it requires torch>=99"),
        ("interposer-nonsense", "it requires interposer-nonsense, which is not installed"),
        ("interposer-nonsense>=1", "it requires interposer-nonsense>=1, which is not installed"),
        ("interposer>=", "requires 'interposer>=', which cannot be understood"),
        ("torch>=2; nonsense > '3'", "which cannot be understood"),
        ("!!!", "requires '!!!', which cannot be understood"),
        ("☃", "requires '☃', which cannot be understood"),
    ],
)
def test_a_missing_requirement_is_refused(requirement: str, reason: str, install: Install) -> None:
    verdict = check_requirements(install("acme", "1.0", "pluggy", requirement))
    assert verdict.accepted is not bool(reason)
    assert reason in verdict.reason


def test_unusable_metadata_is_refused(install: Install) -> None:
    verdict = check_requirements(install("acme", "newest"))
    assert verdict.reason == "its metadata states the version 'newest'"


def test_a_distribution_installed_later_is_found(install: Install) -> None:
    plugin = install("acme", "1.0", "interposer-later>=2.0.dev1")
    assert "not installed" in check_requirements(plugin).reason
    install("interposer-later", "2.0.dev3")
    assert check_requirements(plugin)


def test_every_part_of_this_installation_fits() -> None:
    for metadata in importlib_metadata.distributions():
        assert check_requirements(read_distribution(metadata))


@pytest.mark.parametrize("version", ["2.12.0.dev20260101+cpu", "2.12.0a0+gitabc", "2.13.0rc1"])
def test_prereleases_of_torch_are_accepted(version: str, install: Install) -> None:
    install("torch", version)
    assert check_requirements(install("acme", "1.0", "torch>=2.11"))
    assert check_api(module(INTERPOSER_API=">=1", INTERPOSER_TORCH=">=2.11"), in_code=False)
    verdict = check_api(module(INTERPOSER_TORCH=">=2.14"), in_code=True)
    assert verdict.reason == (
        f"it was built for torch >=2.14 (INTERPOSER_TORCH), installed is {version}"
    )


def test_an_unparsable_torch_version_fits_no_range(install: Install) -> None:
    install("torch", "homemade")
    assert check_requirements(install("acme", "1.0", "torch"))
    assert "installed is homemade" in check_requirements(install("b", "1", "torch>=2")).reason


@pytest.mark.parametrize(
    "api", [">=1.0,<2", "~=1.0", "==1.*", ">=1.0.dev1", f"=={API_VERSION}", " >=1 , <2 "]
)
@pytest.mark.parametrize("in_code", [True, False])
def test_a_range_with_this_api_is_accepted(api: str, in_code: bool) -> None:
    assert check_api(module(INTERPOSER_API=api), in_code)
    assert check_api(SimpleNamespace(INTERPOSER_API=api, INTERPOSER_TORCH=">=2"), in_code)


@pytest.mark.parametrize("api", [">=2", "<1", "==1.1", ">1.0", "!=1.0", ">=1.0,<1.0"])
@pytest.mark.parametrize("in_code", [True, False])
def test_another_range_is_refused_with_both(api: str, in_code: bool) -> None:
    verdict = check_api(module(INTERPOSER_API=api), in_code)
    assert verdict.reason == (
        f"it was built for the plugin API {api} (INTERPOSER_API), installed is {API_VERSION}"
    )


def test_an_installed_plugin_must_state_its_api_and_one_in_code_need_not() -> None:
    verdict = check_api(module(), in_code=False)
    assert 'add the line INTERPOSER_API = ">=1.0,<2"' in verdict.reason
    assert check_api(module(), in_code=True)


class Loud(str):
    """A text that prints when it is printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise SystemExit("code of the plugin")


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        (1, "is of type int"),
        (1.0, "is of type float"),
        (b">=1", "is of type bytes"),
        ((">=1", "<2"), "is of type tuple"),
        (SpecifierSet(">=1"), "is of type SpecifierSet"),
        (Loud(">=1"), "is of type Loud"),
        ("", "is ''"),
        (" ", "is ' '"),
        ("1.0", "is '1.0'"),
        (">=one", "is '>=one'"),
        (">=" + "1" * 1000, ""),
        ("x" * 1000, "is 'xxx"),
    ],
)
@pytest.mark.parametrize("label", ["INTERPOSER_API", "INTERPOSER_TORCH"])
def test_an_invalid_range_is_refused(stated: object, found: str, label: str) -> None:
    verdict = check_api(module(**{"INTERPOSER_API": ">=1", label: stated}), in_code=True)
    assert not verdict
    if found:
        assert f"its {label} {found}" in verdict.reason
        assert 'must be a range of versions such as ">=1.0,<2"' in verdict.reason
        assert len(verdict.reason) < 250


def test_reading_the_range_may_run_code_that_raises() -> None:
    class Plugin:
        @property
        def INTERPOSER_API(self) -> str:
            sys.exit("not today")

    verdict = check_api(Plugin(), in_code=False)
    assert "raised SystemExit('not today')" in verdict.reason
    assert "sys.exit" in verdict.traceback


@given(st.text())
def test_no_requirement_text_raises(text: str) -> None:
    check_api(module(INTERPOSER_API=text), in_code=False)
    dist = Distribution("acme", "1.0", "", (text, f"torch{text}", f"interposer {text}"), "", False)
    check_requirements(dist)
