"""One attention backend, judged by a predicate."""

from __future__ import annotations

from interposer import AttentionEntry, Dim, Requires, hookimpl

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[AttentionEntry]:
    """Return the backend."""
    return [
        AttentionEntry(
            name="rows",
            target="acme_attention.backend:RowsBackend",
            requires=Requires(dtypes=("float32",), dims={"head_size": Dim(multiple_of=8)}),
            predicate="acme_attention.judges:judge",
            score=1.0,
            properties=frozenset({"deterministic"}),
        )
    ]
