"""Transcription of sounds of any length, window by window.

A window is decoded with timestamps, cut into segments, and followed by the window that starts at
the last timestamp. A window whose text is unlikely or repeats itself is decoded again at a higher
temperature; one that probably holds no speech is skipped.

Source: arXiv:2212.04356, section 4.5.

Dimensions: S samples, M mel bins, F frames.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from interposer.errors import RequestError, UnknownNameError
from interposer_engine._encoder_features import EncoderFeatures
from interposer_engine._sampling_params import SamplingParams
from interposer_engine._speech.rules import TranscriptRules
from interposer_engine._speech.settings import TASKS, SpeechSettings
from interposer_engine._speech.transcript import TranscriptSegment, TranscriptStream

# Frames of one step of a timestamp.
_TIMESTAMP_FRAMES = 2
# A text that was drawn at a higher temperature is no context for the next window.
_MAX_CONTEXT_TEMPERATURE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """How a sound is transcribed.

    Attributes:
        language: Code or English name of the spoken language; None to detect it in the first
            window.
        task: "transcribe", or "translate" for a text in English.
        timestamps: Whether the model writes timestamps. Without them each window is one segment.
        prompt: Text that the model takes for the text before the sound, such as names or terms.
        temperature: Sampling temperatures, tried in order until the text is good enough; 0 takes
            the likeliest tokens.
        condition_on_previous: Whether the text of a window is the context of the next one.
        compression_ratio_threshold: Largest compression ratio of a good text; None for no limit.
        logprob_threshold: Smallest mean log probability of a good text; None for no limit.
        no_speech_threshold: A window is skipped if its probability of no speech is larger and its
            text is not good by ``logprob_threshold``; None never skips.
        seed: Seed of drawn tokens.
        cache_salt: Only sounds with the same salt share the cache of the encoder.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = True
    prompt: str = ""
    temperature: float | tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    condition_on_previous: bool = True
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    seed: int | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        """Check the values that no sampling parameter checks.

        Raises: RequestError: a value has another type or is out of range.
        """
        if self.task not in TASKS:
            raise RequestError(f"task is {self.task!r}, must be one of {[*TASKS]}")
        for name in ("timestamps", "condition_on_previous"):
            if type(getattr(self, name)) is not bool:
                raise RequestError(f"{name} is {getattr(self, name)!r}, must be True or False")
        if not isinstance(self.prompt, str):
            raise RequestError(f"prompt is {self.prompt!r:.100}, must be a text")
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise RequestError(f"{name} is {value!r}, must be a number or None")
        if not self.temperatures:
            raise RequestError("temperature is empty. Try: temperature=0.0")
        for temperature in self.temperatures:
            self.params(temperature)

    @classmethod
    def of(cls, settings: dict[str, Any]) -> TranscriptionOptions:
        """Return the options for given settings.

        Raises: UnknownNameError: there is no option of a name; RequestError: see above.
        """
        names = [field.name for field in fields(cls)]
        for name in settings:
            if name not in names:
                raise UnknownNameError("transcription option", name, names)
        return cls(**settings)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures in order."""
        value = self.temperature
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    def params(self, temperature: float, **more: Any) -> SamplingParams:
        """Return sampling parameters for a temperature."""
        salt = self.cache_salt
        return SamplingParams(temperature=temperature, seed=self.seed, cache_salt=salt, **more)


@dataclass(frozen=True, slots=True)
class _Window:
    """Features of a window, and its place in the sound.

    Attributes:
        features: ``[M, F]``, padded to the frames that the encoder reads.
        first_frame: Frames before the window.
        num_frames: Frames of the sound in the window.
    """

    features: Tensor
    first_frame: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The decoded tokens of a window, without start and end tokens, and their quality."""

    token_ids: tuple[int, ...]
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech_probability: float


