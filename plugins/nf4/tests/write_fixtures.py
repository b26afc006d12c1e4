"""Write the checkpoints under ``fixtures`` with transformers and bitsandbytes, and what they mean.

Not run by the tests, as bitsandbytes takes 130 MB. Needs a CPU and, beside the project's own
environment, ``pip install bitsandbytes==0.50.2 accelerate``; then ``python write_fixtures.py``.

Each folder holds a checkpoint as ``save_pretrained`` wrote it, and ``expected.json``: the digest of
each weight that ``dequantize_bnb_weight`` returns in float32, and the logits of some tokens that
transformers computes in float32 with the quantized model and with the dequantized one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from copy import copy
from pathlib import Path
from typing import Any, cast

import bitsandbytes  # type: ignore[import-not-found]
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS = [(token * 37 + 5) % 64 for token in range(16)]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
# Blocks of 64 weights straddle the rows of its down_proj, which have 96.
STRADDLING = "nf4-straddling"
FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "nf4": (torch.float32, {**FOUR, "bnb_4bit_quant_type": "nf4"}),
    "nf4-double": (
        torch.bfloat16,
        {**FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "nf4-double-in-bfloat16": (
        torch.bfloat16,
        {
            **FOUR,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_storage": torch.bfloat16,
        },
    ),
    STRADDLING: (torch.float32, {**FOUR, "bnb_4bit_quant_type": "nf4"}),
    "fp4": (torch.float32, {**FOUR, "bnb_4bit_quant_type": "fp4"}),
    "fp4-double-but-some": (
        torch.float32,
        {
            **FOUR,
            "bnb_4bit_quant_type": "fp4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head", "down_proj"],
        },
    ),
    # Without a threshold no outlier is multiplied apart.
    "int8": (torch.float16, {"load_in_8bit": True, "llm_int8_threshold": 0.0}),
}


def main() -> None:
    for name, (dtype, settings) in VARIANTS.items():
        shape = LlamaConfig(**SIZES | ({"intermediate_size": 96} if name == STRADDLING else {}))
        torch.manual_seed(0)
        plain = LlamaForCausalLM(shape)
        source, target = FIXTURES / "plain", FIXTURES / name
        for folder in (source, target):
            shutil.rmtree(folder, ignore_errors=True)
        torch.nn.Module.to(plain, dtype)
        plain.save_pretrained(source)
        written = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, quantization_config=BitsAndBytesConfig(**settings)
        )
        written.save_pretrained(target)
        shutil.rmtree(source)
        (target / "generation_config.json").unlink(missing_ok=True)
        # In training mode bitsandbytes dequantizes and multiplies; its kernel for inference on some
        # CPUs rounds inputs to bfloat16.
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).train()
        digests, weights = {}, {}
        for prefix, module in model.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
                weights[f"{prefix}.weight"] = values = dequantized(module)
                digests[prefix] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        tokens = torch.tensor([TOKENS])
        with torch.no_grad():
            quantized = model(tokens).logits[0].float()
        same = LlamaForCausalLM(shape).float()
        same.load_state_dict({**plain.state_dict(), **weights})
        with torch.no_grad():
            exact = same(tokens).logits[0]
        facts = {
            "written by": {
                module.__name__: module.__version__
                for module in (bitsandbytes, transformers, torch)
            },
            "weights": digests,
            "tokens": TOKENS,
            # Where blocks straddle rows, release 0.50.2 misreads them on CPUs with AVX-512.
            "logits of the quantized model": None if name == STRADDLING else rounded(quantized),
            "logits of the dequantized model": rounded(exact),
        }
        (target / "model.safetensors").chmod(0o644)
        (target / "expected.json").write_text(json.dumps(facts) + "\n")
        print(name, sorted(weights), float((quantized - exact).abs().max()))


def rounded(logits: torch.Tensor) -> list[list[float]]:
    return [[round(number, 5) for number in row] for row in logits.tolist()]


def dequantized(module: torch.nn.Linear) -> torch.Tensor:
    """Return the float32 weight ``[O, I]`` that bitsandbytes reads."""
    if state := getattr(module.weight, "quant_state", None):
        state = copy(state)
        state.dtype, state.shape = torch.float32, (1, state.shape.numel())  # straddles no row
        flat = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
        assert isinstance(flat, torch.Tensor)
        return flat.view(module.out_features, module.in_features)
    parameter = cast(torch.nn.Parameter, module.weight)
    weight: torch.Tensor = dequantize_bnb_weight(parameter, module.state)
    return weight.float()


if __name__ == "__main__":
    main()
