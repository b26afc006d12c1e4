"""Support of GPTQ checkpoints for which vLLM has no CPU kernel.

Before building a layer, vLLM 0.32 refuses checkpoints with zero points, with group sizes that its
kernels lack and, on CPUs, with 8 bits.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.scalar_type import scalar_types

from interposer_vllm._missing_kernel import missing_kernel_error

__all__ = ["AutoGPTQLinearMethod", "GPTQConfig"]


class GPTQConfig(auto_gptq.AutoGPTQConfig):  # type: ignore[misc]
    """vLLM's configuration of GPTQ, extended to zero points."""

    TYPE_MAP: ClassVar = {
        **auto_gptq.AutoGPTQConfig.TYPE_MAP,
        (4, False): scalar_types.uint4,
        (8, False): scalar_types.uint8,
    }

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return ``AutoGPTQLinearMethod`` for quantized linear layers and heads."""
        if isinstance(layer, LinearBase | ParallelLMHead):
            return get_linear_quant_method(self, layer, prefix, AutoGPTQLinearMethod)
        return super().get_quant_method(layer, prefix)


# vLLM decides by the name of this class how it loads a layer, so the name must be that of vLLM's.
class AutoGPTQLinearMethod(auto_gptq.AutoGPTQLinearMethod):  # type: ignore[misc]
    """vLLM's GPTQ method, which raises vLLM's refusal only if interposer refuses the layer too.

    Attributes:
        refusal: the reason why vLLM cannot compute with such weights; None if vLLM can.
    """

    def __init__(self, quant_config: GPTQConfig) -> None:
        self.refusal: str | None = None
        try:
            super().__init__(quant_config)
        except ValueError as error:
            self.refusal = str(error)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights for vLLM's own kernel.

        Raises: ValueError: vLLM has no such kernel.
        """
        if self.refusal is not None:
            raise missing_kernel_error(layer, f"this checkpoint of GPTQ ({self.refusal})")
        super().process_weights_after_loading(layer)
