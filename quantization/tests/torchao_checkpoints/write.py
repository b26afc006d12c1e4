"""Writes the checkpoints beside this file, which tests read.

It runs where ``torchao`` 0.18 is installed, which the tests do without. ``recorded.safetensors``
holds one of the weights that the library itself reads from what it wrote and, of the kinds that
quantize inputs to integers, input and output of that layer. Names of kinds write only these.
"""

# The library is not there where types are checked.
# mypy: ignore-errors

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quant_api,
)
from torchao.quantization.granularity import PerAxis, PerGroup, PerRow
from torchao.quantization.quant_primitives import MappingType
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig

FOLDER = Path(__file__).parent

KINDS = {
    "float8": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "int8": Int8WeightOnlyConfig(),
    "int8-groups": Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "intx-4-bits": IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=PerGroup(16), mapping_type=MappingType.ASYMMETRIC
    ),
    "intx-8-bits": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
    "float8-weights": Float8WeightOnlyConfig(),
    "int8-dynamic": Int8DynamicActivationInt8WeightConfig(),
    "intx-4-bits-dynamic": Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,
        weight_granularity=PerGroup(16),
        weight_mapping_type=MappingType.ASYMMETRIC,
    ),
    "intx-8-bits-dynamic": Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int8, weight_granularity=PerAxis(0)
    ),
}
DYNAMIC = ("int8-dynamic", "intx-4-bits-dynamic", "intx-8-bits-dynamic")


def main(kinds: Sequence[str]) -> None:
    """Write kinds: the checkpoint, a weight that it stands for, and its results."""
    # Only computing with 8-bit floats needs an accelerator, not writing them.
    quant_api._check_hardware_support = lambda granularity: None
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
        tie_word_embeddings=False,
        dtype="float32",
    )
    plain = LlamaForCausalLM(config).eval()
    for name, parameter in plain.named_parameters():
        if name.endswith("_proj.weight"):
            # Neither even nor around zero, so that scales differ, and zero points where there are.
            parameter.data *= torch.rand(len(parameter), 1) + 0.25
            parameter.data += 0.01 * torch.randn(len(parameter), 1)
    with tempfile.TemporaryDirectory() as source:
        plain.save_pretrained(source)
        for kind in kinds or KINDS:
            settings = KINDS[kind]
            dtype = torch.bfloat16 if kind == "float8" else torch.float32
            model = LlamaForCausalLM.from_pretrained(
                source, quantization_config=TorchAoConfig(settings), dtype=dtype
            )
            model.save_pretrained(FOLDER / kind)
            (FOLDER / kind / "generation_config.json").unlink()
            ((name, module),) = (
                (name, module) for name, module in model.named_modules() if name.endswith("q_proj")
            )
            recorded = {name: module.weight.dequantize().float()}
            if kind in DYNAMIC:
                inputs = torch.randn(3, 64) + 0.5
                with torch.no_grad():
                    recorded |= {f"{name}.in": inputs, f"{name}.out": module(inputs)}
            save_file(recorded, FOLDER / kind / "recorded.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
