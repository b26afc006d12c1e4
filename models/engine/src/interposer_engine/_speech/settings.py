"""Settings of a speech model: languages, tasks and special tokens, and the form of its features.

Source: generation_config.json, preprocessor_config.json or processor_config.json, and the tokenizer
    of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer.errors import CheckpointError, RequestError, near_names
from interposer_engine._speech.features import LogMel
from interposer_engine._speech.languages import language_codes, language_names
from interposer_engine._speech.rules import TranscriptRules

TASKS = ("transcribe", "translate")
# Models with fewer tokens know English only.
_MULTILINGUAL_VOCABULARY = 51865
# Encoder positions per frame: the second convolution halves the number of frames.
_FRAMES_PER_POSITION = 2


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    """Tokens of a speech model, and the sounds that its encoder reads.

    Attributes:
        log_mel: Computes the features of samples.
        num_frames: Frames of a window, which the encoder reads at once.
        start_token, end_token: First token of the decoder, and end token.
        previous_token: Token before the text of the preceding window; None without one.
        no_timestamps: Token that says that no timestamps follow; None for a model without any.
        no_speech: Token that says that the window holds no speech; None without one.
        languages: Language tokens by code, such as "en"; empty for a model of English only.
        tasks: Task tokens by name.
        language: Code of the only language of the checkpoint; None to detect the language.
        suppressed, suppressed_first, latest_start: See ``TranscriptRules``.
    """

    log_mel: LogMel
    num_frames: int
    start_token: int
    end_token: int
    previous_token: int | None
    no_timestamps: int | None
    no_speech: int | None
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    language: str | None
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    latest_start: int | None

    @classmethod
    def read(
        cls,
        path: Path,
        fields: Mapping[str, Any],
        vocabulary: Mapping[str, int],
        feature_shape: tuple[int, int],
        vocab_size: int,
    ) -> SpeechSettings:
        """Read the settings of a checkpoint.

        Args:
            path: Folder of the checkpoint.
            fields: Fields of generation_config.json.
            vocabulary: Token ids by text.
            feature_shape: Mel bins of a frame, and frames of a window.
        Raises: CheckpointError: there is no start or end token, or a field holds no tokens.
        """
        log_mel = LogMel.read(path, feature_shape[0])
        end_tokens = fields.get("eos_token_id")
        tokens = {
            "decoder_start_token_id": fields.get(
                "decoder_start_token_id", vocabulary.get("<|startoftranscript|>")
            ),
            "eos_token_id": end_tokens[0] if isinstance(end_tokens, list) else end_tokens,
        }
        for name, token in tokens.items():
            if type(token) is not int or not 0 <= token < vocab_size:
                raise CheckpointError(
                    path,
                    f"{name} is {token!r}, must be a token of {vocab_size}",
                    "correct generation_config.json",
                )
        languages = _by_name(fields.get("lang_to_id")) or {
            code: vocabulary[f"<|{code}|>"]
            for code in language_names()
            if f"<|{code}|>" in vocabulary
        }
        tasks = _by_name(fields.get("task_to_id")) or {
            task: vocabulary[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in vocabulary
        }
        is_multilingual = fields.get("is_multilingual", vocab_size >= _MULTILINGUAL_VOCABULARY)
        if not is_multilingual:
            languages, tasks = {}, {}
        no_timestamps = fields.get("no_timestamps_token_id", vocabulary.get("<|notimestamps|>"))
        no_speech = vocabulary.get("<|nospeech|>", vocabulary.get("<|nocaptions|>"))
        if no_speech is None and no_timestamps is not None:
            no_speech = no_timestamps - 1
        return cls(
            log_mel=log_mel,
            num_frames=feature_shape[1],
            start_token=tokens["decoder_start_token_id"],
            end_token=tokens["eos_token_id"],
            previous_token=fields.get("prev_sot_token_id", vocabulary.get("<|startofprev|>")),
            no_timestamps=no_timestamps,
            no_speech=no_speech,
            languages=languages,
            tasks=tasks,
            language=_fixed_language(fields, languages),
            suppressed=_token_ids(path, "suppress_tokens", fields, vocab_size),
            suppressed_first=_token_ids(path, "begin_suppress_tokens", fields, vocab_size),
            latest_start=fields.get("max_initial_timestamp_index"),
        )

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return self.num_frames * self.log_mel.hop_size

    @property
    def frame_seconds(self) -> float:
        """Duration from one frame to the next."""
        return self.log_mel.hop_size / self.log_mel.sampling_rate

    @property
    def first_timestamp(self) -> int | None:
        """The token of timestamp 0; None for a model without timestamps."""
        return None if self.no_timestamps is None else self.no_timestamps + 1

    def code_of(self, language: str) -> str:
        """Return the code of a language, which is given by code or English name.

        Raises: RequestError: the model does not know the language.
        """
        if not isinstance(language, str):
            raise RequestError(f"language is {language!r}, must be a text, such as 'en'")
        code = language.lower()
        if not self.languages:
            if code in ("en", "english"):
                return "en"
            raise RequestError(
                f"language is {language!r}, but the model knows English only. "
                "Try: a multilingual model"
            )
        if code not in self.languages:
            code = language_codes().get(code, code)
        if code not in self.languages:
            near = near_names(language.lower(), [*self.languages, *language_codes()])
            raise RequestError(
                f"language is {language!r}, which the model does not know; similar ones are "
                f"{near}. Try: a code such as {next(iter(self.languages))!r}, or None to detect it"
            )
        return code

    def rules(self, language: str | None, task: str, *, timestamps: bool) -> TranscriptRules:
        """Return the rules for a window's tokens.

        Args:
            language: Code of the language; None to detect it.
        Raises: RequestError: the model has no token for the task, or no timestamps.
        """
        start: list[tuple[int, ...]] = []
        if self.languages:
            codes = self.languages if language is None else [language]
            start.append(tuple(self.languages[code] for code in codes))
        if task in self.tasks:
            start.append((self.tasks[task],))
        elif task != "transcribe":
            raise RequestError(
                f"task is {task!r}, which the model was not trained for; it knows "
                f"{[*self.tasks] or ['transcribe']}. Try: a multilingual model"
            )
        suppressed = self.suppressed
        if timestamps:
            if self.no_timestamps is None:
                raise RequestError("The model has no timestamps. Try: timestamps=False")
            suppressed += (self.no_timestamps,)
        elif self.no_timestamps is not None:
            start.append((self.no_timestamps,))
        return TranscriptRules(
            start=tuple(start),
            suppressed=suppressed,
            suppressed_first=self.suppressed_first,
            end_token=self.end_token,
            first_timestamp=self.first_timestamp if timestamps else None,
            latest_start=self.latest_start,
            no_speech=self.no_speech,
        )


def _token_ids(
    path: Path, name: str, fields: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    value = fields.get(name) or []
    if not isinstance(value, list) or not all(
        type(token) is int and 0 <= token < vocab_size for token in value
    ):
        raise CheckpointError(
            path,
            f"{name} is {value!r:.100}, must be a list of tokens of {vocab_size}",
            "correct generation_config.json",
        )
    return tuple(value)


def _by_name(tokens: Any) -> dict[str, int]:
    """Return token ids by name, such as "en" for the key "<|en|>" of a checkpoint's table."""
    if not isinstance(tokens, Mapping):
        return {}
    return {str(name).removeprefix("<|").removesuffix("|>"): id_ for name, id_ in tokens.items()}


def _fixed_language(fields: Mapping[str, Any], languages: Mapping[str, int]) -> str | None:
    """Return the code of the language that a checkpoint states for all sounds."""
    language = fields.get("language")
    if isinstance(language, str):
        code = language.lower().removeprefix("<|").removesuffix("|>")
        code = code if code in languages else language_codes().get(code, code)
        return code if code in languages else None
    # Checkpoints before the field ``language`` list pairs of a position and a token.
    forced = fields.get("forced_decoder_ids")
    pairs = [pair for pair in forced or () if isinstance(pair, list) and pair[:1] == [1]]
    tokens = {pair[-1] for pair in pairs}
    return next((code for code, token in languages.items() if token in tokens), None)
