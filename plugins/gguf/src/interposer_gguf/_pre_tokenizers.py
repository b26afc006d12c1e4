"""Cuts of byte-level tokenizers before they merge, by the names that GGUF files have.

Source: the names, and which of them mean the same, are those of llama.cpp (llama-vocab.cpp); the
patterns stand in the tokenizer.json of the models: GPT-2, Llama 3, Qwen2 and Qwen3.5, SmolLM,
gpt-oss, Mistral Nemo and DeepSeek-V3.
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


def _split(*patterns: str) -> dict[str, Any]:
    """Return the step that cuts a text into what matches any of the patterns, and the rest."""
    return {
        "type": "Split",
        "pattern": {"Regex": "|".join(patterns)},
        "behavior": "Isolated",
        "invert": False,
    }


def _words(digits: str, letters: str = r"\p{L}", marks: str = r"\s\p{L}\p{N}") -> dict[str, Any]:
    """Return the step that takes words, so many digits, marks and white space apart.

    Args:
        marks: what is no mark.
    """
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return _split(_ENDINGS, word, rf"\p{{N}}{digits}", rf" ?[^{marks}]+[\r\n]*", *_SPACES)


def _cased(digits: str, endings: str) -> dict[str, Any]:
    """Return the same, where words are also cut before a capital, and slashes follow marks."""
    upper, lower = (rf"[\p{{L{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in "ul")
    upper = upper.replace(r"\p{Lu}", r"\p{Lu}\p{Lt}")
    before = r"[^\r\n\p{L}\p{N}]?"
    return _split(
        f"{before}{upper}*{lower}+{endings}",
        f"{before}{upper}+{lower}*{endings}",
        rf"\p{{N}}{digits}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        *_SPACES,
    )


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_GPT2 = PreTokenizer((_bytes(use_regex=True),))
_LLAMA3 = PreTokenizer(
    (_words("{1,3}"), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True
)
_NFC = {"type": "NFC"}
_QWEN2 = PreTokenizer((_words(""), _bytes(use_regex=False)), normalizer=_NFC)
_QWEN35 = PreTokenizer(
    (_words("", r"[\p{L}\p{M}]", r"\s\p{L}\p{M}\p{N}"), _bytes(use_regex=False)), normalizer=_NFC
)
_GPT4O = PreTokenizer((_cased("{1,3}", f"{_ENDINGS}?"), _bytes(use_regex=False)))
_TEKKEN = PreTokenizer((_cased("", ""), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True)
_DEEPSEEK3 = PreTokenizer(
    (
        _split(r"\p{N}{1,3}"),
        _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _split(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            *_SPACES,
        ),
        _bytes(use_regex=False),
    )
)
_DIGITS = PreTokenizer(
    ({"type": "Digits", "individual_digits": True}, _bytes(use_regex=True)),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "olmo", "mpt", "exaone4"), _GPT2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
}
"""By the value of ``tokenizer.ggml.pre``."""
