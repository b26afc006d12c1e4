"""A verdict is a yes, or a no with its reason."""

from __future__ import annotations

import dataclasses

import pytest

from interposer import Refusal, Verdict


def test_accepted_is_true_and_refused_is_false() -> None:
    assert Verdict.accept()
    assert Verdict.accept("because").reason == "because"
    assert not Verdict.refuse("because")


@pytest.mark.parametrize("reason", ["", None])
def test_a_refusal_needs_a_reason(reason: str) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Verdict.refuse(reason)


def test_a_verdict_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Verdict.refuse("no").accepted = True  # type: ignore[misc]


def test_a_refusal_names_candidate_provider_and_reason_but_prints_no_traceback() -> None:
    refusal = Refusal("fast", "acme 1.2", "needs avx2", "Traceback (most recent call last)")
    assert str(refusal) == "fast (acme 1.2): needs avx2"
    assert "Traceback" not in repr(refusal)
    assert refusal.traceback.startswith("Traceback")
