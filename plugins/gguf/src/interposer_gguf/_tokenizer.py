"""Conversion of a GGUF file's tokenizer to the contents of a tokenizer.json.

Source: the keys are those of docs/gguf.md of ggml, the fields those of the tokenizers library.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError, nearest_first
from interposer_gguf._end_tokens import ends_by_text
from interposer_gguf._metadata import MetadataReader
from interposer_gguf._pre_tokenizers import PRE_TOKENIZERS

_KEY = "tokenizer.ggml."
# Values of ``tokenizer.ggml.token_type``.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NORMAL = 1
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_CHAT_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# The most characters of a token. All splits of a token are tried as merges, so a longer token would
# take too long.
_MAX_TOKEN_LENGTH = 512


def tokenizer_json(metadata: MetadataReader, vocab_size: int) -> str:
    """Return the contents of tokenizer.json.

    Args:
        vocab_size: rows of the embedding; the file may have fewer tokens.
    Raises:
        CheckpointError: the file has no tokenizer, or one that contradicts itself.
        UnsupportedModelError: the kind of tokenizer or the pre-tokenizer is not supported.
    """
    if _KEY + "tokens" not in metadata:
        raise CheckpointError(metadata.path, "holds no tokenizer", "convert the model again")
    model = metadata.text(_KEY + "model")
    vocabulary = _Vocabulary(metadata, vocab_size)
    if model == "gpt2":
        parts = _byte_level(metadata, vocabulary)
    elif model == "llama":
        parts = _sentence_piece(metadata, vocabulary)
    else:
        raise UnsupportedModelError(
            metadata.path, f"has the tokenizer {model[:50]!r}; supported are 'gpt2' and 'llama'"
        )
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        **parts,
    }
    return json.dumps(contents, ensure_ascii=False)


def tokenizer_settings(metadata: MetadataReader, vocab_size: int) -> dict[str, Any]:
    """Return the special tokens and the chat template, as fields of tokenizer_config.json.

    Raises: CheckpointError: the id of a special token is not in the vocabulary.
    """
    vocabulary = _Vocabulary(metadata, vocab_size)
    fields: dict[str, Any] = {
        f"{field}_token": vocabulary.token(metadata, key)
        for key, field in _SPECIAL.items()
        if f"{_KEY}{key}_token_id" in metadata
    }
    if _CHAT_TEMPLATE in metadata:
        fields["chat_template"] = metadata.text(_CHAT_TEMPLATE)
    return fields


class _Vocabulary:
    """Texts, ids and types of the tokens of a file.

    Attributes:
        tokens: texts by id.
        ids: ids by text.
        kinds: token types by id.
    """

    def __init__(self, metadata: MetadataReader, vocab_size: int) -> None:
        self.path: Path = metadata.path
        self.tokens: list[str] = metadata.list_of(_KEY + "tokens", str)
        if len(self.tokens) > vocab_size:
            raise CheckpointError(
                self.path, f"has {len(self.tokens):,} tokens, but embeds {vocab_size:,}"
            )
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            duplicate = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise CheckpointError(self.path, f"has the token {duplicate[:50]!r} twice")
        self.kinds = [*self.per_token(metadata, "token_type", int, [_NORMAL] * len(self.tokens))]
        # Some converters mark end tokens as normal. Then the text of an end token in a prompt would
        # be merged to the token itself.
        for index in ends_by_text(self.ids).values():
            self.kinds[index] = _CONTROL

    def per_token(
        self, metadata: MetadataReader, name: str, kind: type, default: list[Any] | None = None
    ) -> list[Any]:
        """Return a metadata list that must have one value per token."""
        values = metadata.list_of(_KEY + name, kind, default)
        if len(values) != len(self.tokens):
            raise CheckpointError(
                self.path,
                f"has {len(self.tokens):,} tokens, but {len(values):,} values of {_KEY + name!r}",
            )
        return values

    def token(self, metadata: MetadataReader, name: str) -> str:
        """Return the text of a special token, by the id in the metadata."""
        index = metadata.integer(f"{_KEY}{name}_token_id")
        if not 0 <= index < len(self.tokens):
            raise CheckpointError(
                self.path, f"names token {index} as {name}, but has {len(self.tokens):,} tokens"
            )
        return self.tokens[index]

    def added(self) -> list[dict[str, Any]]:
        """Return the ``added_tokens`` of tokenizer.json, which pre-tokenization never splits."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": index, "content": token, **flags, "special": kind != _USER_DEFINED}
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]


