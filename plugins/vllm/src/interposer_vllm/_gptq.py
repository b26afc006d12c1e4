"""GPTQ checkpoints as vLLM loads them, and those besides that it has no kernel for on CPUs.

vLLM 0.32 refuses zero points, groups of other sizes than its own and, on CPUs, 8 bits before a
layer is built.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.scalar_type import scalar_types

from interposer_vllm._unserved import unserved

__all__ = ["AutoGPTQLinearMethod", "GPTQConfig"]


class GPTQConfig(auto_gptq.AutoGPTQConfig):  # type: ignore[misc]
    """vLLM's own, which takes zero points as well."""

    TYPE_MAP: ClassVar = {
        **auto_gptq.AutoGPTQConfig.TYPE_MAP,
        (4, False): scalar_types.uint4,
        (8, False): scalar_types.uint8,
    }

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method below for linear layers and heads that are quantized."""
        if isinstance(layer, LinearBase | ParallelLMHead):
            return get_linear_quant_method(self, layer, prefix, AutoGPTQLinearMethod)
        return super().get_quant_method(layer, prefix)


# Under the name of vLLM's own, by which it looks up how a layer is loaded.
class AutoGPTQLinearMethod(auto_gptq.AutoGPTQLinearMethod):  # type: ignore[misc]
    """vLLM's own, but that what it refuses is refused once a layer is not taken over.

    Attributes:
        refusal: why vLLM cannot multiply by such weights; None where it can.
    """

    def __init__(self, quant_config: GPTQConfig) -> None:
        self.refusal: str | None = None
        try:
            super().__init__(quant_config)
        except ValueError as error:
            self.refusal = str(error)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights for vLLM's own kernel.

        Raises: ValueError: it has none.
        """
        if self.refusal is not None:
            raise unserved(layer, f"this checkpoint of GPTQ ({self.refusal})")
        super().process_weights_after_loading(layer)
