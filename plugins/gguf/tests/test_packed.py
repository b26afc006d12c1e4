"""GGUF files through packed weights: mapped the second time, refused with a reason otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from interposer import Config
from interposer_engine import LanguageModel, load, pack

OFF = Config(packed="off")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def loaded(path: Path, config: Config) -> LanguageModel:
    return load(path, config=config, cache_tokens=64, max_sequences=1)


def told(lm: LanguageModel) -> list[str]:
    return [note for note in lm.resolver.notes if note.startswith("packed weights")]


def compare(path: Path, **options: Any) -> None:
    """Load a file three times: read, packed, and mapped."""
    expected = loaded(path, Config(packed="off", **options))
    first = loaded(path, Config(packed="on", **options))
    for thread in threading.enumerate():
        if thread.name == "interposer-packed":
            thread.join()
    (note,) = told(first)
    file = Path(note.partition("mapped from ")[2])
    inode = file.stat().st_ino
    second = loaded(path, Config(packed="on", **options))
    assert told(second) == told(first)
    assert file.stat().st_ino == inode
    for lm in (first, second):
        assert torch.equal(lm.logits(PROMPT), expected.logits(PROMPT))
    (done,) = second.generate([PROMPT], max_new_tokens=4)
    assert done.token_ids == expected.generate([PROMPT], max_new_tokens=4)[0].token_ids
    assert done.text == second.tokenizer.decode(done.token_ids)


@pytest.mark.landing(1)
@pytest.mark.parametrize("stored_as", ["f16", "q8_0", "q4_0"])
def test_a_file_is_mapped_the_second_time(
    stored_as: str, directory: Callable[[str], Path], write: Callable[..., Path]
) -> None:
    compare(write(directory("qwen3"), stored_as))


@pytest.mark.landing(1)
@pytest.mark.parametrize("kernel", ["gguf_linear_native", "gguf_linear_by_rows"])
def test_blocks_are_mapped_for_kernels_of_the_plugin(
    kernel: str,
    directory: Callable[[str], Path],
    write: Callable[..., Path],
    requantize: Callable[..., Path],
) -> None:
    path = requantize(write(directory("qwen3"), "f16"), lambda name: "q4_k")
    options = {"gguf_linear": kernel}
    chosen = {c.chosen.name for c, _ in loaded(path, OFF).resolver.choices.values()}
    assert any(name.startswith("gguf_linear") for name in chosen)
    compare(path, kernels=options)


def test_weights_packed_next_to_a_file_are_mapped(
    directory: Callable[[str], Path], write: Callable[..., Path]
) -> None:
    path = write(directory("llama"), "q8_0")
    done = pack(path)
    assert done.path.parent == path.with_name(f"{path.name}.interposer-packed")
    (note,) = told(loaded(path, Config()))
    assert note.endswith(f"mapped from {done.path}")
