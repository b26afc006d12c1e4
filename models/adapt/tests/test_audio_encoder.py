"""Sounds in prompts: the tokens, vectors and answers of transformers' processors and models."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.adapt.tests.audio_checkpoints import (
    FAMILIES,
    AudioFamily,
    float_wav_of,
    model_inputs,
    samples_of,
    wav_of,
    write_checkpoint,
)

import interposer
from interposer.errors import RequestError
from interposer_adapt._audio_encoder import AudioEncoder, SoundLimits
from interposer_engine import (
    AudioLimits,
    EmbeddedInput,
    LanguageModel,
    Media,
    SamplingParams,
    load,
    plan,
)

# Shorter than a window of two seconds, about as long, and longer: Qwen2-Audio hears two seconds,
# and Voxtral three windows.
SECONDS = (0.3, 1.97, 5.1)
NUM_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """A checkpoint, its model in transformers, and ours."""

    family: AudioFamily
    path: Path
    model: Any
    tokenizer: Any
    lm: LanguageModel

    @property
    def encoder(self) -> AudioEncoder:
        """Our encoder, as ``load`` creates it."""
        assert isinstance(self.lm.input_encoder, AudioEncoder)
        return self.lm.input_encoder

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def text(self, num_sounds: int) -> str:
        parts = ["A {}B", "\n{}", "{}C?"]
        texts = [parts[i].format(self.family.placeholder) for i in range(num_sounds)]
        return "".join(texts) or "A text alone"

    def embed(self, sounds: Sequence[bytes]) -> list[int | EmbeddedInput]:
        media = [Media("audio", content, f"sound {i}") for i, content in enumerate(sounds)]
        return self.encoder.embed(self.token_ids(self.text(len(sounds))), media)


def write_case(name: str, path: Path) -> Iterator[Case]:
    """Write the checkpoint of a family, and load it for a while."""
    model, tokenizer = write_checkpoint(FAMILIES[name], path)
    with load(path, dtype="float32", cache_tokens=1024) as lm:
        yield Case(FAMILIES[name], path, model, tokenizer, lm)


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """Each family."""
    yield from write_case(request.param, tmp_path_factory.mktemp(request.param))


def sounds_of(count: int) -> list[Any]:
    return [samples_of(seconds, seed=i) for i, seconds in enumerate(SECONDS[:count])]


def inputs_of(case: Case, count: int) -> Any:
    floats = [samples.astype(np.float32) / 32768 for samples in sounds_of(count)]
    return model_inputs(case.model, case.tokenizer, case.text(count), floats)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_prompt_is_that_of_transformers(case: Case, count: int) -> None:
    inputs = inputs_of(case, count)
    seen: dict[str, Any] = {}
    hook = case.model.get_decoder().register_forward_pre_hook(
        lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        case.model(**inputs)
    hook.remove()
    table = case.model.get_input_embeddings()
    token_ids: list[int] = []
    vectors = []
    for part in case.embed([wav_of(samples) for samples in sounds_of(count)]):
        if isinstance(part, EmbeddedInput):
            assert part.kind == "audio"
            token_ids += [case.model.config.audio_token_id] * len(part)
            vectors.append(part.embeddings)
        else:
            token_ids.append(part)
            vectors.append(table(torch.tensor([part])))
    assert token_ids == inputs["input_ids"][0].tolist()
    expected = seen["inputs_embeds"][0]
    bound = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(torch.cat(vectors), expected, rtol=0, atol=bound)


def test_greedy_tokens_are_those_of_transformers(case: Case) -> None:
    prompts, expected = [], []
    for count in (0, 1, 3):
        inputs = inputs_of(case, count)
        with torch.no_grad():
            out = case.model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        expected.append(out[0, inputs["input_ids"].shape[1] :].tolist())
        prompts.append(case.embed([wav_of(samples) for samples in sounds_of(count)]))
    params = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS)
    alone = [list(case.lm.generate([prompt], params)[0].token_ids) for prompt in prompts]
    together = [list(each.token_ids) for each in case.lm.generate(prompts, params)]
    assert alone == expected
    assert together == expected
    assert expected[1] != expected[2]


def test_messages_with_sounds(case: Case, tmp_path: Path) -> None:
    content = wav_of(samples_of(0.5))
    file = tmp_path / "word.wav"
    file.write_bytes(content)
    question = {"type": "text", "text": "What is said?"}
    params = SamplingParams(temperature=0.0, max_new_tokens=3)
    answers = [
        case.lm.chat(
            [{"role": "user", "content": [{"type": "audio", "audio": audio}, question]}], params
        )
        for audio in (str(file), content)
    ]
    prompt = case.lm.chat_prompt([{"role": "user", "content": [Media("audio", content), question]}])
    (expected,) = case.lm.generate([prompt], params)
    assert {answer.token_ids for answer in answers} == {expected.token_ids}
    # Text of a user is never a placeholder.
    text = case.lm.chat_prompt([{"role": "user", "content": case.family.placeholder}])
    assert case.encoder.token_id not in text


def test_explain_lists_the_kernels_of_the_encoder(case: Case) -> None:
    encoder: Any = case.lm.input_encoder
    explanation = str(interposer.explain(encoder))
    assert "layer_norm" in explanation
    assert any("sounds are encoded by" in note for note in case.lm.resolver.notes)


def test_the_encoder_is_loaded_without_the_decoder(case: Case) -> None:
    names = {name for name, _ in case.encoder._tower.adapted.model.named_parameters()}
    expected = {
        name
        for name, _ in case.model.named_parameters()
        if "audio_tower" in name or "multi_modal_projector" in name
    }
    assert names == expected


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One family, for promises that all of them keep in the same way."""
    yield from write_case("voxtral", tmp_path_factory.mktemp("one"))


