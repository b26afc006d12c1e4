"""A candidate says who provides it."""

from __future__ import annotations

from interposer import Candidate, SchemeEntry
from interposer.judges import accept


def test_names_of_a_candidate() -> None:
    record = SchemeEntry("gptq", "gptq_fast", "acme.schemes:Fast")
    candidate = Candidate("gptq_fast", "acme-kernels", "1.2", 10.0, record, accept)
    assert candidate.qualified_name == "acme-kernels/gptq_fast"
    assert candidate.origin == "acme-kernels 1.2"