def _byte_level(metadata: MetadataReader, vocabulary: _Vocabulary) -> dict[str, Any]:
    name = metadata.text(_KEY + "pre", "default")
    if name not in PRE_TOKENIZERS:
        nearest = ", ".join(nearest_first(name[:50], PRE_TOKENIZERS))
        raise UnsupportedModelError(
            metadata.path,
            f"has the unknown pre-tokenizer {name[:50]!r}; known are {nearest}",
        )
    pre_tokenizer = PRE_TOKENIZERS[name]
    merges = [_pair(vocabulary, merge) for merge in metadata.list_of(_KEY + "merges", str)]
    return {
        "normalizer": pre_tokenizer.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre_tokenizer.steps)},
        "post_processor": _post_processor(metadata, vocabulary, pre_tokenizer.adds_bos),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            **_model(vocabulary, merges),
            # A byte-level vocabulary contains every byte, so no text is unknown.
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignore_merges,
        },
    }


def _sentence_piece(metadata: MetadataReader, vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the tokenizer.json parts of a SentencePiece BPE tokenizer, which merges by score.

    The file has no merges: any two tokens that form a third token are a merge, ordered by the score
    of the third.
    """
    scores = vocabulary.per_token(metadata, "scores", float)
    has_prefix = metadata.flag(_KEY + "add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    restore_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    has_unknown = _KEY + "unknown_token_id" in metadata
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, vocabulary, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [restore_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            **_model(vocabulary, _merges_by_score(vocabulary, scores)),
            "unk_token": vocabulary.token(metadata, "unknown") if has_unknown else None,
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
    """Split a merge at the space into its two tokens."""
    # Byte-level tokens contain no space. But tokenizers that keep spaces may have a space as the
    # first token of a merge, so the search starts after the first character.
    separator = merge.find(" ", 1)
    left_token, right_token = merge[:separator], merge[separator + 1 :]
    ids = vocabulary.ids
    if (
        separator < 0
        or left_token not in ids
        or right_token not in ids
        or left_token + right_token not in ids
    ):
        raise CheckpointError(
            vocabulary.path, f"has the merge {merge[:50]!r}, which does not make a token of two"
        )
    return left_token, right_token


def _merges_by_score(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    mergeable = {
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    merges: list[tuple[float, int, str, str]] = []
    for index, token in enumerate(vocabulary.tokens):
        if token not in mergeable:
            continue
        if len(token) > _MAX_TOKEN_LENGTH:
            raise CheckpointError(
                vocabulary.path,
                f"has a token of {len(token):,} characters, at most {_MAX_TOKEN_LENGTH} are "
                "supported",
            )
        for split in range(1, len(token)):
            left_token, right_token = token[:split], token[split:]
            if left_token in mergeable and right_token in mergeable:
                merges.append((-scores[index], split, left_token, right_token))
    merges.sort()
    return [(left_token, right_token) for _, _, left_token, right_token in merges]


def _post_processor(
    metadata: MetadataReader, vocabulary: _Vocabulary, adds_bos: bool
) -> dict[str, Any] | None:
    """Return the step that adds BOS and EOS tokens to a text, or None if none are added."""
    content: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        # Some files ask for a BOS or EOS token but state no id.
        is_added = metadata.flag(f"{_KEY}add_{name}_token", default)
        if not is_added or f"{_KEY}{name}_token_id" not in metadata:
            continue
        token = vocabulary.token(metadata, name)
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
