"""Writes the checkpoints beside this file, which tests read.

It runs where ``nvidia-modelopt`` 0.47 is installed, which the tests do without, for it wants 20
packages besides. No accelerator is needed.
"""

# The library is not there where types are checked.
# mypy: ignore-errors

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from modelopt.torch.quantization import tensor_quant
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent
NUM_TOKENS = 3


def quantize_block(
    inputs: torch.Tensor, block_size: int, amax: torch.Tensor | None, num_bits: int, *_: int
) -> torch.Tensor:
    """Return what the library's CUDA kernels return, from its own tensor classes."""
    if num_bits == 8:
        quantized, scales = MXFP8QTensor.quantize(inputs)
        return quantized.dequantize(inputs.dtype, scale=scales)
    assert amax is not None
    double_scale = amax.float() / (6 * 448)
    quantized, scales, _ = NVFP4QTensor.quantize(
        inputs.clone(), block_size, weights_scaling_factor_2=double_scale
    )
    return quantized.dequantize(
        inputs.dtype, scale=scales, double_scale=double_scale, block_sizes={-1: block_size}
    )


def mixed() -> dict[str, Any]:
    """Return 8-bit floats for attention and NVFP4 for the rest, as rules of the library."""
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    config["quant_cfg"] += [
        {"quantizer_name": f"*self_attn*{kind}_quantizer", "cfg": {"num_bits": (4, 3)}}
        for kind in ("weight", "input")
    ]
    return config


def with_cache() -> dict[str, Any]:
    """Return 8-bit floats for the layers, and for keys and values in the cache too."""
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    return config


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8": lambda: mtq.FP8_DEFAULT_CFG,
    "fp8-per-channel": lambda: mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "nvfp4": lambda: mtq.NVFP4_DEFAULT_CFG,
    "mxfp8": lambda: mtq.MXFP8_DEFAULT_CFG,
    "mixed": mixed,
    "fp8-cache": with_cache,
}


def main() -> None:
    """Write every kind: the checkpoint, and what the layers compute before it was written."""
    tensor_quant.dynamic_block_quantize_op = quantize_block
    torch.manual_seed(0)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    plain = LlamaForCausalLM(config).eval()
    # Rows of different sizes, so that scales of outputs and blocks differ.
    for name, parameter in plain.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data *= torch.rand(len(parameter), 1) + 0.25
    tokens = torch.randint(16, (1, NUM_TOKENS))
    for kind, settings in KINDS.items():
        folder = FOLDER / kind
        model = copy.deepcopy(plain)
        mtq.quantize(model, copy.deepcopy(settings()), lambda model: model(tokens))
        # What is done when a model is written: layers of one input share its scale.
        requantize_resmooth_fused_llm_layers(model)
        recorded = record(model, tokens)
        export_hf_checkpoint(model, export_dir=folder)
        save_file(recorded, folder / "recorded.safetensors")
        (folder / "generation_config.json").unlink()


def record(model: LlamaForCausalLM, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return input and output of every layer of the blocks, by its name and ``in`` or ``out``."""
    recorded: dict[str, torch.Tensor] = {}

    def keep(name: str, _: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        recorded[f"{name}.in"] = inputs[0][0].clone()
        recorded[f"{name}.out"] = output[0].clone()

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(partial(keep, name))
    with torch.no_grad():
        model(tokens)
    for _, module in model.named_modules():
        module._forward_hooks.clear()
    return recorded


if __name__ == "__main__":
    main()
