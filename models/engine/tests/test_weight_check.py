"""Weights that are NaN or infinite are refused or logged while they load, as the policy says."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models.adapt.tests.test_encoder import BERT, write
from models.engine.tests.test_packed import cache as _cache
from models.engine.tests.test_packed import settled
from safetensors.torch import load_file, save_file

from interposer import Config, explain
from interposer.errors import CheckpointError
from interposer_adapt import load_encoder
from interposer_engine import Checkpoint, LanguageModel, load

cache = _cache
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def harm(folder: Path, name: str, value: float, file: str = WEIGHTS) -> None:
    """Write a value to the last two numbers of a tensor, or add a tensor that holds it."""
    tensors = load_file(folder / file)
    tensor = tensors.setdefault(name, torch.zeros(4))
    tensor.view(-1)[-2:] = value
    save_file(tensors, folder / file, metadata={"format": "pt"})


def opened(folder: Path, **config: Any) -> LanguageModel:
    return load(folder, "float32", config=Config(**config), cache_tokens=64)


@pytest.mark.landing(4)
@pytest.mark.parametrize("name", [UP, "model.embed_tokens.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
def test_a_weight_that_is_not_finite_is_refused(copied: Path, name: str, value: float) -> None:
    harm(copied, name, value)
    with pytest.raises(CheckpointError) as caught:
        opened(copied)
    size = load_file(copied / WEIGHTS)[name].numel()
    assert caught.value.path == str(copied / WEIGHTS)
    assert caught.value.reason.startswith(
        f"holds the tensor {name!r}, 2 of whose {size} numbers are NaN or infinite"
    )
    assert "copy the file again" in caught.value.mend
    assert "weight_check='warn'" in caught.value.mend


def test_an_expert_that_is_not_finite_is_refused(qwen3_moe: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen3_moe, tmp_path / "model"))
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    harm(folder, name, NAN)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: holds the tensor '{name}', 2 of"):
        opened(folder)


def test_a_weight_that_a_smaller_dtype_makes_infinite_is_refused(copied: Path) -> None:
    harm(copied, UP, torch.finfo(torch.float32).max)
    with pytest.raises(CheckpointError, match=r"2 of .* are too large for bfloat16") as caught:
        load(copied, "bfloat16", cache_tokens=64)
    assert "'float32'" in caught.value.mend


def test_policies_warn_and_off_load_non_finite_weights(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harm(copied, UP, NAN)
    with caplog.at_level(logging.WARNING, "interposer"):
        lm = opened(copied, weight_check="warn")
        (note,) = [note for note in explain(lm).notes if UP in note]
        assert note in caplog.text
        caplog.clear()
        opened(copied, weight_check="off")
    assert UP not in caplog.text


def test_a_tensor_that_no_layer_uses_is_not_checked(copied: Path) -> None:
    harm(copied, "model.layers.0.self_attn.rotary_emb.inv_freq", -INFINITE)
    opened(copied)


def test_packed_weights_remember_the_check(
    copied: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on: dict[str, Any] = {"packed": "on", "cache_dir": cache}
    harm(copied, UP, NAN)
    opened(copied, **on, weight_check="off")
    settled()
    # It was packed without a check, so that the checkpoint is read again, and refused.
    with pytest.raises(CheckpointError, match=UP):
        opened(copied, **on)
    opened(copied, **on, weight_check="warn")
    settled()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "stream", None)
        caplog.clear()
        lm = opened(copied, **on, weight_check="warn")
        assert any(UP in note for note in explain(lm).notes)
        assert UP in caplog.text
        opened(copied, **on, weight_check="off")
    with pytest.raises(CheckpointError, match=UP):
        opened(copied, **on)
    harm(copied, UP, 0.0)
    opened(copied, **on)
    settled()
    monkeypatch.setattr(Checkpoint, "stream", None)
    opened(copied, **on)


def test_new_weights_that_are_not_finite_change_nothing(llama: Path) -> None:
    lm = opened(llama)
    expected = lm.generate([[1, 2]], max_new_tokens=4)[0].token_ids
    tensors = dict(Checkpoint.open(llama).stream())
    wrong = {**tensors, UP: torch.full_like(tensors[UP], NAN)}
    with pytest.raises(CheckpointError, match=f"update of .* holds the tensor '{UP}'"):
        lm.update_weights(wrong)
    assert lm.generate([[1, 2]], max_new_tokens=4)[0].token_ids == expected


def test_an_encoder_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    harm(tmp_path, "embeddings.LayerNorm.weight", NAN)
    with pytest.raises(CheckpointError, match=r"'embeddings.LayerNorm.weight', 2 of"):
        load_encoder(tmp_path)
    load_encoder(tmp_path, config=Config(weight_check="off"))
