"""The records of this distribution, which name its code by import string and import none of it."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Kernel, LayerEntry, Record
from interposer.requires import Requires

INTERPOSER_API = ">=1.0,<2"

_REQUIRES = Requires(dtypes=("float32", "bfloat16"))
_SCORE = 20.0


@hookimpl
def interposer_records() -> list[Record]:
    """Return two kernels and one layer, which run on any platform."""
    kernels = [
        Kernel(
            op=op,
            name=f"{op}_example",
            target=f"interposer_example_norm._kernels:{op}",
            requires=_REQUIRES,
            score=_SCORE,
            properties=frozenset({"deterministic", "graph_safe", "traceable"}),
        )
        for op in ("rms_norm", "fused_add_rms_norm")
    ]
    layer = LayerEntry(
        layer_id="rms_norm",
        name="example_norm",
        target="interposer_example_norm._layers:ExampleNorm",
        requires=_REQUIRES,
        score=_SCORE,
        # Its code runs when the model is printed; a step runs that of the standard layer.
        properties=frozenset({"graph_safe"}),
    )
    return [*kernels, layer]
