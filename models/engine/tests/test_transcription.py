"""Transcription: texts, times and languages are those of transformers and of the paper."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models.engine.tests.test_audio import wav
from models.engine.tests.test_bad_checkpoints import edit_json
from models.tests.speech_checkpoints import POSITIONS, TOKENS, write_speech_model
from transformers import WhisperFeatureExtractor

from interposer import explain
from interposer.errors import CheckpointError, RequestError, UnknownNameError
from interposer_engine import (
    AsyncLanguageModel,
    Completion,
    EncoderFeatures,
    LanguageModel,
    SamplingParams,
    Transcript,
    TranscriptSegment,
    load,
)
from interposer_engine.parts import TranscriptRules

RATE = 16000
PLAIN: dict[str, Any] = {
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
    "condition_on_previous": False,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a model with windows of one second, and transformers' model of it."""
    path = tmp_path_factory.mktemp("whisper")
    return path, write_speech_model(path)


@pytest.fixture(scope="module")
def lm(pair: tuple[Path, Any]) -> LanguageModel:
    return load(pair[0], "float32", platform="cpu", cache_tokens=640)


def sound(seconds: float, seed: int = 1) -> torch.Tensor:
    """Return noise that becomes louder."""
    count = round(seconds * RATE)
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return noise * torch.linspace(0.05, 1, count)


def transcribe_by_transformers(model: Any, samples: torch.Tensor, **options: Any) -> Any:
    """Return the output of transformers: for a long sound, its segments; else its tokens."""
    extractor = WhisperFeatureExtractor(chunk_length=1)
    extracted = extractor(
        samples.numpy(), sampling_rate=RATE, return_tensors="pt", truncation=False
    )
    with torch.inference_mode():
        return model.generate(extracted.input_features, max_new_tokens=20, **options)


def segments_of(output: Any) -> list[tuple[float, float, list[int]]]:
    """Return start, end and text tokens of each segment of transformers' output."""
    return [
        (
            round(float(segment["start"]), 3),
            round(float(segment["end"]), 3),
            [token for token in segment["tokens"].tolist() if token < TOKENS["<|endoftext|>"]],
        )
        for segment in output["segments"][0]
    ]


def found(segments: Any) -> list[tuple[float, float, list[int]]]:
    end = TOKENS["<|endoftext|>"]
    return [
        (round(s.start, 3), round(s.end, 3), [token for token in s.token_ids if token < end])
        for s in segments
    ]


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"language": "en"}, {"language": "en", "task": "transcribe"}),
        ({"language": "de", "task": "translate"}, {"language": "de", "task": "translate"}),
        (
            {"language": "en", "condition_on_previous": True},
            {"language": "en", "task": "transcribe", "condition_on_prev_tokens": True},
        ),
        ({}, {"task": "transcribe"}),
    ],
    ids=["transcribe", "translate", "previous text", "detected language"],
)
def test_segments_of_a_long_sound_equal_those_of_transformers(
    pair: tuple[Path, Any], lm: LanguageModel, options: Any, theirs: Any
) -> None:
    samples = sound(2.7)
    transcript = lm.transcribe(samples, sampling_rate=RATE, **{**PLAIN, **options})
    output = transcribe_by_transformers(
        pair[1], samples, return_timestamps=True, return_segments=True, temperature=0.0, **theirs
    )
    expected = segments_of(output)
    assert found(transcript.segments) == expected
    assert len(expected) > 2
    assert transcript.duration == pytest.approx(2.7)
    assert transcript.language in ("en", "de", "fr")


