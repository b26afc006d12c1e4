"""Cuts of byte-level tokenizers before they merge, by the names that GGUF files have.

Source: the names, and which of them mean the same, are those of llama.cpp (llama-vocab.cpp); the
patterns stand in the tokenizer.json of the models: GPT-2, Llama 3, Qwen2 and SmolLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The steps of a byte-level tokenizer beside merging.

    Attributes:
        steps: of a tokenizer.json's ``pre_tokenizer``.
        normalizer: of a tokenizer.json, or None.
        ignore_merges: whether a piece that is a token is taken as it is.
        adds_bos: whether a text begins with the token for that, unless the file says so.
    """

    steps: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(digits: str) -> dict[str, Any]:
    """Return the step that takes words, so many digits, marks and white space apart."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_GPT2 = PreTokenizer((_bytes(use_regex=True),))
_LLAMA3 = PreTokenizer(
    (_split("{1,3}"), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True
)
_QWEN2 = PreTokenizer((_split(""), _bytes(use_regex=False)), normalizer={"type": "NFC"})
_DIGITS = PreTokenizer(
    ({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "olmo", "mpt", "exaone4"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
}
"""By the value of ``tokenizer.ggml.pre``."""
