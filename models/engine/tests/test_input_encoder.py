"""Packages that provide the encoder of a checkpoint by an entry point."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from interposer.errors import CheckpointError, PluginError, RequestError
from interposer_engine import EmbeddedInput, Media, load
from interposer_engine._distributed.codec import decode, encode


class ColourEncoder:
    """Puts one token of a vector, a byte of the picture in all elements, for each placeholder."""

    kinds = frozenset({"image"})
    max_step_tokens = 0
    placeholder = 7

    def embed(
        self, token_ids: Any, media: Any, *, cache_salt: str = ""
    ) -> list[int | EmbeddedInput]:
        pending = iter(media)
        prompt: list[int | EmbeddedInput] = []
        for token in token_ids:
            if token != self.placeholder:
                prompt.append(token)
                continue
            content = next(pending).content
            vectors = torch.full((1, 64), content[0] / 255)
            prompt.append(EmbeddedInput("image", content, vectors))
        return prompt


def provide(checkpoint: Any, planned: Any) -> ColourEncoder | None:
    """Return the encoder of a checkpoint whose vision_config has the depth 1."""
    depth = checkpoint.config["vision_config"]["depth"]
    if depth == 3:
        raise CheckpointError(checkpoint.path, "vision.weight is missing", "copy it again")
    if depth == 4:
        raise ZeroDivisionError("no pixels")
    return ColourEncoder() if depth == 1 else None


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with the entry point of ``provide``."""
    info = tmp_path / "site" / "acme_eyes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-eyes\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    points = f"[interposer.input_encoders]\neyes = {__name__}:provide\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(info.parent)


@pytest.fixture
def seeing(llama: Path, tmp_path: Path) -> Path:
    """Return a copy of a Llama checkpoint with an encoder in its config.json."""
    return with_encoder(llama, tmp_path / "seeing", depth=1)


def with_encoder(source: Path, path: Path, depth: int) -> Path:
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["vision_config"] = {"depth": depth}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.usefixtures("provider")
def test_the_encoder_of_an_installed_package_computes_images(seeing: Path) -> None:
    lm = load(seeing, "float32", cache_tokens=64)
    assert lm.input_encoder is not None
    assert lm.input_encoder.kinds == {"image"}
    pictures = [Media("image", bytes([value, 1]), "messages[0]") for value in (0, 255)]
    prompt = lm.input_encoder.embed([1, 7, 2, 7], pictures)
    (answer,) = lm.generate([prompt], max_new_tokens=2, ignore_eos=True)
    assert answer.prompt_token_ids == (1, 2)
    (other,) = lm.generate([lm.input_encoder.embed([1, 7, 2, 7], pictures[::-1])], max_new_tokens=1)
    assert other.logprobs[0] != answer.logprobs[0]
    lm.close()
    with pytest.raises(RequestError, match="was closed"):
        lm.input_encoder.embed([7], pictures[:1])


@pytest.mark.usefixtures("provider")
def test_text_only_loads_no_encoder(seeing: Path) -> None:
    lm = load(seeing, "float32", cache_tokens=64, text_only=True)
    assert lm.input_encoder is None
    assert not any("texts only" in note for note in lm.resolver.notes)


@pytest.mark.usefixtures("provider")
def test_failures_of_a_package_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"vision\.weight is missing"):
        load(with_encoder(llama, tmp_path / "3", depth=3), cache_tokens=64)
    with pytest.raises(PluginError, match=r"eyes.*acme-eyes.*no pixels.*\n?.*text_only=True"):
        load(with_encoder(llama, tmp_path / "4", depth=4), cache_tokens=64)


@pytest.mark.usefixtures("provider")
def test_the_text_half_of_an_unknown_encoder_runs(llama: Path, tmp_path: Path) -> None:
    lm = load(with_encoder(llama, tmp_path / "2", depth=2), cache_tokens=64)
    assert lm.input_encoder is None
    (note,) = [note for note in lm.resolver.notes if "texts only" in note]
    assert "no installed package implements the image encoder" in note
    assert len(lm.generate("a", max_new_tokens=1)) == 1


def test_a_checkpoint_without_encoder_has_none(llama: Path) -> None:
    lm = load(llama, cache_tokens=64)
    assert lm.input_encoder is None
    assert not any("texts only" in note for note in lm.resolver.notes)


def test_runs_cross_to_other_ranks() -> None:
    tensors: dict[str, Any] = {
        "embeddings": torch.randn(3, 8),
        "positions": torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0]]),
        "layer_embeddings": torch.randn(2, 3, 8),
    }
    run = EmbeddedInput("image", b"digest", num_positions=2, **tensors)
    first, received = decode(encode([5, run]))
    assert first == 5
    assert received.digest == run.digest
    assert received.num_positions == 2
    for name, tensor in tensors.items():
        assert torch.equal(getattr(received, name), tensor)
