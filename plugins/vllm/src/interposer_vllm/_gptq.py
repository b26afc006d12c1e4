"""GPTQ checkpoints as vLLM loads them, and those besides that it has no kernel for on CPUs.

vLLM 0.32 refuses zero points, groups of other sizes than its own, groups in any order and, on
CPUs, 8 bits before a layer is built.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import RowvLLMParameter
from vllm.scalar_type import scalar_types

from interposer_vllm._stored_weights import parts_of
from interposer_vllm._unserved import unserved

__all__ = ["AutoGPTQLinearMethod", "GPTQConfig"]


class GPTQConfig(auto_gptq.AutoGPTQConfig):  # type: ignore[misc]
    """vLLM's own, which takes zero points and any order of groups as well.

    Attributes:
        is_reordered: ``g_idx`` says to which group an input belongs.
    """

    TYPE_MAP: ClassVar = {
        **auto_gptq.AutoGPTQConfig.TYPE_MAP,
        (4, False): scalar_types.uint4,
        (8, False): scalar_types.uint8,
    }

    def __init__(
        self, weight_bits: int, group_size: int, desc_act: bool, *others: Any, **named: Any
    ) -> None:
        # A group of all inputs has no order, which vLLM knows.
        self.is_reordered = desc_act and group_size != -1
        rest = desc_act and not self.is_reordered
        super().__init__(weight_bits, group_size, rest, *others, **named)

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
        if quant_config.is_reordered:
            self.refusal = "vLLM keeps no order of inputs (desc_act)"

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``g_idx`` besides, where groups have an order."""
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        if not self.quant_config.is_reordered:
            return
        fused = self.quant_config.packed_modules_mapping
        num_parts = len(parts_of(layer.prefix, output_partition_sizes, fused))
        # vLLM asks for its own class where the checkpoint has fused the layers itself.
        of = RowvLLMParameter if num_parts == 1 else _Groups
        groups = of(
            data=torch.empty(num_parts * input_size_per_partition, dtype=torch.int32),
            input_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("g_idx", groups)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights for vLLM's own kernel.

        Raises: ValueError: it has none.
        """
        if self.refusal is not None:
            raise unserved(layer, f"this checkpoint of GPTQ ({self.refusal})")
        super().process_weights_after_loading(layer)


class _Groups(RowvLLMParameter):  # type: ignore[misc]
    """The group of each input, ``[I]`` for each of the fused layers, one after the other."""

    def load_merged_column_weight(self, loaded_weight: Tensor, **facts: Any) -> None:
        """Load that of one layer."""
        part = self._shard_id_as_int(facts["shard_id"])
        self.data.view(-1, len(loaded_weight))[part].copy_(loaded_weight)

    load_qkv_weight = load_merged_column_weight
