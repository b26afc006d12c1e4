"""Wheels of the CPU platform for other architectures, built by the recipe that users are given."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["recipe", "wheel_for"]

RECIPE = Path(__file__).parents[1] / "platforms" / "cpu" / "manylinux.py"


def recipe() -> ModuleType:
    """Return the program that builds wheels, as a module."""
    if (known := sys.modules.get("manylinux")) is not None:
        return known
    spec = importlib.util.spec_from_file_location("manylinux", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["manylinux"] = module
    return module


def wheel_for(architecture: str, request: pytest.FixtureRequest) -> Path:
    """Return a wheel of the sources as they are, or skip the test with what is needed for it."""
    module = recipe()
    try:
        module.require(architecture)
    except module.WheelError as error:
        pytest.skip(f"needs what builds a wheel: {error}")
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("wheels"))
    wheel: Path = module.build(architecture, folder / "dist", folder)
    return wheel
