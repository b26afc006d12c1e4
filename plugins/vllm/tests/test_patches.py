"""Patches are checked before they are applied, once; a refusal says what keeps running in vLLM."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._patch import Patch
from interposer_vllm._patches import PATCHES
from interposer_vllm._patching import apply_patches
from interposer_vllm.register import register

HERE = "textwrap"


def patch(applied: list[str], expected: str = "(text, prefix, predicate=None)") -> Patch:
    def apply() -> Verdict:
        applied.append("patch")
        return Verdict.accept()

    member = HostMember(f"{HERE}:indent", expected)
    return Patch(name="indent", members=(member,), apply=apply, scope="Indents")


def test_a_patch_with_expected_members_is_applied_once() -> None:
    applied: list[str] = []
    verdicts: dict[str, Verdict] = {}
    for _ in range(3):
        apply_patches([patch(applied)], "0.32.0", verdicts)
    assert applied == ["patch"]
    assert verdicts == {"indent": Verdict.accept()}


@pytest.mark.parametrize(
    ("target", "expected", "reason"),
    [
        ("textwrap:indent", "(text)", "takes (text, prefix, predicate=None), not (text)"),
        ("textwrap:outdent", "(text)", "textwrap:outdent is missing"),
        ("textwrapping:indent", "(text)", "textwrapping:indent is missing"),
        ("textwrap:TextWrapper.wrap", "(self)", "takes (self, text), not (self)"),
    ],
)
def test_a_patch_with_other_members_is_refused_and_logged_once(
    target: str, expected: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    moved = Patch(
        name="moved", members=(HostMember(target, expected),), apply=Verdict.accept, scope="Texts"
    )
    verdicts: dict[str, Verdict] = {}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            apply_patches([moved], "0.32.5", verdicts)
    assert not verdicts["moved"]
    (record,) = caplog.records
    for part in ("'moved'", "0.32.5", reason, "Texts stay vLLM's own"):
        assert part in record.getMessage()


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_an_undeclared_version_is_refused(version: str) -> None:
    applied: list[str] = []
    verdicts: dict[str, Verdict] = {}
    apply_patches([patch(applied)], version, verdicts)
    assert not applied
    assert "declares vLLM" in verdicts["indent"].reason


def test_an_error_refuses_one_patch_alone() -> None:
    def broken() -> Verdict:
        raise RuntimeError("no such registry")

    applied: list[str] = []
    verdicts: dict[str, Verdict] = {}
    other = Patch(name="broken", members=(), apply=broken, scope="Others")
    apply_patches([other, patch(applied)], "0.32.0", verdicts)
    assert "no such registry" in verdicts["broken"].reason
    assert applied == ["patch"]


def test_every_patch_has_a_scope_and_members() -> None:
    names = [patch.name for patch in PATCHES]
    assert len(set(names)) == len(names)
    for patch in PATCHES:
        assert patch.scope
        assert patch.members


def test_without_vllm_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        register()
    assert "nothing is taken over" in caplog.text


def test_a_patch_is_refused_without_the_patch_that_it_needs() -> None:
    applied: list[str] = []
    needed = Patch(
        name="needed",
        members=(HostMember(f"{HERE}:outdent", "()"),),
        apply=Verdict.accept,
        scope="Rest",
    )
    needy = replace(patch(applied), needs=("needed",))
    verdicts: dict[str, Verdict] = {}
    apply_patches([needed, needy], "0.32.0", verdicts)
    assert verdicts["indent"].reason == "it needs the patch 'needed'"
    apply_patches([replace(needy, name="after")], "0.32.0", {"needed": Verdict.accept()})
    assert applied == ["patch"]
