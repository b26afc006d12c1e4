"""An adapter in the files of PEFT, for tests that need no PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_adapter(
    folder: Path, sizes: dict[str, tuple[int, int]], rank: int = 4, seed: int = 0
) -> Path:
    """Write random matrices that say something, and return the folder.

    Args:
        sizes: outputs and inputs of each module that is adapted.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in sizes.items():
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            numbers = 0.3 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = numbers
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
