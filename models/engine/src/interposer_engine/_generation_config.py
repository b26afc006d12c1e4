"""Generation settings of a checkpoint: end tokens, start tokens, sampling parameters.

Source: ``generation_config.json``, or in ``config.json`` of checkpoints that transformers wrote
    before release 4.26.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer.errors import CheckpointError, RequestError
from interposer_engine._added_tokens import TokenizerSettings
from interposer_engine._checkpoint.files import read_json
from interposer_engine._sampling_fields import Suggested
from interposer_engine._sampling_params import SamplingParams, marked_fields
from interposer_engine._tokenizer import TextTokenizer

_FILE = "generation_config.json"
_LARGEST_VOCABULARY = 2**24

# Settings of transformers that change its answers and have no equivalent here, with the values
# that have no effect. A null never has an effect.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "bad_words_ids": (),
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": (),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
# Rules of a transcript, which ``LanguageModel.transcribe`` applies.
_APPLIED_TO_TRANSCRIPTS = {"begin_suppress_tokens", "suppress_tokens"}
_NOT_APPLIED_TO_DECODERS = {"forced_bos_token_id": ()}
_NOT_APPLIED_TO_SAMPLES: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "typical_p": (1,),
}


def stop_tokens(path: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the ids of the tokens that end a generation.

    Source: ``eos_token_id`` of generation_config.json, else of config.json, else ``eos_token`` of
        tokenizer_config.json or special_tokens_map.json. A null counts as absent.

    Raises: CheckpointError: a value is not a token.
    """
    for name, fields in (_FILE, _generation(path)), ("config.json", config):
        value = fields.get("eos_token_id")
        if value is not None:
            return end_token_ids(value, path / name if path.is_dir() else path)
    return _stop_tokens_of_tokenizer(path, tokenizer)


def end_token_ids(value: Any, file: object) -> frozenset[int]:
    """Return the ids in a value of ``eos_token_id``, which is one id or a list.

    Args:
        file: File of the value, for error texts.
    Raises: CheckpointError: the value is something else.
    """
    ids = value if isinstance(value, list | tuple) else [value]
    # Models with a reduced vocabulary often keep end ids beyond it, so only the range is checked.
    if not all(type(i) is int and 0 <= i < _LARGEST_VOCABULARY for i in ids):
        reason = (
            f"eos_token_id is {value!r}, must be an integer or a list of them, "
            f"from 0 to {_LARGEST_VOCABULARY - 1}"
        )
        raise CheckpointError(file, reason, "state the id of the end token, or null")
    return frozenset(ids)


def _stop_tokens_of_tokenizer(path: Path, tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the id of ``eos_token`` in the tokenizer's files; empty if no known token is named.

    Raises: CheckpointError: the field is neither a text nor a token.
    """
    text = TokenizerSettings.of_folder(path).eos_token
    token_id = None if text is None else tokenizer.vocabulary.get(text)
    return frozenset() if token_id is None else frozenset({token_id})


def start_tokens(path: Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the tokens with which the decoder of an encoder-decoder starts.

    The first id is ``decoder_start_token_id``, else ``bos_token_id``. ``forced_bos_token_id``
    follows if the checkpoint has one.

    Raises: CheckpointError: there is no first id, or an id is not a token.
    """
    # Later files have priority: the decoder's config, config.json, then generation_config.json.
    decoder = config.get("decoder")
    files = decoder if isinstance(decoder, dict) else {}, config, _generation(path)
    settings = {n: value for file in files for n, value in file.items() if value is not None}
    names = ("decoder_start_token_id", "bos_token_id")
    used_names = [name for name in names if settings.get(name) is not None][:1]
    if not used_names:
        reason = "names no decoder_start_token_id, with which the decoder starts"
        raise CheckpointError(path, reason, "add it to generation_config.json")
    if settings.get("forced_bos_token_id") is not None:
        used_names.append("forced_bos_token_id")
    for name in used_names:
        if type(settings[name]) is not int or not 0 <= settings[name] < vocab_size:
            reason = f"{name} is {settings[name]!r}, must be a token of {vocab_size}"
            raise CheckpointError(path, reason, "correct generation_config.json or config.json")
    return tuple(settings[name] for name in used_names)


@dataclass(frozen=True)
class GenerationSettings:
    """Sampling settings that a checkpoint or a transformers model suggests.

    Attributes:
        source: Origin of the settings, for errors and notes.
        stated: Values by name.
    """

    source: object
    stated: Mapping[str, Any]

    @classmethod
    def of_folder(cls, path: Path) -> GenerationSettings:
        """Read the settings from generation_config.json, or else from config.json."""
        for file in path / _FILE, path / "config.json":
            if file.exists():
                return cls(file, read_json(file))
        return cls(path, {})

    @property
    def suggested(self) -> dict[str, Any]:
        """Sampling parameters that the checkpoint suggests.

        Without ``do_sample`` answers are greedy, and only some parameters have an effect.

        Raises: CheckpointError: a value is not allowed in a request.
        """
        is_sampled = self.stated.get("do_sample")
        if not isinstance(is_sampled, bool | None):
            reason = f"do_sample is {is_sampled!r}, must be true, false or null"
            mend = "state true to draw tokens, false for the likeliest"
            raise CheckpointError(self.source, reason, mend)
        suggested = {
            name: value
            for name, suggestion in marked_fields(Suggested).items()
            if (is_sampled or suggestion.for_greedy)
            and (value := self.stated.get(name)) is not None
        }
        for name, value in suggested.items():
            try:
                SamplingParams(**{name: value})
            except RequestError as error:
                raise CheckpointError(
                    self.source, str(error), f"correct {name}, or remove it"
                ) from None
        if is_sampled:
            return {"temperature": 1.0, **suggested}
        params = SamplingParams(**suggested)
        return {name: value for name, value in suggested.items() if params.is_changed(name)}

    def unapplied_note(self, *, has_encoder: bool, transcribes: bool = False) -> str | None:
        """Return a note on settings that only transformers applies; None if there are none."""
        names = {
            name: values
            for name, values in _NOT_APPLIED.items()
            if not (transcribes and name in _APPLIED_TO_TRANSCRIPTS)
        }
        if not has_encoder:
            names |= _NOT_APPLIED_TO_DECODERS
        if self.stated.get("do_sample") is True:
            names |= _NOT_APPLIED_TO_SAMPLES
        values = {name: self.stated.get(name) for name in sorted(names)}
        listed = [
            f"{name} {value!r:.60}"
            for name, value in values.items()
            if value is not None and value not in names[name]
        ]
        if not listed:
            return None
        name = self.source.name if isinstance(self.source, Path) else self.source
        return (
            f"{name} states settings that are not applied, so answers can differ from those "
            f"of transformers: {', '.join(listed)}"
        )


def _generation(path: Path) -> dict[str, Any]:
    """Return the fields of generation_config.json; empty without the file."""
    file = path / _FILE
    return read_json(file) if file.exists() else {}
