"""Codes and English names of the languages that Whisper knows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache


@cache
def language_codes() -> Mapping[str, str]:
    """Return the code of each language by English name, some under several names."""
    # Imported at first use, because the import takes a second.
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return dict(TO_LANGUAGE_CODE)


@cache
def language_names() -> Mapping[str, str]:
    """Return the English name of each language by code."""
    names: dict[str, str] = {}
    for name, code in language_codes().items():
        names.setdefault(code, name)
    return names
