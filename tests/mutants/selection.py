"""A pytest plugin that runs the tests of a list alone, in its order.

``MUTANTS_TESTS`` names a file with one test's id per line.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = Path(os.environ["MUTANTS_TESTS"]).read_text(encoding="utf-8").splitlines()
    order = {nodeid: place for place, nodeid in enumerate(wanted)}
    items[:] = sorted(
        (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
    )
