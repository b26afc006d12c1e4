"""Run a model with ``use_kernels`` and a repository of the hub; print JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from kernels import LocalLayerRepository, get_local_kernel, register_kernel_mapping
from transformers import AutoModelForCausalLM, Qwen3Config


def main() -> None:
    repository = Path(sys.argv[1])
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=64, **sizes
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(10)[None].repeat(2, 1)
    names = "RMSNorm", "rotary_pos_emb"
    register_kernel_mapping(
        {name: {"cpu": LocalLayerRepository(repository, layer_name=name)} for name in names}
    )
    functions = get_local_kernel(repository).functions
    called: list[str] = []
    original = functions._kernel

    def chosen(op: str, operand: torch.Tensor) -> Any:
        called.append(op)
        return original(op, operand)

    functions._kernel = chosen
    with torch.no_grad():
        expected = model(ids).logits
        assert not called
        model.set_use_kernels(True)
        found = model(ids).logits
    norms = [module for name, module in model.named_modules() if name.endswith("norm")]
    bound = [m for m in norms if m.forward.__func__.__module__.startswith("_interposer_kernels")]
    print(
        json.dumps(
            {
                "transformers": transformers.__version__,
                "norms": len(bound),
                "all norms": len(norms),
                "called": called,
                "relative error": float((found - expected).norm() / expected.norm()),
            }
        )
    )


if __name__ == "__main__":
    main()
