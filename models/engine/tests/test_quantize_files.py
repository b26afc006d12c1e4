"""Files of weights are what safetensors reads, in whatever order their tensors are written."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from interposer.errors import StorageError
from interposer_engine._quantize.files import DTYPE_NAMES, ShardFile, TensorSource, write_shard
from interposer_engine._quantize.writer import WorkFolder

DTYPES = sorted(DTYPE_NAMES, key=str)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    octets = torch.randint(0, 120, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return octets.view(dtype).reshape(shape)


@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)
        ),
        max_size=6,
    ),
    order=st.randoms(use_true_random=False),
)
def test_safetensors_reads_the_written_files(
    shapes: list[tuple[torch.dtype, list[int], int]],
    order: object,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("shards") / "model.safetensors"
    tensors = {
        f"tensor.{number}": random_tensor(dtype, tuple(shape), seed)
        for number, (dtype, shape, seed) in enumerate(shapes)
    }
    layout = {name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    names = list(tensors)
    order.shuffle(names)  # type: ignore[attr-defined]
    with ShardFile(path, layout) as file:
        assert not path.exists()
        for name in names:
            file.write(name, tensors[name])
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].untyped_storage().tolist() == tensor.untyped_storage().tolist()
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert {n: (t.dtype, t.shape) for n, t in TensorSource((path,)).tensors.items()} == layout
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_tensors_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.zeros(3, dtype=torch.int8),
        "b": torch.zeros(1, dtype=torch.int64),
        "c": torch.zeros(5, dtype=torch.float16),
        "d": torch.zeros(1),
    }
    write_shard(path, tensors)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.itemsize == 0


def test_files_are_little_endian_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = torch.tensor([0x01020304], dtype=torch.int32)
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    write_shard(tmp_path / "file", {"a": turned, "b": torch.tensor([7], dtype=torch.uint8)})
    assert (tmp_path / "file").read_bytes()[-5:] == bytes([1, 2, 3, 4, 7])


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(RuntimeError, match="halfway"), ShardFile(path, {"a": ("F32", (3,))}):
        raise RuntimeError("halfway")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="cannot be written: No such file"):
        ShardFile(tmp_path / "none" / "file", {})


def test_a_target_created_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out"
    folder = WorkFolder.open(target, {"scheme": "fp8"}, restart=False)
    (folder.model / "config.json").write_text("{}")
    target.mkdir()
    with pytest.raises(StorageError, match="was created by another program meanwhile"):
        folder.finish()
    assert list(target.iterdir()) == []
    target.rmdir()
    again = WorkFolder.open(target, {"scheme": "fp8"}, restart=False)
    assert again.resumed
    again.finish()
    assert [file.name for file in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_work_folder_without_files_is_reused(tmp_path: Path) -> None:
    (tmp_path / ".out.unfinished" / "model").mkdir(parents=True)
    assert not WorkFolder.open(tmp_path / "out", {"scheme": "fp8"}, restart=False).resumed


def test_a_truncated_manifest_is_refused(tmp_path: Path) -> None:
    folder = WorkFolder.open(tmp_path / "out", {"scheme": "fp8"}, restart=False)
    (folder.root / "manifest.json").write_text('{"scheme": "f')
    with pytest.raises(StorageError, match="not created by an interrupted run"):
        WorkFolder.open(tmp_path / "out", {"scheme": "fp8"}, restart=True)
