"""Every standard op is bound by something, or the page of ops in use says what it waits for."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[1] / "docs" / "_ops_in_use.py"


def test_every_op_is_bound_by_something() -> None:
    tool = runpy.run_path(str(TOOL))
    uses = tool["uses"]()
    assert tool["faults"](uses) == []
    assert uses["linear"] >= {"interposer_ops.layers.linear"}
    assert len(tool["faults"]({**uses, "linear": set()})) == 1
