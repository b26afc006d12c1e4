"""Seams are checked before they are taken, once, and a refusal names all that one needs to know."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from interposer import Verdict
from interposer_vllm._seam import Member, Seam, parameters
from interposer_vllm._seams import SEAMS
from interposer_vllm._taking import take_seams
from interposer_vllm.register import register

HERE = "textwrap"


def seam(taken: list[str], expected: str = "(text, prefix, predicate=None)") -> Seam:
    def take() -> Verdict:
        taken.append("seam")
        return Verdict.accept()

    member = Member(f"{HERE}:indent", expected)
    return Seam(name="indent", members=(member,), take=take, stays="Indents")


def test_a_seam_that_is_where_it_was_is_taken_once() -> None:
    taken: list[str] = []
    verdicts: dict[str, Verdict] = {}
    for _ in range(3):
        take_seams([seam(taken)], "0.32.0", verdicts)
    assert taken == ["seam"]
    assert verdicts == {"indent": Verdict.accept()}


@pytest.mark.parametrize(
    ("target", "expected", "reason"),
    [
        ("textwrap:indent", "(text)", "takes (text, prefix, predicate=None), not (text)"),
        ("textwrap:outdent", "(text)", "textwrap:outdent is not there"),
        ("textwrapping:indent", "(text)", "textwrapping:indent is not there"),
        ("textwrap:TextWrapper.wrap", "(self)", "takes (self, text), not (self)"),
    ],
)
def test_a_seam_that_moved_is_refused_and_what_stays_is_said_once(
    target: str, expected: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    moved = Seam(
        name="moved", members=(Member(target, expected),), take=Verdict.accept, stays="Texts"
    )
    verdicts: dict[str, Verdict] = {}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            take_seams([moved], "0.32.5", verdicts)
    assert not verdicts["moved"]
    (record,) = caplog.records
    for part in ("'moved'", "0.32.5", reason, "Texts stay vLLM's own"):
        assert part in record.getMessage()


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_a_version_that_is_not_declared_is_refused(version: str) -> None:
    taken: list[str] = []
    verdicts: dict[str, Verdict] = {}
    take_seams([seam(taken)], version, verdicts)
    assert not taken
    assert "declares vLLM" in verdicts["indent"].reason


def test_what_raises_costs_the_seam_alone() -> None:
    def broken() -> Verdict:
        raise RuntimeError("no such registry")

    taken: list[str] = []
    verdicts: dict[str, Verdict] = {}
    other = Seam(name="broken", members=(), take=broken, stays="Others")
    take_seams([other, seam(taken)], "0.32.0", verdicts)
    assert "no such registry" in verdicts["broken"].reason
    assert taken == ["seam"]


def test_annotations_are_no_part_of_a_signature() -> None:
    def annotated(x: int, *, y: str | None = None) -> int:
        return x

    assert parameters(annotated) == "(x, *, y=None)"


def test_every_seam_says_what_stays() -> None:
    names = [one.name for one in SEAMS]
    assert len(set(names)) == len(names)
    for one in SEAMS:
        assert one.stays
        assert one.members


def test_without_vllm_nothing_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        register()
    assert "nothing is taken over" in caplog.text


def test_a_seam_is_refused_without_the_one_that_it_needs() -> None:
    taken: list[str] = []
    needed = Seam(
        name="needed", members=(Member(f"{HERE}:outdent", "()"),), take=Verdict.accept, stays="Rest"
    )
    needy = replace(seam(taken), needs=("needed",))
    verdicts: dict[str, Verdict] = {}
    take_seams([needed, needy], "0.32.0", verdicts)
    assert verdicts["indent"].reason == "it needs the seam 'needed'"
    take_seams([replace(needy, name="after")], "0.32.0", {"needed": Verdict.accept()})
    assert taken == ["seam"]
