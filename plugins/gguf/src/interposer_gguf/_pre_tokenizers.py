"""Pre-tokenizers of byte-level tokenizers, by the names in GGUF files.

Source: names and aliases are those of llama.cpp (llama-vocab.cpp); patterns are those in the
tokenizer.json of GPT-2, Llama 3, Qwen2 and Qwen3.5, SmolLM, gpt-oss, Mistral Nemo and DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Options of a byte-level BPE tokenizer, except the merges.

    Attributes:
        steps: steps of ``pre_tokenizer`` in tokenizer.json.
        normalizer: the normalizer in tokenizer.json, or None.
        ignore_merges: a piece of text that is a token is not merged.
        adds_bos: a text starts with the BOS token, unless the file states otherwise.
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
    """Return a tokenizer.json step that splits a text at regex matches and keeps the matches."""
    return {
        "type": "Split",
        "pattern": {"Regex": "|".join(patterns)},
        "behavior": "Isolated",
        "invert": False,
    }


def _words(digits: str, letters: str = r"\p{L}", marks: str = r"\s\p{L}\p{N}") -> dict[str, Any]:
    """Return a tokenizer.json step that separates words, digits, punctuation and white space.

    Args:
        digits: regex quantifier for the digits of one piece.
        marks: characters that are not punctuation.
    """
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return _split(_CONTRACTIONS, word, rf"\p{{N}}{digits}", rf" ?[^{marks}]+[\r\n]*", *_SPACES)


def _cased(digits: str, endings: str) -> dict[str, Any]:
    """Return the step of ``_words``, also splitting before capitals; "/" can end punctuation."""
    upper, lower = (rf"[\p{{L{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in "ul")
    # Title-case letters (Lt) count as capitals.
    upper = upper.replace(r"\p{Lu}", r"\p{Lu}\p{Lt}")
    leading = r"[^\r\n\p{L}\p{N}]?"
    return _split(
        f"{leading}{upper}*{lower}+{endings}",
        f"{leading}{upper}+{lower}*{endings}",
        rf"\p{{N}}{digits}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        *_SPACES,
    )


# Endings of English contractions, such as "don't", are separate pieces.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Line breaks; then white space, except for the last character before a word, which belongs to the
# word.
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
# ByteLevel contains the pattern of GPT-2 (``use_regex``); other patterns need a Split step first.
_GPT2 = PreTokenizer((_bytes(use_regex=True),))
_LLAMA3 = PreTokenizer(
    (_words("{1,3}"), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True
)
_NFC = {"type": "NFC"}
_QWEN2 = PreTokenizer((_words(""), _bytes(use_regex=False)), normalizer=_NFC)
# Qwen3.5 keeps combining marks (M) with the letters.
_QWEN35 = PreTokenizer(
    (_words("", r"[\p{L}\p{M}]", r"\s\p{L}\p{M}\p{N}"), _bytes(use_regex=False)), normalizer=_NFC
)
_GPT4O = PreTokenizer((_cased("{1,3}", f"{_CONTRACTIONS}?"), _bytes(use_regex=False)))
_TEKKEN = PreTokenizer((_cased("", ""), _bytes(use_regex=False)), ignore_merges=True, adds_bos=True)
_DEEPSEEK3 = PreTokenizer(
    (
        _split(r"\p{N}{1,3}"),
        # CJK ideographs, hiragana and katakana.
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
"""The supported pre-tokenizers, by the value of ``tokenizer.ggml.pre``."""
