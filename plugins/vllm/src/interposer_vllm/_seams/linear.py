"""Linear layers: out-of-tree classes in the place of vLLM's, which are built by name."""

from __future__ import annotations

from interposer import Verdict
from interposer_vllm._seam import Member, Seam

__all__ = ["SEAM"]

_LINEAR = "vllm.model_executor.layers.linear"


def _take() -> Verdict:
    return Verdict.refuse("is being built")


SEAM = Seam(
    name="linear",
    members=(
        Member(f"{_LINEAR}:UnquantizedLinearMethod.apply", "(self, layer, x, bias=None)"),
        Member(f"{_LINEAR}:UnquantizedLinearMethod.process_weights_after_loading", "(self, layer)"),
    ),
    take=_take,
    stays="Linear layers",
)
