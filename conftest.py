"""Settings of all tests."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline per example fails on a busy machine, and says nothing about the code.
settings.register_profile("unhurried", settings.get_profile("default"), deadline=None)
if settings.get_current_profile_name() == "default":  # in CI, its own profile has none either
    settings.load_profile("unhurried")

# The user's own verdicts and measurements stay out of the tests, and the other way round. Kept from
# one run to the next, so that examining what is installed does not cost every run its seconds.
_CACHE = (
    Path(__file__).parent
    / ".pytest_cache"
    / f"interposer-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
)
os.environ["INTERPOSER_CACHE_DIR"] = str(_CACHE)

# Verdicts on what is installed are the same for all workers.
_VERDICTS = _CACHE.with_name("interposer-verdicts")
_VERDICTS.mkdir(parents=True, exist_ok=True)
_CACHE.mkdir(exist_ok=True)
with contextlib.suppress(FileExistsError):
    (_CACHE / "verdicts").symlink_to(_VERDICTS)


@pytest.fixture(autouse=True)
def _nothing_measured() -> None:
    """Start without measurements, which change what is chosen."""
    shutil.rmtree(_CACHE / "measurements", ignore_errors=True)
