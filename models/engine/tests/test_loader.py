"""The settings of a model, checked before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from interposer import Config, explain, place
from interposer_engine._plan import Plan
from interposer_engine._planning import plan


def kernels(planned: Plan, op: str) -> set[tuple[str, str]]:
    """Return name and reason of the kernels that were chosen for an op."""
    choices = (row.choice for row in explain(planned).rows)
    return {
        (choice.chosen.name, choice.why)
        for choice in choices
        if (choice.request.kind, choice.request.name) == ("kernel", op)
    }


def test_the_platform_is_the_first_choice_that_is_explained(llama: Path) -> None:
    first = explain(plan(llama)).rows[0].choice
    assert first.request.kind == "platform"
    assert first.chosen.name == place().device.platform


def test_a_platforms_default_kernels_hold_unless_the_user_decides(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {"linear": "reference", "embedding": "reference"}
    monkeypatch.setattr(type(place().platform), "default_kernels", lambda self: defaults)
    user = Config(kernels={"embedding": "embedding_index_select"})
    planned = plan(llama, config=user)
    assert kernels(planned, "linear") == {("reference", "preferred by the platform")}
    pinned = ("embedding_index_select", "pinned by the configuration")
    assert kernels(planned, "embedding") == {pinned}
