"""Tokens and settings of a tokenizer that stand beside tokenizer.json.

They are applied to the ``Tokenizer`` of the tokenizers library as AutoTokenizer of transformers 5
applies them, without importing transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from tokenizers import AddedToken, Tokenizer

from interposer.errors import CheckpointError
from interposer_models._checkpoint.checkpoint import read_json

_CONFIG = "tokenizer_config.json"
_SPECIAL_MAP = "special_tokens_map.json"
_ADDED = "added_tokens.json"
_EXTRA = "extra_special_tokens"
_OLDER_EXTRA = "additional_special_tokens"
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# These classes of transformers run the pipeline of tokenizer.json as it is.
_GENERIC_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"}
_LLAMA_CLASSES = {"LlamaTokenizer", "CodeLlamaTokenizer"}


@dataclass(frozen=True)
class TokenizerSettings:
    """The fields beside a tokenizer.json, and the files that they stand in.

    Attributes:
        fields: of tokenizer_config.json.
        special_map: of special_tokens_map.json; transformers does not read it where
            tokenizer_config.json has ``added_tokens_decoder``.
        added: ids by text, of added_tokens.json, which is read under the same condition.
        path: the folder of these files, or the one file that holds them all.
    """

    fields: Mapping[str, Any]
    special_map: Mapping[str, Any]
    added: Mapping[str, Any]
    path: Path

    @classmethod
    def of_folder(cls, path: Path) -> TokenizerSettings:
        """Read the files of a model directory.

        Raises: CheckpointError: a file is no JSON object.
        """
        fields = _read(path / _CONFIG)
        if fields.get("added_tokens_decoder") is not None:
            return cls(fields, {}, {}, path)
        return cls(fields, _read(path / _SPECIAL_MAP), _read(path / _ADDED), path)

    @property
    def splits_special_tokens(self) -> bool:
        """Whether the texts of special tokens in a prompt are encoded as any other text."""
        return self._flag("split_special_tokens")

    @property
    def eos_token(self) -> str | None:
        """The text of the end token.

        Raises: CheckpointError: it is neither a text nor a token.
        """
        token = self._named().get("eos_token")
        return None if token is None else str(token)

    def cleans_up(self, tokenizer: Tokenizer) -> bool:
        """Say whether spaces before punctuation are removed from decoded texts.

        transformers ignores the setting for BPE tokenizers, unless another one insists.
        """
        insists = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_bpe = type(tokenizer.model).__name__ == "BPE"
        return self._flag("clean_up_tokenization_spaces") and (not is_bpe or self._flag(insists))

    def needs_transformers(self, tokenizer: Tokenizer) -> bool:
        """Say whether transformers builds another pipeline than that of tokenizer.json.

        Some of its classes build their own pipeline and give it ``add_prefix_space``. Those of
        Llama put a space in front of the text alone, where a ``Prepend`` step puts one after each
        special token too. ``fix_mistral_regex`` replaces a regular expression.
        """
        if self._flag("fix_mistral_regex"):
            return True
        class_name = str(self.fields.get("tokenizer_class"))
        if class_name in _GENERIC_CLASSES:
            return False
        steps = list(_steps(tokenizer))
        if class_name.removesuffix("Fast") in _LLAMA_CLASSES and _has_prepend(steps):
            return True
        prefix = self.fields.get("add_prefix_space")
        return prefix is not None and self._flag("add_prefix_space") != _adds_prefix_space(steps)

    def apply(self, tokenizer: Tokenizer) -> None:
        """Add the tokens that the tokenizer lacks, and let it split special tokens if asked for.

        Raises: CheckpointError: a field is of a wrong type, or a token would get another id than
            the one that its file states.
        """
        tokenizer.encode_special_tokens = self.splits_special_tokens
        known = tokenizer.get_added_tokens_decoder()
        known_texts = {token.content for token in known.values()}
        unchanged = {repr(token) for token in known.values()}
        stated_ids = self._by_id()
        by_text = {token.content: token for token in stated_ids.values()}
        if self.fields.get("added_tokens_decoder") is None:
            # transformers adds those of tokenizer.json again; named ones become special by it.
            by_text |= {token.content: token for token in known.values()}
        named = self._named()
        missing = dict(by_text)
        for token in (*named.values(), *self._extra()):
            if token.content not in known_texts:
                missing.setdefault(token.content, token)
        special_texts = {token.content for token in named.values()}
        for text, token in missing.items():
            token.special = token.special or text in special_texts
        added = [token for token in missing.values() if repr(token) not in unchanged]
        new_ids = {
            token.content: index
            for index, token in stated_ids.items()
            if tokenizer.token_to_id(token.content) is None
        }
        if added:
            tokenizer.add_tokens(added)
        for text, index in new_ids.items():
            if (actual := tokenizer.token_to_id(text)) != index:
                file = _CONFIG if self.fields.get("added_tokens_decoder") else _ADDED
                raise CheckpointError(
                    self._file(file),
                    f"the token {text!r:.100} has the id {index}, but follows the vocabulary of "
                    f"tokenizer.json with the id {actual}",
                    "add the token to tokenizer.json with its id",
                )

    def _by_id(self) -> dict[int, AddedToken]:
        """Return the tokens whose ids are stated, in the order of the ids."""
        decoder = self.fields.get("added_tokens_decoder")
        if decoder is not None:
            field = "added_tokens_decoder"
            if not isinstance(decoder, Mapping):
                self._refuse(_CONFIG, field, decoder, "an object of tokens by id")
            tokens = {
                self._id(_CONFIG, field, index): self._token(_CONFIG, f"{field}[{index}]", value)
                for index, value in decoder.items()
            }
            return dict(sorted(tokens.items()))
        named = self._named()
        special_texts = {named[name].content for name in _NAMES if name in named}
        special_texts |= {token.content for token in self._newer_extra()}
        tokens = {}
        for text, index in self.added.items():
            special = text in special_texts
            token = AddedToken(text, normalized=not special, special=special)
            tokens[self._id(_ADDED, text, index)] = token
        return dict(sorted(tokens.items()))

    def _named(self) -> dict[str, AddedToken]:
        """Return the tokens that have a role, such as ``bos_token`` or ``image_token``."""
        tokens: dict[str, AddedToken] = {}
        for file, fields in ((_CONFIG, self.fields), (_SPECIAL_MAP, self.special_map)):
            for name, value in fields.items():
                if name in _NAMES and value is None:
                    tokens.pop(name, None)
                elif name in _NAMES or (name.endswith("_token") and _resembles_token(value)):
                    tokens[name] = self._token(file, name, value)
            extra = fields.get(_EXTRA)
            for name, value in extra.items() if isinstance(extra, Mapping) else ():
                tokens[name] = self._token(file, f"{_EXTRA}.{name}", value)
        return tokens

    def _extra(self) -> list[AddedToken]:
        """Return the special tokens without a role."""
        tokens = self._newer_extra()
        # A list of the newer name hides that of the older one, even if it is empty.
        if tokens or isinstance(self.fields.get(_EXTRA), list):
            return tokens
        return self._several(_SPECIAL_MAP, self.special_map, _OLDER_EXTRA)

    def _newer_extra(self) -> list[AddedToken]:
        """Return those of ``extra_special_tokens``, or of its older name in the first file."""
        own_field = _EXTRA if self.fields.get(_EXTRA) else _OLDER_EXTRA
        tokens = self._several(_CONFIG, self.fields, own_field)
        return tokens + self._several(_SPECIAL_MAP, self.special_map, _EXTRA)

    def _several(self, file: str, fields: Mapping[str, Any], name: str) -> list[AddedToken]:
        values = fields.get(name)
        if values is None or (name == _EXTRA and isinstance(values, Mapping)):
            return []  # a mapping gives each token a role
        if not isinstance(values, list):
            self._refuse(file, name, values, "a list of tokens")
        return [self._token(file, f"{name}[{at}]", value) for at, value in enumerate(values)]

    def _token(self, file: str, field: str, value: Any) -> AddedToken:
        if isinstance(value, str):
            return AddedToken(value, special=True)
        if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
            self._refuse(file, field, value, "a text, or an object with a text as its content")
        flags = {name: value[name] for name in _FLAGS if value.get(name) is not None}
        if file == _SPECIAL_MAP:
            flags["special"] = True
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                self._refuse(file, f"{field}.{name}", flag, "true or false")
        return AddedToken(value["content"], **flags)

    def _id(self, file: str, field: str, value: Any) -> int:
        text = str(value)
        if isinstance(value, bool) or not (text.isascii() and text.isdecimal()):
            self._refuse(file, field, value, "a token id")
        return int(text)

    def _flag(self, name: str) -> bool:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            self._refuse(_CONFIG, name, value, "true or false")
        return bool(value)

    def _file(self, name: str) -> Path:
        return self.path / name if self.path.is_dir() else self.path

    def _refuse(self, file: str, field: str, value: Any, allowed: str) -> Never:
        raise CheckpointError(
            self._file(file), f"{field} is {value!r:.100}, must be {allowed}", "mend the field"
        )


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _resembles_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def _steps(tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each normalizer and pre-tokenizer of a pipeline."""
    parts = [tokenizer.normalizer, tokenizer.pre_tokenizer]
    pending = [json.loads(part.__getstate__()) for part in parts if part is not None]
    while pending:
        step = pending.pop(0)
        yield step
        pending += step.get("normalizers", []) + step.get("pretokenizers", [])


def _has_prepend(steps: list[Mapping[str, Any]]) -> bool:
    return any(step["type"] == "Prepend" for step in steps)


def _adds_prefix_space(steps: list[Mapping[str, Any]]) -> bool:
    """Say whether a pipeline puts a space in front of a text."""
    return _has_prepend(steps) or any(
        step.get("add_prefix_space", False) or step.get("prepend_scheme", "never") != "never"
        for step in steps
    )
