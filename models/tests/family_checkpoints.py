"""Checkpoints of small models of all families, written without their original implementations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from interposer import Config
from interposer.records import ModelEntry
from interposer_engine import plan
from interposer_engine.parts import Weights
from interposer_models._families import examples as examples
from interposer_models.plugin import interposer_records


def family_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield config.json of each example of each family, by ``family-example``."""
    for record in interposer_records():
        if isinstance(record, ModelEntry) and record.examples:
            family = record.examples.rpartition(":")[2]
            for name, config in getattr(examples, family)().items():
                yield f"{family}-{name}", dict(config)


def write_config(root: Path, config: dict[str, Any]) -> Path:
    """Write config.json and a file without weights to ``root``, and return that."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    save_file({}, root / "model.safetensors")
    return root


def write_family(root: Path, config: dict[str, Any], dtype: str = "float32") -> Path:
    """Write a model of ``config`` with random weights to ``root``, and return that."""
    write_config(root, {**config, "torch_dtype": dtype})
    planned = plan(root, dtype=dtype, platform="cpu", config=Config())
    weights = Weights(planned.model, "cpu")
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for group in weights._groups:
        for name, place in group.places.items():
            whole = place.parameter
            if hasattr(whole, "sample"):
                drawn = torch.empty(whole.shape, dtype=whole.dtype)
                drawn.copy_(whole.sample(generator))
            elif whole.dtype.is_floating_point:
                spread = 0.4 / max(1, whole.shape[-1]) ** 0.5 if whole.ndim > 1 else 0.1
                drawn = torch.randn(whole.shape, generator=generator) * spread
                if whole.ndim == 1 and "norm" in name:
                    drawn += 1
                drawn = drawn.to(whole.dtype)
            else:
                drawn = torch.zeros(whole.shape, dtype=whole.dtype)
            tensors[name] = place.stored(drawn).clone().contiguous()
    save_file(tensors, root / "model.safetensors")
    return root