@pytest.mark.parametrize("language", ["en", None])
def test_texts_without_timestamps_equal_those_of_transformers(
    pair: tuple[Path, Any], lm: LanguageModel, language: str | None
) -> None:
    samples = sound(1.0, seed=4)
    options = {"language": language, "task": "transcribe", "return_timestamps": False}
    expected = transcribe_by_transformers(pair[1], samples, **options)[0].tolist()
    transcript = lm.transcribe(
        samples, sampling_rate=RATE, language=language, timestamps=False, **PLAIN
    )
    (segment,) = transcript.segments
    # The models of both sides write until their limits, which differ.
    assert list(segment.token_ids[:20]) == expected[:20]
    assert (segment.start, segment.end) == (0.0, 1.0)
    text_ids = [token for token in segment.token_ids if token < TOKENS["<|endoftext|>"]]
    assert transcript.text == lm.tokenizer.decode(text_ids).strip()


def test_windows_without_speech_are_skipped_as_by_transformers(
    pair: tuple[Path, Any], lm: LanguageModel
) -> None:
    samples = sound(2.7)
    every = lm.transcribe(samples, sampling_rate=RATE, language="en", **PLAIN).segments
    assert len(every) > 2
    probabilities = sorted({segment.no_speech_probability for segment in every})
    threshold = sum(probabilities[1:3]) / 2
    options = {**PLAIN, "logprob_threshold": 0.0, "no_speech_threshold": threshold}
    transcript = lm.transcribe(samples, sampling_rate=RATE, language="en", **options)
    output = transcribe_by_transformers(
        pair[1],
        samples,
        return_timestamps=True,
        return_segments=True,
        language="en",
        task="transcribe",
        temperature=0.0,
        logprob_threshold=0.0,
        no_speech_threshold=threshold,
    )
    assert found(transcript.segments) == segments_of(output)
    assert 0 < len(transcript.segments) < len(every)
    options["no_speech_threshold"] = 0.0
    silent = lm.transcribe(samples, sampling_rate=RATE, language="en", **options)
    assert (silent.text, silent.segments) == ("", ())


def test_bad_texts_are_decoded_again_at_higher_temperatures(lm: LanguageModel) -> None:
    samples = sound(0.4)
    options: dict[str, Any] = {**PLAIN, "temperature": (0.0, 0.8), "seed": 3}
    (greedy, *_) = lm.transcribe(samples, sampling_rate=RATE, **options).segments
    assert greedy.temperature == 0.0
    for limit in ({"logprob_threshold": 0.0}, {"compression_ratio_threshold": 0.0}):
        transcript = lm.transcribe(samples, sampling_rate=RATE, **{**options, **limit})
        # No text is good enough: the last temperature stays.
        assert {segment.temperature for segment in transcript.segments} == {0.8}
    again = lm.transcribe(samples, sampling_rate=RATE, **{**options, "logprob_threshold": 0.0})
    assert (
        again.segments
        == lm.transcribe(
            samples, sampling_rate=RATE, **{**options, "logprob_threshold": 0.0}
        ).segments
    )


def test_a_window_is_encoded_once_for_all_temperatures(pair: tuple[Path, Any]) -> None:
    model = load(pair[0], "float32", platform="cpu", cache_tokens=128)
    num_encoded: list[int] = []
    convolution = model.engine.model.encoder.conv1
    convolution.register_forward_hook(lambda _, inputs, __: num_encoded.append(len(inputs[0])))
    options: dict[str, Any] = {**PLAIN, "logprob_threshold": 0.0, "seed": 3}
    options["temperature"] = (0.0, 0.4, 0.8)

    def transcribe(seed: int) -> Transcript:
        return model.transcribe(sound(0.4, seed), sampling_rate=RATE, **options)

    first = transcribe(1)
    assert {segment.temperature for segment in first.segments} == {0.8}
    assert num_encoded == [1]
    # Other sounds take the pages, and new weights make keys and values useless.
    for seed in (2, 3):
        transcribe(seed)
    assert transcribe(1) == first
    assert num_encoded == [1] * 4
    model.update_weights(pair[0])
    assert transcribe(1) == first
    assert num_encoded == [1] * 5
    # Another client's time would tell that somebody has sent the sound.
    options["cache_salt"] = "other"
    assert transcribe(1) == first
    assert num_encoded == [1] * 6


