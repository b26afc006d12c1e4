"""Writes the checkpoints beside this file, which tests read.

It runs where ``nvidia-modelopt`` 0.47 is installed, which the tests do without, for it wants 20
packages besides. No accelerator is needed. Names of kinds write only these.
"""

# The library is not there where types are checked.
# mypy: ignore-errors

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
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
    """Return the result of the library's CUDA kernels, from its own tensor classes."""
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


def in_small_groups() -> dict[str, Any]:
    """Return integers of 4 bits in groups of 16, where the library has groups of 128."""
    config = copy.deepcopy(mtq.INT4_AWQ_CFG)
    for rule in config["quant_cfg"]:
        sizes = rule.get("cfg", {}).get("block_sizes", {})
        if sizes.get(-1) == 128:
            sizes[-1] = 16
    return config


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8": lambda: mtq.FP8_DEFAULT_CFG,
    "fp8-per-channel": lambda: mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "nvfp4": lambda: mtq.NVFP4_DEFAULT_CFG,
    "mxfp8": lambda: mtq.MXFP8_DEFAULT_CFG,
    "mixed": mixed,
    "fp8-cache": with_cache,
    "w4a16-awq": in_small_groups,
    "w8a16": lambda: mtq.INT8_WEIGHT_ONLY_CFG,
    "w4a16-nvfp4": lambda: mtq.W4A16_NVFP4_CFG,
    "nvfp4-awq": lambda: mtq.NVFP4_AWQ_LITE_CFG,
    "fp8-blocks": lambda: mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
}
# Kinds that were recorded before their weights were.
BEFORE_WEIGHTS = ("fp8", "fp8-per-channel", "nvfp4", "mxfp8", "mixed", "fp8-cache")
SIZES: dict[str, dict[str, int]] = {
    # Several blocks of 128 in some layers, and less than one along one side of each.
    "fp8-blocks": {
        "hidden_size": 32,
        "intermediate_size": 256,
        "num_attention_heads": 1,
        "head_dim": 128,
    }
}


def main(kinds: Sequence[str]) -> None:
    """Write kinds: the checkpoint, and what the layers compute before it was written."""
    tensor_quant.dynamic_block_quantize_op = quantize_block
    for kind in kinds or KINDS:
        torch.manual_seed(0)
        plain = model_of(SIZES.get(kind, {}))
        tokens = torch.randint(16, (1, NUM_TOKENS))
        folder = FOLDER / kind
        model = copy.deepcopy(plain)
        mtq.quantize(model, copy.deepcopy(KINDS[kind]()), lambda model, ids=tokens: model(ids))
        # What is done when a model is written: layers of one input share its scale.
        requantize_resmooth_fused_llm_layers(model)
        recorded = record(model, tokens)
        if kind not in BEFORE_WEIGHTS:
            recorded |= record_weights(model)
        export_hf_checkpoint(model, export_dir=folder)
        save_file(recorded, folder / "recorded.safetensors")
        (folder / "generation_config.json").unlink()


def model_of(sizes: dict[str, int]) -> LlamaForCausalLM:
    """Return a small model whose rows are of different sizes, so that scales differ."""
    usual = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=1,
        num_key_value_heads=1,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype="float32",
        **{**usual, **sizes},
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            parameter.data *= torch.rand(len(parameter), 1) + 0.25
    return model


def record_weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return the weight that the library multiplies by, of two layers."""
    return {
        f"{name}.weight": module.weight_quantizer(module.weight).detach().clone()
        for name, module in model.named_modules()
        if name.endswith(("k_proj", "down_proj"))
    }


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
    main(sys.argv[1:])
