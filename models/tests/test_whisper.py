"""Whisper: sounds are encoded once, and logits and tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.engine.tests.test_bad_checkpoints import edit_json, edit_weights
from models.tests.speech_checkpoints import CONFIG, POSITIONS, TOKENS, write_speech_model
from safetensors.torch import load_file

from interposer.errors import CheckpointError, ConfigError, RequestError
from interposer_engine import EncoderFeatures, LanguageModel, SamplingParams, load

START = TOKENS["<|startoftranscript|>"]
SHAPE = CONFIG["num_mel_bins"], 2 * POSITIONS


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a small model, and transformers' own model of it."""
    path = tmp_path_factory.mktemp("whisper")
    return path, write_speech_model(path)


@pytest.fixture
def copied(pair: tuple[Path, Any], tmp_path: Path) -> Path:
    for file in pair[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def loaded(path: Path, **more: Any) -> LanguageModel:
    return load(path, "float32", **{"platform": "cpu", "cache_tokens": 640, **more})


def features(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, values: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = model(input_features=values[None], decoder_input_ids=torch.tensor([tokens]))
    return output.logits[0]  # type: ignore[no-any-return]


def greedy_of(model: Any, values: torch.Tensor, steps: int) -> list[int]:
    tokens = [START]
    for _ in range(steps):
        tokens.append(int(logits_of(model, values, tokens)[-1].argmax()))
    return tokens[1:]


def test_float32_logits_differ_by_at_most_1e_4_of_the_largest(pair: tuple[Path, Any]) -> None:
    path, model = pair
    lm = loaded(path)
    for seed, tokens in enumerate(([START], [START, 258, 261, 9, 200, 31], [5] * 40)):
        values = features(seed)
        expected = logits_of(model, values, tokens)
        difference = (lm.logits(tokens, source=EncoderFeatures(values)) - expected).abs().max()
        assert difference <= 1e-4 * expected.abs().max()


def test_greedy_tokens_are_equal_while_sounds_join_and_leave(pair: tuple[Path, Any]) -> None:
    """In a cache that holds two sounds at a time, so that sequences give their pages back."""
    path, model = pair
    lm = loaded(path, max_sequences=3, max_step_tokens=60, cache_tokens=128)
    counts = (24, 5, 16, 9)
    started = []
    for seed, count in enumerate(counts):
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        started.append(lm.start(EncoderFeatures(features(seed)), params).sequence)
        for _ in range(4):
            lm.engine.step()
    while lm.engine.busy:
        lm.engine.step()
    for seed, (sequence, count) in enumerate(zip(started, counts, strict=True)):
        assert sequence.output == greedy_of(model, features(seed), count)
    pools = [*lm.engine.pools, lm.engine.scheduler.encoder_pool]
    assert all(pool and pool.num_free == pool.num_pages for pool in pools)


def test_the_decoder_starts_with_the_tokens_of_the_prompt(pair: tuple[Path, Any]) -> None:
    path, model = pair
    values = features(3)
    prompt = EncoderFeatures(values, (START, 259, 261))
    (completion,) = loaded(path).generate([prompt], max_new_tokens=1, ignore_eos=True)
    expected = logits_of(model, values, [START, 259, 261])[-1].argmax()
    assert completion.token_ids == (int(expected),)
    assert completion.prompt_token_ids == (START, 259, 261)


def test_unusable_sounds_are_refused(pair: tuple[Path, Any], llama: Path) -> None:
    lm = loaded(pair[0])
    values = features(0)
    for prompt, reason in (
        ([5, 6], r"reads the features of a sound, no text or token ids. Try: lm.transcribe"),
        ("a text", "reads the features of a sound"),
        (EncoderFeatures(values[:, :-1]), r"features of the shape \[80, 100\], got \[80, 99\]"),
        (EncoderFeatures(values.long()), r"floating-point numbers \[80, 100\], got torch.int64"),
        (EncoderFeatures([1.0]), r"floating-point numbers \[80, 100\], got list"),  # type: ignore[arg-type]
        (EncoderFeatures(values * torch.nan), "hold NaN or infinity"),
    ):
        with pytest.raises(RequestError, match=reason):
            lm.generate([prompt], max_new_tokens=3)
    with pytest.raises(RequestError, match=r"no encoder input was given.*source=EncoderFeatures"):
        lm.engine.add([START], SamplingParams())
    assert not lm.engine.busy
    decoder = loaded(llama)
    with pytest.raises(RequestError, match="features for an encoder, but the model has no encoder"):
        decoder.generate([EncoderFeatures(values)], max_new_tokens=3)


def test_a_cache_or_step_that_holds_no_sound_is_refused(pair: tuple[Path, Any]) -> None:
    for sizes in ({"max_step_tokens": 49}, {"cache_tokens": 48}):
        with pytest.raises(ConfigError, match=r"50 positions, .* allow 4[89]. Try: load\(..., max"):
            loaded(pair[0], **sizes)


def test_only_biases_of_keys_may_be_missing(copied: Path) -> None:
    stored = load_file(copied / "model.safetensors")
    attention = "model.decoder.layers.0.encoder_attn"
    assert f"{attention}.k_proj.bias" not in stored
    for name in (f"{attention}.v_proj.bias", "model.encoder.conv1.weight"):
        edit_weights(copied, **{name: None})
        with pytest.raises(CheckpointError, match=f"lacks the tensor '{name}'"):
            loaded(copied)
        edit_weights(copied, **{name: stored[name].clone()})
    assert loaded(copied)


def test_wrong_sizes_are_refused(copied: Path) -> None:
    for field, value, reason in (
        ("num_mel_bins", 81, r"conv1.weight' has shape \[32, 80, 3\]"),
        ("max_source_positions", 51, "embed_positions.weight' has shape"),
        ("max_target_positions", 0, "max_target_positions: Input should be greater than 0"),
    ):
        before = CONFIG[field]
        edit_json(copied / "config.json", **{field: value})
        with pytest.raises(CheckpointError, match=reason):
            loaded(copied)
        edit_json(copied / "config.json", **{field: before})
