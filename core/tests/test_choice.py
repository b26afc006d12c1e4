"""A candidate says who provides it and what it promises; figures are numbers."""

from __future__ import annotations

import copy
import math

import pytest

from interposer import AttentionEntry, Candidate, Choice, Kernel, OpEntry, Request, SchemeEntry
from interposer._contract.choice import Measured
from interposer._plugins.acceptance import acceptance_of
from interposer.records import Record

SCHEME = SchemeEntry("gptq", "gptq_fast", "acme.schemes:Fast")


def candidate(record: Record) -> Candidate:
    return Candidate(record.name, "acme-kernels", "1.2", 10.0, record, acceptance_of(record))


def test_names_of_a_candidate() -> None:
    scheme_candidate = candidate(SCHEME)
    assert scheme_candidate.qualified_name == "acme-kernels/gptq_fast"
    assert scheme_candidate.origin == "acme-kernels 1.2"


def test_a_copy_of_a_candidate_has_a_record_of_its_own() -> None:
    scheme_candidate = candidate(SCHEME)
    (copied,) = copy.deepcopy([scheme_candidate])
    assert copied == scheme_candidate
    assert copied.judge is scheme_candidate.judge
    object.__setattr__(copied.record, "target", "mine:Scheme")
    assert scheme_candidate.record == SCHEME


@pytest.mark.parametrize(
    "record",
    [
        OpEntry("scale", "acme.ops:scale", frozenset({"deterministic"})),
        Kernel("scale", "scale_fast", "acme:scale", properties=frozenset({"deterministic"})),
        AttentionEntry("paged", "acme:Paged", properties=frozenset({"deterministic"})),
    ],
)
def test_a_candidate_has_the_promises_of_its_record(record: Record) -> None:
    assert candidate(record).properties == {"deterministic"}


def test_a_record_without_properties_promises_nothing() -> None:
    assert candidate(SCHEME).properties == frozenset()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1e-6])
def test_a_measurement_that_is_no_duration_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"acme/fast took \S+ seconds, according to the table 'x'"):
        Measured({"acme/fast": seconds}, "the table 'x'")


def test_a_choice_with_measurements_is_hashable() -> None:
    request = Request("scheme", "gptq")
    chosen = candidate(SCHEME)
    plain = Choice(request, chosen, "the only one accepted", ())
    timed = Choice(request, chosen, "the only one accepted", (), {"acme/x": 1e-6})
    assert hash(plain) == hash(timed)
    assert plain != timed
    assert (plain.seconds, plain.notes) == ({}, ())
