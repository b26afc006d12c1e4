"""Loading while another writer has the packed file: it pauses until that one is done."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from interposer import Config
from interposer_engine._checkpoint.opening import download_weights
from interposer_engine._checkpoint.weights import Weights
from interposer_engine._packed.file import PackedWriter
from interposer_engine._packed.loading import load_weights, packed_file, packed_store_of
from interposer_engine._planning import plan


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Config]:
    """Return a policy with packed files in a folder of their own, and the verdicts of all tests."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "verdicts").symlink_to(Path(os.environ["INTERPOSER_CACHE_DIR"], "verdicts"))
    yield Config(packed="on", cache_dir=folder)
    for thread in threading.enumerate():
        if thread.name == "interposer-packed":
            thread.join()


class Pauses:
    """Pauses of a loader: in the third one, the other writer gives the file up."""

    def __init__(self, other: PackedWriter) -> None:
        self._other = other
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        assert len(self.seconds) <= 3
        if len(self.seconds) == 3:
            self._other.close()


@pytest.mark.parametrize("way", ["mapped", "offloaded"])
def test_loading_pauses_while_another_writes_the_file(way: str, llama: Path, on: Config) -> None:
    planned = plan(llama, config=on)
    checkpoint = download_weights(planned.checkpoint)
    weights = Weights(planned.model, planned.placement.device.torch_device)
    store = packed_store_of(planned, checkpoint)
    pauses = Pauses(store.writer(store.cache_folder))
    fill = load_weights if way == "mapped" else packed_file
    progress: list[int] = []
    fill(planned, checkpoint, weights, progress.append, sleep=pauses)
    assert len(pauses.seconds) == 3
    assert min(pauses.seconds) > 0
    assert sum(progress) > 0
