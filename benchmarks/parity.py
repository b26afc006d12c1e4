"""Measure how far our logits, and those of transformers in bfloat16, are from its float32 ones.

python benchmarks/parity.py MODEL_DIR [MODEL_DIR ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from interposer_engine import load

LENGTHS = (1, 17, 150, 500)

Logits = Callable[[list[int]], torch.Tensor]


def theirs(path: Path, dtype: torch.dtype) -> Logits:
    """Return transformers' logits after every token, ``[T, V]`` float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def logits(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].float()  # type: ignore[no-any-return]

    return logits


def main() -> None:
    """Print root mean square and largest absolute error, over all positions and tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path, nargs="+")
    for path in parser.parse_args().model_dir:
        exact = theirs(path, torch.float32)
        logits_by_name = {
            "interposer float32": load(path, dtype="float32").logits,
            "interposer bfloat16": load(path, dtype="bfloat16").logits,
            "transformers bfloat16": theirs(path, torch.bfloat16),
        }
        vocab_size = load(path).engine.model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS
        ]
        wanted = torch.cat([exact(prompt) for prompt in prompts])
        for name, logits in logits_by_name.items():
            error = torch.cat([logits(prompt) for prompt in prompts]) - wanted
            rms, largest = error.square().mean().sqrt(), error.abs().max()
            print(f"{path.name:20s} {name:22s} rms {rms:.2e}  largest {largest:.2e}")


if __name__ == "__main__":
    main()
