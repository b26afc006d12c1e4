"""Wheels with native code, built as ``make wheels`` builds them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

__all__ = ["recipe", "wheel_for"]

RECIPE = Path(__file__).parents[1] / "platforms" / "wheels.py"


def recipe() -> ModuleType:
    """Return the program that builds wheels, as a module."""
    if (known := sys.modules.get("wheels")) is not None:
        return known
    spec = importlib.util.spec_from_file_location("wheels", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["wheels"] = module
    return module


def wheel_for(
    architecture: str, request: pytest.FixtureRequest, distribution: str = "platforms/cpu"
) -> Path:
    """Build a wheel of the current sources, or skip the test if a compiler is missing."""
    module = recipe()
    try:
        module.require(architecture)
    except module.WheelError as error:
        pytest.skip(f"needs the programs that build a wheel: {error}")
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("wheels"))
    wheel: Path = module.build(distribution, architecture, folder / "dist", folder)
    return wheel
