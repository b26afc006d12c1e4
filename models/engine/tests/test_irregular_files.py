"""A FIFO, a device, a folder or a link to itself in place of a file: refused, and never opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adapter_files import write_adapter

from interposer import Config
from interposer.errors import CheckpointError
from interposer_engine import TextTokenizer, load, plan

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs the files of Unix")
FILES = [
    *("config.json", "generation_config.json", "hf_quant_config.json", "added_tokens.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("model.safetensors", "model.safetensors.index.json"),
]


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_is_refused_by_its_name(name: str, copied: Path) -> None:
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    with pytest.raises(CheckpointError, match="is a FIFO, not a regular file") as caught:
        plan(copied)
    assert caught.value.path == str(copied / name)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (endless, "is a device, not a regular file"),
        (Path.mkdir, "is a folder, not a regular file"),
        (link_to_itself, "cannot be read: Too many levels of symbolic links"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_paths_that_are_no_files_are_refused(
    name: str, make: Callable[[Path], None], reason: str, copied: Path
) -> None:
    (copied / name).unlink()
    make(copied / name)
    with pytest.raises(CheckpointError, match=reason):
        load(copied, config=Config(packed="off"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_fifo_of_an_adapter_is_refused(name: str, copied: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (64, 64)})
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(CheckpointError, match=f"{name}: is a FIFO"):
        load(copied, adapters={"a": adapter}, cache_tokens=256, config=Config(packed="off"))


def test_a_fifo_with_the_name_of_a_model_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"model.gguf: is a FIFO, not a regular file"):
        plan(tmp_path / "model.gguf")


def test_a_tokenizer_reads_regular_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is a FIFO, not a regular file"):
        TextTokenizer(tmp_path)
