"""The numerics and the seed of the configuration hold for a run, and for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from interposer import Config
from interposer.errors import ConfigError
from interposer_engine import load, quantize
from interposer_engine._quantize.rounding import RoundedLayers

PROMPT = [3, 1, 4, 1, 5]


def test_every_step_computes_with_the_precision_of_the_configuration(llama: Path) -> None:
    before = torch.get_float32_matmul_precision()
    lm = load(llama, config=Config(float32="medium"), cache_tokens=64)
    seen: list[str] = []

    def note(*_: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())

    lm.engine.model.register_forward_pre_hook(note)
    lm.generate([PROMPT], max_new_tokens=2)
    lm.logits(PROMPT)
    assert seen == ["medium"] * 3
    assert torch.get_float32_matmul_precision() == before


def test_exchanged_weights_are_prepared_with_the_precision_of_the_configuration(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load(llama, config=Config(float32="medium"), cache_tokens=64)
    seen: list[str] = []
    assert lm.weights is not None
    update = lm.weights.update

    def noted(*arguments: Any) -> tuple[str, ...]:
        seen.append(torch.get_float32_matmul_precision())
        return update(*arguments)

    monkeypatch.setattr(lm.weights, "update", noted)
    lm.update_weights(load_file(llama / "model.safetensors"))
    assert seen == ["medium"]


def test_a_model_is_calibrated_with_the_precision_of_the_configuration(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    calibrate = RoundedLayers.calibrate

    def noted(*arguments: Any) -> None:
        seen.add(torch.get_float32_matmul_precision())
        calibrate(*arguments)

    monkeypatch.setattr(RoundedLayers, "calibrate", noted)
    text = tmp_path / "text"
    text.write_text("some text to calibrate with. " * 200)
    config = Config(float32="high")
    quantize(llama, tmp_path / "out", "int8", calibrate=text, config=config)
    assert seen == {"high"}


def drawn(folder: Path, config_seed: int | None, **params: Any) -> tuple[tuple[int, ...], ...]:
    lm = load(folder, config=Config(seed=config_seed), cache_tokens=256)
    done = lm.generate([PROMPT, PROMPT], max_new_tokens=8, temperature=5.0, **params)
    return tuple(completion.token_ids for completion in done)


def test_the_configured_seed_determines_the_sampled_tokens(llama: Path) -> None:
    first, again, other = drawn(llama, 5), drawn(llama, 5), drawn(llama, 6)
    assert first == again
    assert first != other
    assert first[0] != first[1]  # requests of one run draw noise of their own
    assert drawn(llama, None) != drawn(llama, None)


def test_the_seed_of_a_request_goes_before_that_of_the_configuration(llama: Path) -> None:
    assert drawn(llama, 5, seed=1) == drawn(llama, 6, seed=1)


def test_the_generators_of_the_platform_are_seeded_when_a_model_is_loaded(llama: Path) -> None:
    load(llama, config=Config(seed=5), cache_tokens=64)
    first = torch.rand(4)
    load(llama, config=Config(seed=5), cache_tokens=64)
    assert torch.equal(first, torch.rand(4))


@pytest.mark.parametrize("wrong", [{"float32": "exact"}, {"seed": -1}, {"seed": 1.5}])
def test_a_wrong_value_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Config(**wrong)
