"""One layer that replaces another."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import LayerEntry
from interposer.requires import Requires

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> tuple[LayerEntry, ...]:
    """Return the layer."""
    return (
        LayerEntry(
            layer_id="rms_norm",
            name="acme_norm",
            target="acme_layer.layers:AcmeNorm",
            requires=Requires(dtypes=("float32",)),
            score=1.0,
        ),
    )
