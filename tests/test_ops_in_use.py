"""Every standard op is bound by something, or the page of ops in use says what it waits for."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def tool() -> dict[str, object]:
    return runpy.run_path(str(DOCS / "_ops_in_use.py"))


@pytest.fixture(scope="module")
def uses(tool: dict[str, object]) -> dict[str, set[str]]:
    return tool["uses"]()  # type: ignore[operator, no-any-return]


def test_the_page_lists_what_binds_each_op(
    tool: dict[str, object], uses: dict[str, set[str]]
) -> None:
    assert tool["faults"](uses) == []  # type: ignore[operator]
    page = tool["page"](uses)  # type: ignore[operator]
    assert all(page.count(f"`{name}`") == 1 for name in uses)
    assert uses["linear"] >= {"interposer_ops.layers.linear"}


def test_an_op_that_nothing_binds_is_told(
    tool: dict[str, object], uses: dict[str, set[str]]
) -> None:
    assert tool["faults"]({**uses, "linear": set()}) == [  # type: ignore[operator]
        "linear is bound by nothing: bind it, or delete it"
    ]
