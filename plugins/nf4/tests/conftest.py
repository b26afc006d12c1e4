"""Checkpoints that bitsandbytes wrote, copied so that tests can change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
TOKENIZER = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm" / "tokenizer.json"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a checkpoint and adds an unused tokenizer."""

    def copy(name: str) -> Path:
        target = shutil.copytree(FIXTURES / name, tmp_path / name)
        shutil.copy(TOKENIZER, target)
        return target

    return copy
