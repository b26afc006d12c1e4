"""Fixtures that install stand-in packages and make them importable."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from platforms.cuda.tests.fake_packages import HERE, IMPORTED, MODULES, VERSIONS
from platforms.cuda.tests.wheels import install, wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    # Modules without a text are files that lie beside this one.
    texts = {
        name: {m: code or (HERE / f"{m}.py").read_text("utf-8") for m, code in modules.items()}
        for name, modules in MODULES.items()
    }
    made = [wheel(folder, name, VERSIONS[name], modules) for name, modules in texts.items()]
    return install(folder, *made)


@pytest.fixture
def packages(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(installed)
    importlib.invalidate_caches()
    yield
    for name in IMPORTED:
        sys.modules.pop(name, None)