def runs_of(prompt: Sequence[int | EmbeddedInput]) -> list[EmbeddedInput]:
    return [part for part in prompt if isinstance(part, EmbeddedInput)]


def another(case: Case, **settings: Any) -> AudioEncoder:
    """Return an encoder of the same checkpoint with other settings."""
    return AudioEncoder(case.encoder._tower, plan(case.path, dtype="float32"), **settings)


def encoded(encoder: AudioEncoder, case: Case, content: object) -> EmbeddedInput:
    """Return the vectors of one sound."""
    media = [Media("audio", content, "messages[0]")]
    (run,) = runs_of(encoder.embed(case.token_ids(case.family.placeholder), media))
    return run


def test_a_sample_has_as_many_tokens_as_a_step_allows(case: Case) -> None:
    encoder = another(case, cached_bytes=1 << 20)
    assert encoder.max_cached_bytes == 1 << 20
    window = encoder.run_sample(1)
    assert window > 1
    assert encoder.run_sample(5 * window + 1) == 5 * window


def test_sounds_of_several_threads_at_once(case: Case) -> None:
    sounds = [wav_of(samples_of(0.4 + 0.5 * (i % 3), seed=10 + i)) for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda content: encoded(case.encoder, case, content), sounds))
    without_cache = another(case, cached_bytes=0)
    for content, run in zip(sounds, results, strict=True):
        alone = encoded(without_cache, case, content)
        assert run.digest == alone.digest
        # Matmuls of other sizes sum in another order; vectors have lengths of 1 to 10.
        torch.testing.assert_close(run.embeddings, alone.embeddings, rtol=1e-4, atol=1e-4)
    assert len({run.digest for run in results}) == len(sounds)


def test_recent_sounds_are_not_encoded_again(voxtral: Case) -> None:
    sounds = [wav_of(samples_of(0.3, seed=i)) for i in range(3)]
    size = encoded(voxtral.encoder, voxtral, sounds[0]).embeddings.nbytes
    encoder = another(voxtral, cached_bytes=2 * size)
    first, second = (encoded(encoder, voxtral, content) for content in sounds[:2])
    assert encoded(encoder, voxtral, sounds[0]) is first
    # The third sound takes the place of the second, which was used before the first.
    encoded(encoder, voxtral, sounds[2])
    assert encoded(encoder, voxtral, sounds[0]) is first
    assert encoded(encoder, voxtral, sounds[1]) is not second


