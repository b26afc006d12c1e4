"""Special tokens and tokenizer settings in the files next to tokenizer.json.

Both are applied to the ``Tokenizer`` of the tokenizers library as AutoTokenizer of transformers 5
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
from interposer_engine._checkpoint.files import read_json

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
_GENERIC_CLASSES = {"PreTrainedTokenizer", "TokenizersBackend"}
_LLAMA_CLASSES = {"LlamaTokenizer", "CodeLlamaTokenizer"}
_END_OF_TEXT = "<|endoftext|>"
# Tokens of classes of transformers for roles that no file gives a token.
_CLASS_TOKENS = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT),
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT),
}


@dataclass(frozen=True)
class TokenizerSettings:
    """The fields of the settings files next to a tokenizer.json.

    Attributes:
        fields: Fields of tokenizer_config.json.
        special_map: Fields of special_tokens_map.json. transformers ignores this file if
            tokenizer_config.json has ``added_tokens_decoder``.
        added: Token ids by text from added_tokens.json, which is ignored in the same case.
        path: The folder of the files, or the one file that holds all fields.
    """

    fields: Mapping[str, Any]
    special_map: Mapping[str, Any]
    added: Mapping[str, Any]
    path: Path

    @classmethod
    def of_folder(cls, path: Path) -> TokenizerSettings:
        """Read the tokenizer's settings files in a model directory.

        Raises: CheckpointError: a file is not a JSON object.
        """
        fields = _read(path / _CONFIG)
        if fields.get("added_tokens_decoder") is not None:
            return cls(fields, {}, {}, path)
        return cls(fields, _read(path / _SPECIAL_MAP), _read(path / _ADDED), path)

    @property
    def splits_special_tokens(self) -> bool:
        """Whether the texts of special tokens in a prompt are tokenized as normal text."""
        return self._flag("split_special_tokens")

    @property
    def eos_token(self) -> str | None:
        """The text of the end token; None if no file names one.

        Raises: CheckpointError: the field is neither a text nor a token.
        """
        token = self._role_tokens().get("eos_token")
        return None if token is None else str(token)

    def cleans_up(self, tokenizer: Tokenizer) -> bool:
        """Whether spaces before punctuation are removed from decoded texts.

        transformers ignores the setting for BPE tokenizers, unless a second setting insists.
        """
        insists = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_bpe = type(tokenizer.model).__name__ == "BPE"
        return self._flag("clean_up_tokenization_spaces") and (not is_bpe or self._flag(insists))

    def needs_transformers(self, tokenizer: Tokenizer) -> bool:
        """Return whether transformers would replace the pipeline that tokenizer.json defines.

        Some classes of transformers build another pipeline and name tokens that no file names;
        classes for Unigram models add end tokens too. ``fix_mistral_regex`` replaces a regular
        expression.
        """
        if self._flag("fix_mistral_regex"):
            return True
        class_name = str(self.fields.get("tokenizer_class")).removesuffix("Fast")
        if type(tokenizer.model).__name__ == "Unigram" and class_name not in _GENERIC_CLASSES:
            return self.fields.get("tokenizer_class") is not None
        steps = list(_steps(tokenizer))
        if class_name in _LLAMA_CLASSES and any(step["type"] == "ByteLevel" for step in steps):
            return False  # transformers knows that the class is wrong
        if class_name in _LLAMA_CLASSES and any(step["type"] == "Prepend" for step in steps):
            return True
        return self._lacks_token(class_name, tokenizer) or (
            self._prefix_scheme(class_name) not in (None, _prefix_scheme(steps))
        )

    def _lacks_token(self, class_name: str, tokenizer: Tokenizer) -> bool:
        """Return whether the class in transformers adds a special token that no file defines."""
        stored_texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        stored_texts |= {token.content for token in self._by_id().values()}
        return any(
            text not in stored_texts and name not in self.fields and name not in self.special_map
            for name, text in _CLASS_TOKENS.get(class_name, {}).items()
        )

    def _prefix_scheme(self, class_name: str) -> str | None:
        """Return where a class inserts a space: "always", "first" or "never"; None if nowhere new.

        "always" is before the text and before each part after a special token.
        """
        if class_name in _GENERIC_CLASSES:
            return None
        prefix = self.fields.get("add_prefix_space")
        if class_name in _LLAMA_CLASSES:
            scheme = "always" if self._flag("legacy") else "first"
            return scheme if prefix is None or self._flag("add_prefix_space") else "never"
        if prefix is None and class_name not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
            return None
        return "always" if self._flag("add_prefix_space") else "never"

    def apply(self, tokenizer: Tokenizer) -> None:
        """Add missing tokens to the tokenizer, and configure the splitting of special tokens.

        Raises: CheckpointError: a field has a wrong type, or a token would get another id than its
            file states.
        """
        tokenizer.encode_special_tokens = self.splits_special_tokens
        stored_tokens = tokenizer.get_added_tokens_decoder()
        stored_texts = {token.content for token in stored_tokens.values()}
        unchanged = {repr(token) for token in stored_tokens.values()}
        stated_ids = self._by_id()
        by_text = {token.content: token for token in stated_ids.values()}
        if self.fields.get("added_tokens_decoder") is None:
            # transformers adds those of tokenizer.json again, which makes roles' tokens special.
            by_text |= {token.content: token for token in stored_tokens.values()}
        role_tokens = self._role_tokens()
        # Two roles may give a text different flags; the library gets both, in this order.
        candidates = [*by_text.values()] + [
            token
            for token in (*role_tokens.values(), *self._extra())
            if token.content not in stored_texts and token.content not in by_text
        ]
        special_texts = {token.content for token in role_tokens.values()}
        for token in candidates:
            token.special = token.special or token.content in special_texts
        added = [token for token in candidates if repr(token) not in unchanged]
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
        """Return the tokens that have an id in one of the files, by id in ascending order."""
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
        role_tokens = self._role_tokens()
        special_texts = {role_tokens[name].content for name in _NAMES if name in role_tokens}
        special_texts |= {token.content for token in self._newer_extra()}
        tokens = {}
        for text, index in self.added.items():
            special = text in special_texts
            token = AddedToken(text, normalized=not special, special=special)
            tokens[self._id(_ADDED, text, index)] = token
        return dict(sorted(tokens.items()))

    def _role_tokens(self) -> dict[str, AddedToken]:
        """Return the special tokens that have a role, such as ``bos_token`` or ``image_token``."""
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
        # New ids are given in the order of the usual roles.
        usual = {name: tokens.pop(name) for name in _NAMES if name in tokens}
        return usual | tokens

    def _extra(self) -> list[AddedToken]:
        """Return the special tokens that have no role."""
        if self._uses_newer_name:
            return self._newer_extra()
        file = _SPECIAL_MAP if _OLDER_EXTRA in self.special_map else _CONFIG
        fields = self.special_map if file == _SPECIAL_MAP else self.fields
        return self._several(file, fields, _OLDER_EXTRA)

    @property
    def _uses_newer_name(self) -> bool:
        """Whether special tokens are read under the newer name ``extra_special_tokens``."""
        config_value = self.fields.get(_EXTRA)
        if not config_value and _OLDER_EXTRA in self.fields:
            return True  # the older name of tokenizer_config.json is read as the newer one
        is_list = _EXTRA in self.fields and not isinstance(config_value, Mapping)
        return is_list or isinstance(self.special_map.get(_EXTRA), list)

    def _newer_extra(self) -> list[AddedToken]:
        """Return the tokens of ``extra_special_tokens``, or of the older name in the config."""
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
            self._file(file), f"{field} is {value!r:.100}, must be {allowed}", "correct the field"
        )


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _resembles_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def _steps(tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each normalizer and pre-tokenizer of a tokenizer's pipeline."""
    parts = [tokenizer.normalizer, tokenizer.pre_tokenizer]
    pending = [json.loads(part.__getstate__()) for part in parts if part is not None]
    while pending:
        step = pending.pop(0)
        yield step
        pending += step.get("normalizers", []) + step.get("pretokenizers", [])


def _prefix_scheme(steps: list[Mapping[str, Any]]) -> str:
    """Return where a pipeline inserts spaces; see ``TokenizerSettings._prefix_scheme``."""
    schemes = [str(step.get("prepend_scheme", "never")) for step in steps]
    if any(step["type"] == "Prepend" or step.get("add_prefix_space") for step in steps):
        return "always"
    return next((scheme for scheme in schemes if scheme != "never"), "never")
