"""A plugin checks the members of its host when it starts; a refusal names the difference."""

from __future__ import annotations

import pytest

from interposer.tooling import HostMember


def annotated(x: int, *, y: str | None = None) -> int:
    return x


def test_annotations_are_not_compared() -> None:
    assert HostMember(f"{__name__}:annotated", "(x, *, y=None)").check()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("textwrap:indent", "takes (text, prefix, predicate=None), not (text)"),
        ("textwrap:outdent", "textwrap:outdent is missing"),
        ("textwrapping:indent", "textwrapping:indent is missing"),
        ("textwrap:TextWrapper.wrap", "takes (self, text), not (text)"),
    ],
)
def test_a_different_member_is_refused(target: str, reason: str) -> None:
    assert reason in HostMember(target, "(text)").check().reason
