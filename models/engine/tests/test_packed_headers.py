"""Packed files that somebody crafted, and links in a cache: refused by name, and never followed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from tests.forks import forks
from tests.landing import landing_sample

from interposer import Config
from interposer.errors import ConfigError
from interposer_engine import LanguageModel, load, pack
from interposer_engine._packed.header_check import check_view

PROGRAM = Path(__file__).with_name("crafted_headers.py")
BATCHES = 48
PER_BATCH = 12
PROMPT = [5, 6, 7, 8]


def loaded(path: Path, config: Config) -> LanguageModel:
    lm = load(path, config=config, cache_tokens=256, max_sequences=2)
    for thread in threading.enumerate():
        if thread.name == "interposer-packed":
            thread.join()
    return lm


def note(lm: LanguageModel) -> str:
    return next(line for line in lm.resolver.notes if line.startswith("packed weights"))


def tokens(lm: LanguageModel) -> tuple[int, ...]:
    (completion,) = lm.generate([PROMPT], max_new_tokens=4)
    return completion.token_ids


@pytest.fixture
def on(tmp_path: Path) -> Config:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "verdicts").symlink_to(Path(os.environ["INTERPOSER_CACHE_DIR"], "verdicts"))
    return Config(packed="on", cache_dir=folder)


@pytest.mark.process
@pytest.mark.parametrize("batch", landing_sample(range(BATCHES), every=BATCHES))
@pytest.mark.parametrize("model", landing_sample(["llama", "qwen3_moe"], every=2))
def test_each_changed_header_is_refused(
    model: str, batch: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of all changes, a batch has some that lie far apart, so that each kind of leaf is there."""
    path: Path = request.getfixturevalue(model)
    arguments = (path, tmp_path, f"{batch}/{BATCHES}", str(PER_BATCH))
    process = forks().run(PROGRAM, *arguments, timeout=900)
    assert process.returncode == 0, f"{process.stdout[-300:]}\n{process.stderr[-2000:]}"
    *changes, total = map(json.loads, process.stdout.splitlines())
    assert len(changes) == PER_BATCH < total
    refused = [result for *_, result in changes if result != "unchanged"]
    assert all(": it " in line and "not used" in line for line in refused), refused
    assert len(refused) > PER_BATCH // 2


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (["float32", [4], [-1], 3], "strides"),
        (["float32", [4], [1], -1], "shape"),
        (["float32", [2**40], [1], 0], "does not lie in 64 bytes"),
        (["float32", [4, 4], [2**61, 1], 0], "does not lie in 64 bytes"),
        (["float32", [0], [1], 0], "in 64 bytes"),
        (["float32", [4], [0], 0], "repeats elements"),
        (["float32", [4, 4], [4], 0], "strides"),
        (["float32", [True], [1], 0], "shape"),
        (["float99", [4], [1], 0], "no dtype"),
        (["quint8", [4], [1], 0], "no dtype"),
        (["float32", "4", [1], 0], "shape"),
    ],
)
def test_a_tensor_that_does_not_fit_its_memory_is_refused(form: list[object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_view(form, 64, "a tensor")


def test_a_file_that_was_made_elsewhere_is_read_from_the_checkpoint(
    copied: Path, on: Config, tmp_path: Path
) -> None:
    """Its header may be right in all, and still name other weights than a checkpoint does."""
    other_config = Config(cache_dir=tmp_path / "other")
    file = pack(copied, config=other_config).path
    lm = loaded(copied, on)
    assert f"{file}: it lacks the signature of this user's cache" in note(lm)
    assert torch.equal(lm.logits(PROMPT), loaded(copied, Config(packed="off")).logits(PROMPT))
    assert "mapped from" in note(loaded(copied, other_config))


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "FIFO"])
@pytest.mark.parametrize("name", ["file", "part"])
def test_planted_links_in_the_cache_are_not_followed(
    kind: str, name: str, llama: Path, on: Config, tmp_path: Path
) -> None:
    first = loaded(llama, on)
    file = Path(note(first).partition("mapped from ")[2])
    victim = tmp_path / "victim"
    planted = file
    if name == "part":
        planted = file.with_name(f"{file.name}.part")
    else:
        file.replace(victim)
    file.unlink(missing_ok=True)
    if kind == "link":
        victim.touch()
        planted.symlink_to(victim)
    elif kind == "dangling link":
        planted.symlink_to(tmp_path / "missing")
    elif kind == "folder":
        planted.mkdir()
    else:
        os.mkfifo(planted)
    before = victim.read_bytes() if victim.exists() else b""
    lm = loaded(llama, Config(packed="auto", cache_dir=on.cache_dir))
    assert tokens(lm) == tokens(first)
    if name == "file":
        words = {"link": "symbolic link", "dangling link": "symbolic link"}
        assert words.get(kind, kind) in note(lm)
        assert f"not used, {file}: it cannot be used" in note(lm)
    else:
        with pytest.raises(ConfigError, match="cannot be written"):
            loaded(llama, on)
    assert not (tmp_path / "missing").exists()
    assert (victim.read_bytes() if victim.exists() else b"") == before
