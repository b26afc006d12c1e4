"""A placeholder for the packed-integer kernels that vLLM lacks on CPUs.

vLLM chooses a kernel when building a layer, before interposer can take the layer over. vLLM tries
this placeholder last, after all kernels of vLLM refused, so that the layer is built and loaded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig

from interposer_vllm._session import session

__all__ = ["MissingKernel", "missing_kernel_error"]


class MissingKernel(MPLinearKernel):  # type: ignore[misc]
    """Accepts every layer, and raises if vLLM is to compute the layer after all."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return -1: any device will do."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Accept every layer: a later error states why interposer refused the layer."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Raise, because vLLM calls this only if interposer did not take the layer over.

        Raises: ValueError: always.
        """
        config = self.config
        groups = "" if config.group_size == -1 else f" in groups of {config.group_size}"
        raise missing_kernel_error(layer, f"weights of {config.weight_type}{groups}")

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Raise, because vLLM calls this only if interposer did not take the layer over.

        Raises: ValueError: always.
        """
        raise missing_kernel_error(layer, str(self.config.weight_type))


def missing_kernel_error(layer: Any, weights: str) -> ValueError:
    """Return the error for a layer that neither vLLM nor interposer can compute."""
    reason = session().kept.get(layer.prefix, "its kernel of interposer was taken from it again")
    return ValueError(
        f"{layer.prefix}: vLLM has no kernel for {weights} here, and interposer did not take the "
        f"layer over: {reason}"
    )
