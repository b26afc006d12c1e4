"""A stand-in for the kernel of packed integers that vLLM does not have on CPUs.

vLLM chooses its kernel when it builds a layer, before anybody can say that another one multiplies.
This is chosen last, where all of vLLM's own refuse, so that the layer is built and loaded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig

from interposer_vllm._session import session

__all__ = ["Unserved", "unserved"]


class Unserved(MPLinearKernel):  # type: ignore[misc]
    """Accepts every layer, and raises unless the weights were taken over before."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return that any device will do."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Accept: what is refused is refused with the reason why it was not taken over."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Raise: it is called where the layer stays vLLM's own.

        Raises: ValueError: always.
        """
        config = self.config
        groups = "" if config.group_size == -1 else f" in groups of {config.group_size}"
        raise unserved(layer, f"weights of {config.weight_type}{groups}")

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Raise, as above."""
        raise unserved(layer, str(self.config.weight_type))


def unserved(layer: Any, what: str) -> ValueError:
    """Return the error of a layer that neither side multiplies by."""
    why = session().kept.get(layer.prefix, "its kernel of interposer was taken from it again")
    return ValueError(
        f"{layer.prefix}: vLLM has no kernel for {what} here, and interposer did not take the "
        f"layer over: {why}"
    )