@pytest.mark.slow
def test_several_sounds_at_once_have_the_texts_of_each_alone(pair: tuple[Path, Any]) -> None:
    model = load(pair[0], "float32", platform="cpu", cache_tokens=192, max_sequences=3)
    sounds = [sound(1.4, seed) for seed in range(4)]
    alone = [model.transcribe(each, sampling_rate=RATE, **PLAIN) for each in sounds]
    together: dict[int, Transcript] = {}

    def run(index: int) -> None:
        together[index] = model.transcribe(sounds[index], sampling_rate=RATE, **PLAIN)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(4)] == alone


def test_coroutines_take_features_as_prompts(lm: LanguageModel) -> None:
    features = EncoderFeatures(torch.ones(80, 2 * POSITIONS), (TOKENS["<|startoftranscript|>"],))
    expected = lm.generate([features], max_new_tokens=5)

    async def generate() -> list[Completion]:
        async with AsyncLanguageModel(lm) as model:
            return await model.generate([features], max_new_tokens=5)

    assert asyncio.run(generate()) == expected


def test_segments_stream_while_the_rest_is_decoded(lm: LanguageModel) -> None:
    file = wav(sound(1.3) / 5)
    transcript = lm.transcribe(file, **PLAIN)
    stream = lm.transcribe_stream(file, **PLAIN)
    windows = iter(stream)
    first = next(windows)
    assert first == transcript.segments[: len(first)] != transcript.segments
    assert stream.transcript.segments == first
    assert stream.duration == pytest.approx(1.3)
    assert not lm.engine.busy
    assert [*windows]
    assert stream.transcript == transcript


def test_a_prompt_is_context_of_the_first_window(lm: LanguageModel) -> None:
    samples = sound(0.9)
    plain = lm.transcribe(samples, sampling_rate=RATE, **PLAIN)
    prompted = lm.transcribe(samples, sampling_rate=RATE, prompt="names, terms", **PLAIN)
    assert prompted.segments[0].mean_logprob != plain.segments[0].mean_logprob
    # The language is detected without the prompt.
    assert prompted.language == plain.language
    longest = lm.transcribe(samples, sampling_rate=RATE, prompt="x" * 1000, **PLAIN)
    assert longest.segments


def test_a_checkpoint_can_state_the_language(pair: tuple[Path, Any], tmp_path: Path) -> None:
    german: dict[str, Any] = {"language": "german", "task": "transcribe"}
    forced: dict[str, Any] = {
        "forced_decoder_ids": [[1, TOKENS["<|de|>"]], [2, TOKENS["<|transcribe|>"]]]
    }
    for index, fields in enumerate((german, forced)):
        path = tmp_path / str(index)
        path.mkdir()
        write_speech_model(path, generation=fields)
        model = load(path, "float32", platform="cpu", cache_tokens=128)
        assert model.transcribe(sound(0.5), sampling_rate=RATE, **PLAIN).language == "de"


def test_a_model_of_english_only_has_no_language_tokens(tmp_path: Path) -> None:
    own = write_speech_model(
        tmp_path,
        generation={"is_multilingual": False, "lang_to_id": None, "task_to_id": None},
    )
    model = load(tmp_path, "float32", platform="cpu", cache_tokens=128)
    samples = sound(1.3)
    transcript = model.transcribe(samples, sampling_rate=RATE, **PLAIN)
    output = transcribe_by_transformers(
        own, samples, return_timestamps=True, return_segments=True, temperature=0.0
    )
    assert found(transcript.segments) == segments_of(output)
    assert transcript.language == "en"
    assert model.transcribe(samples, sampling_rate=RATE, language="English", **PLAIN) == transcript
    with pytest.raises(RequestError, match="language is 'de', but the model knows English only"):
        model.transcribe(samples, sampling_rate=RATE, language="de")
    with pytest.raises(RequestError, match="task is 'translate', which the model was not trained"):
        model.transcribe(samples, sampling_rate=RATE, task="translate")


