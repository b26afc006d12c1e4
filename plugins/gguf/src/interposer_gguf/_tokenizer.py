"""From the tokenizer of a GGUF file to the contents of a tokenizer.json.

Source: the keys are those of docs/gguf.md of ggml, the fields those of the tokenizers library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError, nearest_first
from interposer_gguf._end_tokens import ends_by_text
from interposer_gguf._pre_tokenizers import PRE_TOKENIZERS
from interposer_gguf._settings import Settings

_KEY = "tokenizer.ggml."
# Types of tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NORMAL = 1
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_CHAT_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Of one token; merges of a longer one would be too many to try.
_LONGEST = 512


def tokenizer_json(settings: Settings, vocab_size: int) -> str:
    """Return what tokenizer.json would hold.

    Args:
        vocab_size: rows of the embedding, of which each token has one.
    Raises:
        CheckpointError: the file holds no tokenizer, or one that contradicts itself.
        UnsupportedModelError: its kind, or how it cuts texts, is not known.
    """
    if _KEY + "tokens" not in settings:
        raise CheckpointError(settings.path, "holds no tokenizer", "convert the model again")
    model = settings.text(_KEY + "model")
    vocabulary = _Vocabulary(settings, vocab_size)
    if model == "gpt2":
        parts = _byte_level(settings, vocabulary)
    elif model == "llama":
        parts = _sentence_piece(settings, vocabulary)
    else:
        raise UnsupportedModelError(
            settings.path, f"has the tokenizer {model[:50]!r}; read are 'gpt2' and 'llama'"
        )
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        **parts,
    }
    return json.dumps(whole, ensure_ascii=False)


def tokenizer_settings(settings: Settings, vocab_size: int) -> dict[str, Any]:
    """Return what tokenizer_config.json would hold of special tokens, and the chat template.

    Raises: CheckpointError: an id is of no token.
    """
    vocabulary = _Vocabulary(settings, vocab_size)
    found: dict[str, Any] = {
        f"{named}_token": vocabulary.token(settings, stored)
        for stored, named in _SPECIAL.items()
        if f"{_KEY}{stored}_token_id" in settings
    }
    if _CHAT_TEMPLATE in settings:
        found["chat_template"] = settings.text(_CHAT_TEMPLATE)
    return found


class _Vocabulary:
    """The tokens of a file.

    Attributes:
        tokens: by id.
        ids: by token.
        kinds: types of the tokens, by id.
    """

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        self.path: Path = settings.path
        self.tokens: list[str] = settings.several(_KEY + "tokens", str)
        if len(self.tokens) > vocab_size:
            raise CheckpointError(
                self.path, f"has {len(self.tokens):,} tokens, but embeds {vocab_size:,}"
            )
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise CheckpointError(self.path, f"has the token {twice[:50]!r} twice")
        self.kinds = [*self.of_each(settings, "token_type", int, [_NORMAL] * len(self.tokens))]
        # Some converters write such a token as a normal one, which texts would be merged to.
        for index in ends_by_text(self.ids).values():
            self.kinds[index] = _CONTROL

    def of_each(
        self, settings: Settings, name: str, kind: type, default: list[Any] | None = None
    ) -> list[Any]:
        """Return a list of something of each token."""
        values = settings.several(_KEY + name, kind, default)
        if len(values) != len(self.tokens):
            raise CheckpointError(
                self.path,
                f"has {len(self.tokens):,} tokens, but {len(values):,} values of {_KEY + name!r}",
            )
        return values

    def token(self, settings: Settings, name: str) -> str:
        """Return the token whose id stands in the metadata."""
        index = settings.integer(f"{_KEY}{name}_token_id")
        if not 0 <= index < len(self.tokens):
            raise CheckpointError(
                self.path, f"names token {index} as {name}, but has {len(self.tokens):,} tokens"
            )
        return self.tokens[index]

    def added(self) -> list[dict[str, Any]]:
        """Return the tokens that are cut out of a text before anything else."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": index, "content": token, **flags, "special": kind != _USER_DEFINED}
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]


def _byte_level(settings: Settings, vocabulary: _Vocabulary) -> dict[str, Any]:
    name = settings.text(_KEY + "pre", "default")
    if name not in PRE_TOKENIZERS:
        nearest = ", ".join(nearest_first(name[:50], PRE_TOKENIZERS))
        raise UnsupportedModelError(
            settings.path,
            f"cuts texts as {name[:50]!r} does, which is not known; known are {nearest}",
        )
    before = PRE_TOKENIZERS[name]
    merges = [_pair(vocabulary, merge) for merge in settings.several(_KEY + "merges", str)]
    return {
        "normalizer": before.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(before.steps)},
        "post_processor": _ends(settings, vocabulary, before.adds_bos),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            **_model(vocabulary, merges),
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": before.ignore_merges,
        },
    }


def _sentence_piece(settings: Settings, vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the parts of a tokenizer that merges by the highest score.

    Merges are not stored: whatever two tokens make a third is one, and those of the highest score
    come first.
    """
    scores = vocabulary.of_each(settings, "scores", float)
    prefixed = settings.flag(_KEY + "add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    named = _KEY + "unknown_token_id" in settings
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": _ends(settings, vocabulary, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            **_model(vocabulary, _merges_by_score(vocabulary, scores)),
            "unk_token": vocabulary.token(settings, "unknown") if named else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    }


def _model(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _pair(vocabulary: _Vocabulary, merge: str) -> tuple[str, str]:
    """Return the two tokens of a merge, between which a space stands."""
    # A token of bytes holds no space, but the first may be one in tokenizers that keep it.
    place = merge.find(" ", 1)
    one, other = merge[:place], merge[place + 1 :]
    known = vocabulary.ids
    if place < 0 or one not in known or other not in known or one + other not in known:
        raise CheckpointError(
            vocabulary.path, f"has the merge {merge[:50]!r}, which does not make a token of two"
        )
    return one, other


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    known = {
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found: list[tuple[float, int, str, str]] = []
    for index, token in enumerate(vocabulary.tokens):
        if token not in known:
            continue
        if len(token) > _LONGEST:
            raise CheckpointError(
                vocabulary.path, f"has a token of {len(token):,} characters, most are {_LONGEST}"
            )
        for place in range(1, len(token)):
            one, other = token[:place], token[place:]
            if one in known and other in known:
                found.append((-scores[index], place, one, other))
    found.sort()
    return [(one, other) for _, _, one, other in found]


def _ends(settings: Settings, vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """Return the step that puts tokens before and after a text, or None."""
    content: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        # Some files say that a token is added that they do not name.
        wanted = settings.flag(f"{_KEY}add_{name}_token", default)
        if not wanted or f"{_KEY}{name}_token_id" not in settings:
            continue
        token = vocabulary.token(settings, name)
        special[token] = {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]}
        content.insert(0 if name == "bos" else len(content), _special(token))
    if not special:
        return None
    pair = [*content, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": content,
        "pair": pair,
        "special_tokens": special,
    }


def _special(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}