class Transcriber:
    """Transcribes sounds with a model that reads log-mel features."""

    def __init__(self, lm: Any, settings: SpeechSettings) -> None:
        """Create a transcriber.

        Args:
            lm: A ``LanguageModel``, typed ``Any`` because that module imports this one.
        """
        self._lm = lm
        self.settings = settings
        self._log_mel = settings.log_mel
        self._context = lm.engine.model.config.max_position_embeddings

    def stream(self, samples: Tensor, options: TranscriptionOptions) -> TranscriptStream:
        """Return the segments of a sound, which are decoded as they are read.

        Args:
            samples: ``[S]`` float32, at the sampling rate of the settings.
        Raises: RequestError: the model cannot do what the options ask for.
        """
        language = self._language(options)
        # Raise for an impossible request before anything is computed.
        self.settings.rules(language, options.task, timestamps=options.timestamps)
        windows = self._windows(samples, options, language)
        return TranscriptStream(
            windows, len(samples) / self.settings.log_mel.sampling_rate, options.task
        )

    def _language(self, options: TranscriptionOptions) -> str | None:
        if options.language is not None:
            return self.settings.code_of(options.language)
        return self.settings.language if self.settings.languages else "en"

    def _windows(
        self, samples: Tensor, options: TranscriptionOptions, language: str | None
    ) -> Iterator[tuple[TranscriptSegment, ...]]:
        """Yield the segments of each window; none of a window without speech."""
        num_frames = max(1, len(samples) // self.settings.log_mel.hop_size)
        # A sound that is shorter than a window is followed by silence, as in training.
        missing_samples = max(0, self.settings.window_samples - len(samples))
        features = self._log_mel(functional.pad(samples, (0, missing_samples)))
        prompt_ids = self._text_ids(options.prompt)
        context_ids: list[int] = []
        first_frame = 0
        while first_frame < num_frames:
            window = self._window(features, first_frame, num_frames)
            context = [*prompt_ids, *context_ids]
            if language is None:
                language = self._detect(window, options) if context else None
            rules = self.settings.rules(language, options.task, timestamps=options.timestamps)
            decoded, language = self._decode(window, rules, context, options, language)
            if decoded is None:
                first_frame += window.num_frames
                yield ()
                continue
            segments, num_advanced = self._cut(decoded, window, language, rules.first_timestamp)
            for segment in segments:
                context_ids += segment.token_ids
            yield segments
            if not options.condition_on_previous or decoded.temperature > _MAX_CONTEXT_TEMPERATURE:
                prompt_ids, context_ids = [], []
            first_frame += num_advanced

    def _window(self, features: Tensor, first_frame: int, num_frames: int) -> _Window:
        size = self.settings.num_frames
        values = features[:, first_frame : first_frame + size]
        values = functional.pad(values, (0, size - values.shape[1]))
        return _Window(values, first_frame, min(size, num_frames - first_frame))

    def _detect(self, window: _Window, options: TranscriptionOptions) -> str:
        """Return the code of the language that is spoken in a window, without any context."""
        rules = self.settings.rules(None, options.task, timestamps=False)
        completion = self._generate(window, [self.settings.start_token], rules, 0.0, options, 1)
        return self._spoken(completion)

    def _spoken(self, completion: Any) -> str:
        token = completion.token_ids[0]
        return next(code for code, id_ in self.settings.languages.items() if id_ == token)

    def _decode(
        self,
        window: _Window,
        rules: TranscriptRules,
        context: Sequence[int],
        options: TranscriptionOptions,
        language: str | None,
    ) -> tuple[_Decoded | None, str]:
        """Decode a window until its text is good; return the language too.

        Returns: None instead of the tokens if the window holds no speech.
        """
        prompt = [self.settings.start_token]
        if context and self.settings.previous_token is not None:
            num_context = self._context // 2 - 1
            prompt = [self.settings.previous_token, *context[-num_context:], *prompt]
        num_new = len(rules.start) + self._context // 2
        for temperature in options.temperatures:
            completion = self._generate(window, prompt, rules, temperature, options, num_new)
            if language is None:
                language = self._spoken(completion)
                rules = replace(rules, start=((completion.token_ids[0],), *rules.start[1:]))
            decoded = self._decoded(completion, len(rules.start), temperature)
            if self._is_silent(decoded, options):
                return None, language
            if self._is_good(decoded, options):
                break
        # At the last temperature, a text stays even if it is not good.
        assert language is not None
        return decoded, language

    def _generate(
        self,
        window: _Window,
        prompt: Sequence[int],
        rules: TranscriptRules,
        temperature: float,
        options: TranscriptionOptions,
        max_new_tokens: int,
    ) -> Any:
        params = options.params(temperature, transcript=rules, max_new_tokens=max_new_tokens)
        (completion,) = self._lm.generate([EncoderFeatures(window.features, tuple(prompt))], params)
        return completion

    def _decoded(self, completion: Any, num_start: int, temperature: float) -> _Decoded:
        token_ids = completion.token_ids[num_start:]
        logprobs = completion.logprobs[num_start:]
        if token_ids[-1:] == (self.settings.end_token,):
            token_ids = token_ids[:-1]
        text = self._text(token_ids).strip().encode()
        return _Decoded(
            token_ids,
            temperature,
            sum(logprobs) / max(1, len(logprobs)),
            len(text) / len(zlib.compress(text)),
            completion.no_speech_probability or 0.0,
        )

    @staticmethod
    def _is_silent(decoded: _Decoded, options: TranscriptionOptions) -> bool:
        threshold, min_logprob = options.no_speech_threshold, options.logprob_threshold
        is_likely = min_logprob is not None and decoded.mean_logprob >= min_logprob
        return threshold is not None and decoded.no_speech_probability > threshold and not is_likely

    @staticmethod
    def _is_good(decoded: _Decoded, options: TranscriptionOptions) -> bool:
        max_ratio, min_logprob = options.compression_ratio_threshold, options.logprob_threshold
        if max_ratio is not None and decoded.compression_ratio > max_ratio:
            return False
        return min_logprob is None or decoded.mean_logprob >= min_logprob

    def _cut(
        self, decoded: _Decoded, window: _Window, language: str, first_timestamp: int | None
    ) -> tuple[tuple[TranscriptSegment, ...], int]:
        """Return the segments of a window, and the frames until the next window."""
        parts, num_advanced = _parts(decoded.token_ids, window, first_timestamp)
        seconds = self.settings.frame_seconds
        segments = []
        for first_frame, last_frame, token_ids in parts:
            text = self._text(token_ids)
            # A segment without text or duration is an artefact, and no context either.
            if first_frame < last_frame and text.strip():
                segments.append(
                    TranscriptSegment(
                        start=(window.first_frame + first_frame) * seconds,
                        end=(window.first_frame + last_frame) * seconds,
                        text=text,
                        token_ids=token_ids,
                        window_start=window.first_frame * seconds,
                        language=language,
                        temperature=decoded.temperature,
                        mean_logprob=decoded.mean_logprob,
                        compression_ratio=decoded.compression_ratio,
                        no_speech_probability=decoded.no_speech_probability,
                    )
                )
        return tuple(segments), num_advanced

    def _text_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        if not text.strip():
            return []
        with self._lm.engine.lock:  # some tokenizers are not thread-safe
            token_ids = self._lm.tokenizer.encode(" " + text.strip())
        return [token for token in token_ids if token < self.settings.end_token]

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens and timestamps."""
        with self._lm.engine.lock:  # some tokenizers are not thread-safe
            text_ids = [token for token in token_ids if token < self.settings.end_token]
            return str(self._lm.tokenizer.decode(text_ids))


def _parts(
    token_ids: tuple[int, ...], window: _Window, first_timestamp: int | None
) -> tuple[list[tuple[int, int, tuple[int, ...]]], int]:
    """Cut a window's tokens at pairs of timestamps.

    Args:
        first_timestamp: The token of timestamp 0; None for a transcript without timestamps.
    Returns: first frame, last frame and tokens of each part, counted from the start of the
        window; and the frames until the next window.
    """
    first = first_timestamp
    steps = [None if first is None or t < first else t - first for t in token_ids]
    # Two timestamps in a row: the end of a segment and the start of the next one.
    cuts = [i for i in range(1, len(steps)) if None not in steps[i - 1 : i + 1]]
    if not cuts:
        ends = [step for step in steps if step]
        last_frame = ends[-1] * _TIMESTAMP_FRAMES if ends else window.num_frames
        return [(0, last_frame, token_ids)], window.num_frames
    ends_in_one_timestamp = steps[-1] is not None and steps[-2] is None
    if ends_in_one_timestamp:
        # Nothing is said after the last segment.
        cuts.append(len(token_ids))
    parts = []
    for begin, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        frames = [(steps[at] or 0) * _TIMESTAMP_FRAMES for at in (begin, stop - 1)]
        parts.append((frames[0], frames[1], token_ids[begin:stop]))
    if ends_in_one_timestamp:
        return parts, window.num_frames
    # What follows the last pair is cut off by the end of the window, and decoded again.
    return parts, parts[-1][1]