def test_settings_of_a_checkpoint_that_are_no_tokens_are_refused(
    pair: tuple[Path, Any], tmp_path: Path
) -> None:
    for file in pair[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for fields, reason in (
        ({"suppress_tokens": [10**6]}, r"suppress_tokens is \[1000000\], must be a list of tokens"),
        ({"begin_suppress_tokens": "all"}, "begin_suppress_tokens is 'all', must be a list"),
    ):
        edit_json(tmp_path / "generation_config.json", suppress_tokens=None)
        edit_json(tmp_path / "generation_config.json", **fields)
        model = load(tmp_path, "float32", platform="cpu", cache_tokens=128)
        with pytest.raises(CheckpointError, match=reason):
            model.transcribe(sound(0.1), sampling_rate=RATE)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"language": "english"}, ""),
        ({"language": "Klingon"}, r"'Klingon', which the model does not know; similar ones are"),
        ({"language": 7}, "language is 7, must be a text"),
        ({"task": "summarize"}, r"task is 'summarize', must be one of \['transcribe', 'trans"),
        ({"timestamps": 1}, "timestamps is 1, must be True or False"),
        ({"temperature": ()}, "temperature is empty. Try: temperature=0.0"),
        ({"temperature": (0.0, -1.0)}, "temperature is -1.0; allowed is"),
        ({"prompt": None}, "prompt is None, must be a text"),
        ({"logprob_threshold": "high"}, "logprob_threshold is 'high', must be a number or None"),
        ({"beam_size": 5}, "beam_size"),
    ],
    ids=str,
)
def test_unusable_settings_are_refused(
    lm: LanguageModel, settings: dict[str, Any], reason: str
) -> None:
    if not reason:
        assert lm.transcribe(sound(0.1), sampling_rate=RATE, **{**PLAIN, **settings})
        return
    with pytest.raises((RequestError, UnknownNameError), match=reason):
        lm.transcribe_stream(sound(0.1), sampling_rate=RATE, **settings)
    assert not lm.engine.busy


def test_a_model_of_texts_transcribes_nothing(llama: Path) -> None:
    model = load(llama, "float32", platform="cpu", cache_tokens=64)
    with pytest.raises(RequestError, match=r"reads text, no sounds. Try: a checkpoint of Whisper"):
        model.transcribe(sound(0.1), sampling_rate=RATE)


def test_rules_that_the_vocabulary_cannot_follow_are_refused(lm: LanguageModel) -> None:
    for rules, reason in (
        (TranscriptRules(suppressed=(10**6,)), "names the token 1000000, which is outside"),
        (TranscriptRules(start=((),)), "has an empty tuple in start"),
    ):
        features = EncoderFeatures(torch.zeros(80, 2 * POSITIONS))
        with pytest.raises(RequestError, match=reason):
            lm.generate([features], SamplingParams(transcript=rules))


def test_the_plan_notes_no_settings_that_transcripts_apply(lm: LanguageModel) -> None:
    assert not [note for note in explain(lm).notes if "suppress_tokens" in note]


def test_a_transcript_becomes_subtitles() -> None:
    segments = [
        TranscriptSegment(start, end, text, (), 0.0, "en", 0.0, -0.5, 1.2, 0.1)
        for start, end, text in ((0.0, 1.5, " One --> two."), (3599.9996, 3661.25, " A\n\nB "))
    ]
    transcript = Transcript.of(segments, 3662.0, "transcribe")
    assert transcript.text == "One --> two. A\n\nB"
    assert transcript.language_name == "english"
    assert transcript.to_srt() == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne --> two.\n\n2\n01:00:00,000 --> 01:01:01,250\nA\nB\n"
    )
    assert transcript.to_vtt() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne -> two.\n\n"
        "01:00:00.000 --> 01:01:01.250\nA\nB\n"
    )
    assert transcript.to_dict()["segments"][0]["text"] == " One --> two."
