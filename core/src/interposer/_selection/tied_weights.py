"""Which kernels can look rows of a table up and multiply by it, and hold it once."""

from __future__ import annotations

from collections.abc import Collection

from interposer._contract.choice import Candidate, Choice
from interposer._contract.verdict import Verdict

Form = tuple[str, str]
"""Who provides what holds a table, and the name of the form in which it does."""

_AS_STORED: Form = ("", "")


def form_of(candidate: Candidate) -> Form:
    """Return the form in which a kernel holds its constants.

    Kernels without preparation hold them as they are, whoever provides them; one that prepares and
    names no form has one of its own.
    """
    if not getattr(candidate.record, "prepare", ""):
        return _AS_STORED
    form: str = getattr(candidate.record, "form", "")
    return candidate.provider, form or candidate.name


def judge_product(forms: Collection[Form], lookup: str, candidate: Candidate) -> Verdict:
    """Accept a product whose form of the table is one of ``forms``, those that lookups read."""
    if form_of(candidate) in forms:
        return Verdict.accept()
    return Verdict.refuse(
        f"prepares a copy of the table that no kernel of {lookup!r} reads here, so that it would "
        "be held twice"
    )


def judge_lookup(product: Choice, candidate: Candidate) -> Verdict:
    """Accept a lookup that reads the table in the form in which the chosen product holds it."""
    if form_of(candidate) == form_of(product.chosen):
        return Verdict.accept()
    return Verdict.refuse(
        f"reads another copy of the table than {product.chosen.name} multiplies by, so that it "
        "would be held twice"
    )
