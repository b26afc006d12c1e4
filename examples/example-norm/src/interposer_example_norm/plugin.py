"""The records that this plugin declares.

Each record names its code by import string, so that discovery imports neither torch nor the
kernels. The code of a record is imported when that record is chosen.
"""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import Kernel, LayerEntry, Record
from interposer.requires import Requires

# The versions of the plugin API that these records are written for.
INTERPOSER_API = ">=1.0,<2"

_REQUIRES = Requires(dtypes=("float32", "bfloat16"))
# Unless the user pins another, the candidate with the highest score is chosen. The standard layer
# has the score 0.
_SCORE = 20.0


@hookimpl
def interposer_records() -> list[Record]:
    """Declare two kernels and one layer, for every platform."""
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
        # This class adds code to printing only; the forward pass is that of the standard layer.
        properties=frozenset({"graph_safe"}),
    )
    return [*kernels, layer]
