"""Heads that checkpoints hold: what they compute, and that guesses by them change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.tests.conftest import example, write_checkpoint
from models.tests.test_speculation import KINDS, SMALL, always, idle, prompts_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from interposer.errors import CheckpointError, ConfigError
from interposer_models import LanguageModel, SamplingParams, load
from interposer_models._families import examples

Stored = dict[str, Tensor]


def copied(stored: Stored, source: str, target: str) -> Stored:
    """Return the tensors below one prefix, below another one."""
    return {
        target + name.removeprefix(source): tensor.clone()
        for name, tensor in stored.items()
        if name.startswith(source)
    }


def appended(stored: Stored, last: int) -> Stored:
    """Return a head as DeepSeek-V3 and GLM-4.5 store it, whose block is that of the last layer."""
    size, place = stored["model.norm.weight"].shape[0], f"model.layers.{last + 1}."
    return {
        **copied(stored, f"model.layers.{last}.", place),
        f"{place}enorm.weight": torch.rand(size) + 0.5,
        f"{place}hnorm.weight": torch.rand(size) + 0.5,
        f"{place}eh_proj.weight": torch.randn(size, 2 * size) / size**0.5,
        f"{place}shared_head.norm.weight": torch.rand(size) + 0.5,
        # The model's again.
        f"{place}embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
        f"{place}shared_head.head.weight": torch.zeros(256, size),
    }


def beside(stored: Stored, last: int) -> Stored:
    """Return a head as Qwen3-Next and Qwen3.5 store it."""
    size = stored["model.norm.weight"].shape[0]
    return {
        **copied(stored, f"model.layers.{last}.", "mtp.layers.0."),
        "mtp.pre_fc_norm_embedding.weight": torch.rand(size) - 0.5,
        "mtp.pre_fc_norm_hidden.weight": torch.rand(size) - 0.5,
        "mtp.fc.weight": torch.randn(size, 2 * size) / size**0.5,
        "mtp.norm.weight": torch.rand(size) - 0.5,
    }


HOLDERS: dict[str, tuple[str, Callable[[Stored, int], Stored]]] = {
    "deepseek_v3": ("groups", appended),
    "glm4_moe": ("groups", appended),
    "qwen3_next": ("some", beside),
    "qwen3_5": ("usual", beside),
}


@pytest.fixture(scope="module", params=HOLDERS)
def holder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with a head of random weights."""
    label, head = HOLDERS[request.param]
    path: Path = tmp_path_factory.mktemp(request.param)
    config = example(getattr(examples, request.param), label)
    if head is appended:
        config.num_nextn_predict_layers = 1
    write_checkpoint(config, path)
    stored = load_file(path / "model.safetensors")
    last = config.num_hidden_layers - 1
    save_file({**stored, **head(stored, last)}, path / "model.safetensors")
    return path


def test_loads(holder: Path) -> None:
    plain = load(holder, "float32", cache_tokens=2048)
    lm = load(holder, "float32", speculation=always("heads"), **SMALL)
    prompts = prompts_of((30, 3, 20))
    params = [SamplingParams(max_new_tokens=30, **kind) for kind in KINDS[:3]]
    wanted = [each.token_ids for each in plain.generate(prompts, params)]
    assert [each.token_ids for each in lm.generate(prompts, params)] == wanted
    print(lm.speculation)
    assert idle(lm)