LOUD = np.full(4000, 1e30, dtype=np.float32)
REFUSALS: dict[str, tuple[object, str]] = {
    "no sound": (b"not a sound", r"^messages\[0\]: The audio is not WAV, FLAC, MP3"),
    "cut off": (wav_of(samples_of(1))[:30], r"^messages\[0\]: The WAV file is damaged"),
    "empty": (wav_of(samples_of(0)), r"^messages\[0\]: The audio holds no samples"),
    "no file": (Path("missing.wav"), r"^messages\[0\] is 'missing.wav', which does not exist"),
    "samples": (
        [0.5],
        r"^messages\[0\] is of the type list, must be the bytes of a file or a Path",
    ),
    "large": (wav_of(samples_of(2.0)), r"^messages\[0\] has 64044 bytes, at most 50000 are"),
    "long": (wav_of(samples_of(1.2)), r"^messages\[0\]: The audio lasts 1 seconds, the limit is 1"),
    "loud": (
        float_wav_of(LOUD),
        r"^messages\[0\]: The audio holds samples that are NaN or infinite, or larger than 2",
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_bad_sounds_are_refused(voxtral: Case, reason: str) -> None:
    content, message = REFUSALS[reason]
    limits = SoundLimits(file=AudioLimits(num_bytes=50000, seconds=1.0))
    encoder = another(voxtral, limits=limits)
    with pytest.raises(RequestError, match=message):
        encoded(encoder, voxtral, content)


def test_a_client_may_have_a_smaller_limit(voxtral: Case) -> None:
    media = [Media("audio", wav_of(samples_of(1.2)), max_seconds=0.5)]
    with pytest.raises(RequestError, match=r"The sound: The audio lasts 1 seconds, the limit is 0"):
        voxtral.encoder.embed(voxtral.token_ids(voxtral.family.placeholder), media)


def test_the_number_of_sounds_is_limited(voxtral: Case) -> None:
    encoder = another(voxtral, limits=SoundLimits(sounds=1))
    media = [Media("audio", wav_of(samples_of(0.3)))] * 2
    with pytest.raises(RequestError, match="has 2 sounds, at most 1 are accepted"):
        encoder.embed(voxtral.token_ids(voxtral.text(2)), media)
    with pytest.raises(RequestError, match=r"3 placeholders for sounds.*but 2 sounds are given"):
        encoder.embed(voxtral.token_ids(voxtral.text(3)), media)


def test_a_sound_that_is_shorter_than_a_token(tmp_path: Path) -> None:
    for case in write_case("qwen2-audio", tmp_path):
        with pytest.raises(RequestError, match=r"lasts 0.0200 seconds, which is too short"):
            encoded(case.encoder, case, wav_of(samples_of(0.02)))
        assert len(encoded(case.encoder, case, wav_of(samples_of(0.03)))) == 1


def test_a_small_file_of_many_samples_is_refused_before_it_is_decoded(voxtral: Case) -> None:
    """FLAC compresses silence to almost nothing."""
    soundfile = pytest.importorskip("soundfile")
    content = BytesIO()
    silence = np.zeros((200_000, 2), dtype=np.int16)
    soundfile.write(content, silence, 16000, format="FLAC")
    assert len(content.getvalue()) < 4000
    encoder = another(voxtral, limits=SoundLimits(file=AudioLimits(num_samples=100_000)))
    with pytest.raises(RequestError, match=r"holds 400,000 samples, the limit is 100,000"):
        encoded(encoder, voxtral, content.getvalue())


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 300), pytest.param(1, 2000, marks=pytest.mark.slow)]
)
def test_mutated_files_are_decoded_or_refused(voxtral: Case, seed: int, count: int) -> None:
    generator = random.Random(seed)
    files = [wav_of(samples_of(0.02)), float_wav_of(samples_of(0.02) / np.float32(32768))]
    encoder = another(voxtral, limits=SoundLimits(file=AudioLimits(seconds=1.0)), cached_bytes=0)
    outcomes = {"decoded": 0, "refused": 0}
    for _ in range(count):
        content = bytearray(generator.choice(files))
        for _ in range(generator.randint(1, 4)):
            # Most mutations hit the header.
            size = 44 if generator.random() < 0.8 else len(content)
            content[generator.randrange(size)] = generator.choice(
                [0, 1, 127, 255, generator.randrange(256)]
            )
        if generator.random() < 0.3:
            del content[generator.randrange(len(content)) :]
        try:
            run = encoded(encoder, voxtral, bytes(content))
        except RequestError:
            outcomes["refused"] += 1
        else:
            assert run.embeddings.isfinite().all()
            outcomes["decoded"] += 1
    assert min(outcomes.values()) > count // 10, outcomes
