"""Whatever tokenizer files say, tokens and texts are those of transformers, or a file is refused.

``variants/tokenizer_files.py`` holds the spellings; ``make test-checkpoints`` compares thousands.
"""

from __future__ import annotations

import warnings

import pytest
from models.engine.tests.variants.tokenizer_files import compare
from transformers.utils import logging


def find_faults(first: int, end: int) -> list[str]:
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about fields that it does not know
        compared = [*compare(first, end)]
    assert sum(case.kind == "equal" for case in compared) > len(compared) / 2
    return [str(case) for case in compared if case.is_fault]


def test_tokens_and_texts_equal_transformers() -> None:
    assert find_faults(0, 100) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 2000, 100))
def test_two_thousand_tokenizers_equal_transformers(first: int) -> None:
    assert find_faults(first, first + 100) == []
