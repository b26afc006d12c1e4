"""Adapted models with every version of transformers that is tested, beside the installed one.

Each version is installed into a folder of its own, 11 MB without what it requires. Only
``make test-transformers`` runs these tests.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
# The last before and the first after the cache argument of all forwards was renamed.
VERSIONS = ("5.23", "5.24")
TESTS = [
    ROOT / "models" / "adapt" / "tests" / f"test_adapt_{name}.py"
    for name in ("attention", "blocks", "merged", "paging")
]


def _requirement(folder: str, name: str) -> Requirement:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["dependencies"])
    return next(requirement for requirement in requirements if requirement.name == name)


def test_the_declared_range_ends_with_the_newest_tested_version() -> None:
    specifier = _requirement("models/adapt", "transformers").specifier
    declared = [Version(f"5.{minor}") for minor in range(100) if f"5.{minor}.0" in specifier]
    assert declared[-1] == Version(VERSIONS[-1])
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = next(pin for pin in pins if pin.startswith("transformers=="))
    assert pinned.partition("==")[2].rpartition(".")[0] in VERSIONS


@pytest.mark.versions
@pytest.mark.parametrize("version", VERSIONS)
def test_adapted_models_run_with_each_version(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(tmp_path), f"transformers=={version}.*"], check=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = f"import transformers as t; assert t.__version__.startswith('{version}.')"
    subprocess.run([sys.executable, "-c", code], check=True)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not process"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *TESTS], cwd=ROOT, check=True)
