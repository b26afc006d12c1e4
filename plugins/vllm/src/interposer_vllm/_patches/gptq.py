"""The patch for GPTQ checkpoints that vLLM refuses but interposer has kernels for."""

from __future__ import annotations

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._patch import Patch

__all__ = ["PATCH"]

_QUANTIZATION = "vllm.model_executor.layers.quantization"
_GPTQ = f"{_QUANTIZATION}.auto_gptq"


def _apply() -> Verdict:
    from vllm.model_executor.layers.quantization import (
        get_quantization_config,
        register_quantization_config,
    )
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.platforms import current_platform

    from interposer_vllm._gptq import GPTQConfig

    # vLLM maps checkpoints of the method ``gptq`` to this name.
    name = AutoGPTQConfig.get_name()
    registered = get_quantization_config(name)
    if registered is not AutoGPTQConfig:
        return Verdict.refuse(f"another plugin has replaced it by {registered.__qualname__}")
    # On other devices vLLM's own configuration stays in use.
    if current_platform.is_cpu():
        register_quantization_config(name)(GPTQConfig)
    return Verdict.accept()


PATCH = Patch(
    name="gptq",
    members=(
        HostMember(f"{_QUANTIZATION}:register_quantization_config", "(quantization)"),
        HostMember(f"{_QUANTIZATION}:get_quantization_config", "(quantization)"),
        HostMember(
            f"{_GPTQ}:AutoGPTQConfig.__init__",
            "(self, weight_bits, group_size, desc_act, is_sym, lm_head_quantized, dynamic, "
            "full_config, modules_in_block_to_quantize=None)",
        ),
        HostMember(f"{_GPTQ}:AutoGPTQConfig.get_name", "()"),
        HostMember(f"{_GPTQ}:AutoGPTQConfig.get_quant_method", "(self, layer, prefix)"),
        HostMember(f"{_GPTQ}:AutoGPTQLinearMethod.__init__", "(self, quant_config)"),
        HostMember(f"{_GPTQ}:AutoGPTQLinearMethod.process_weights_after_loading", "(self, layer)"),
        HostMember(
            f"{_QUANTIZATION}.utils.gptq_utils:get_linear_quant_method",
            "(config, layer, prefix, linear_method_cls)",
        ),
    ),
    apply=_apply,
    scope="Refusals of GPTQ checkpoints",
)
