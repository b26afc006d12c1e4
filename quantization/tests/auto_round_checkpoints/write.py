"""Writes the checkpoints beside this file, which tests read.

It runs where ``auto-round`` 0.16 is installed, which the tests do without, for it wants data sets
and what reads them besides. Weights are rounded to the nearest code: how codes are found does not
change what is stored.
"""

# The library is not there where types are checked.
# mypy: ignore-errors

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as TokenizerOfLibrary

FOLDER = Path(__file__).parent

ATTENTION_OF_8_BITS = {
    "self_attn": {"bits": 8},
    "model.layers.0.mlp.down_proj": {"bits": 16},
}
# Format, scheme and rules for single layers.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "gptq": ("auto_round:auto_gptq", {"group_size": 32}, ATTENTION_OF_8_BITS),
    "gptq-asymmetric": ("auto_round:auto_gptq", {"group_size": 16, "sym": False}, None),
    "gptqmodel": ("auto_round:gptqmodel", {"group_size": 32, "sym": False}, None),
    "gptq-8-bits": ("auto_round:auto_gptq", {"bits": 8, "group_size": -1}, None),
    "awq": ("auto_round:auto_awq", {"group_size": 32}, None),
    "awq-asymmetric": (
        "auto_round:auto_awq",
        {"group_size": 32, "sym": False},
        {"mlp": {"bits": 16}},
    ),
}


def main() -> None:
    """Write every kind, and the weights that were quantized."""
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
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in plain.named_parameters():
        if name.endswith("_proj.weight"):
            # Neither even nor around zero, so that scales differ, and zero points where there are.
            parameter.data *= torch.rand(len(parameter), 1) + 0.25
            parameter.data += 0.01 * torch.randn(len(parameter), 1)
            parameter.data = parameter.data.half().float()
            weights[name] = parameter.data.half()
    save_file(weights, FOLDER / "weights.safetensors")
    letters = {chr(ord("a") + index): index for index in range(16)}
    tokenizer = TokenizerOfLibrary(tokenizer_object=Tokenizer(models.BPE(vocab=letters, merges=[])))
    for kind, (form, scheme, layers) in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            rounding = AutoRound(
                copy.deepcopy(plain),
                tokenizer=tokenizer,
                scheme="W4A16",
                iters=0,
                disable_opt_rtn=True,
                layer_config=copy.deepcopy(layers),
                **scheme,
            )
            rounding.quantize_and_save(folder, format=form)
            (written,) = (path.parent for path in Path(folder).rglob("config.json"))
            (FOLDER / kind).mkdir(exist_ok=True)
            for name in ("config.json", "model.safetensors"):
                shutil.copyfile(written / name, FOLDER / kind / name)


if __name__ == "__main__":
    main()
