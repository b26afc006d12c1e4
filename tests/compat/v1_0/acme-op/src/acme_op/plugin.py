"""An op of its own with everything that belongs to it."""

from __future__ import annotations

from interposer import Dim, Kernel, LayerEntry, OpEntry, Requires, hookimpl
from interposer.records import Record

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[Record]:
    """Return op, kernel and layer."""
    return [
        OpEntry(
            name="acme_shift",
            target="acme_op.shift:acme_shift",
            properties=frozenset({"deterministic", "batch_invariant"}),
        ),
        Kernel(
            op="acme_shift",
            name="acme_shift_roll",
            target="acme_op.kernels:shift",
            requires=Requires(dtypes=("float32",), dims={"size": Dim(one_of=(8, 16))}),
            score=5.0,
        ),
        LayerEntry("acme_shift", "standard", "acme_op.layers:Shift", score=0.0),
    ]
