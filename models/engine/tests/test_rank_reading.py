"""A rank reads the bytes of its own shard from a file, and hardly any others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import interposer_ops.plugin
from interposer import Capability, Config, Device, Ranks, Registry, Resolver, Site
from interposer.tooling import Plugins
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.weights import Weights
from interposer_ops.layers.tensor_parallel.projection_pairs import ProjectionNames, shard_mlp

HIDDEN, INNER = 4, 2**21

Ranges = Iterable[tuple[int, int]]  # first byte of a tensor in its file, and number of bytes


def site_of(rank: int, count: int) -> Site:
    registry = Registry(Plugins.of(interposer_ops.plugin))
    device = Device("cpu", "cpu", "test", Capability("x86_64"))
    ranks = Ranks(rank, count, (0,) * count, ("cpu",) * count) if count > 1 else None
    config = Config(canary="off", tables=False)
    return Site(Resolver(registry, device, config, ranks=ranks), "mlp", torch.float32)


class Pair(nn.Module):
    """Both projections of an MLP."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        shares = shard_mlp(site, HIDDEN, INNER, ProjectionNames("up", "down"), {"up": 1})
        self.up, self.down = shares.first(), shares.last()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("pair")
    (root / "config.json").write_text(json.dumps({}))
    tensors = {
        "mlp.up.weight": torch.arange(INNER * HIDDEN, dtype=torch.float32).view(INNER, HIDDEN),
        "mlp.down.weight": torch.arange(INNER * HIDDEN, dtype=torch.float32).view(HIDDEN, INNER),
    }
    save_file(tensors, root / "model.safetensors")
    return Checkpoint.open(root)


class ReadBytes(TorchDispatchMode):
    """Counts the bytes of a checkpoint's tensors that ops copy or compute with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._storages: set[int] = set()

    def watch(
        self, stream: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            self._storages.add(tensor.untyped_storage().data_ptr())
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            flat = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            self.num_bytes += sum(
                tensor.nbytes
                for tensor in flat
                if isinstance(tensor, torch.Tensor)
                and tensor.device.type == "cpu"
                and tensor.untyped_storage().data_ptr() in self._storages
            )
        return result


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_rank_copies_only_its_shards(checkpoint: Checkpoint, count: int) -> None:
    with torch.device("meta"):
        pair = Pair(site_of(count - 1, count))
    with ReadBytes() as read:
        stream = read.watch(checkpoint.stream())
        Weights(pair, "cpu").load(stream, "test", names=checkpoint.names())
    assert read.num_bytes == 2 * HIDDEN * INNER * 4 // count
    first = (count - 1) * INNER // count
    x = torch.zeros(1, HIDDEN)
    x[0, 3] = 1.0
    kernel = pair.up.kernel
    assert kernel is not None
    expected = torch.arange(first, INNER, dtype=torch.float32) * HIDDEN + 3
    assert torch.equal(kernel(x, *pair.up.operands)[0], expected)


# The tests of pages read which part of a file this process has in its memory. The control maps the
# same file and reads the same ranges of it.


def mapped_bytes(path: Path) -> int:
    """Return how much of a file this process has in its memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.partition(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def control_bytes(path: Path, ranges: Ranges) -> int:
    """Return how far ``mapped_bytes`` rises where a plain map reads these ranges of a file."""
    before = mapped_bytes(path)
    size = path.stat().st_size
    contents = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    for start, num_bytes in ranges:
        contents[start : start + num_bytes].clone()
    return mapped_bytes(path) - before


def first_byte(path: Path, name: str) -> int:
    """Return where a tensor begins in a file of safetensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin: int = json.loads(file.read(length))[name]["data_offsets"][0]
        return 8 + length + begin


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/smaps")
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_pages_of_shards_of_other_ranks_are_not_read(checkpoint: Checkpoint, count: int) -> None:
    with torch.device("meta"):
        pair = Pair(site_of(count - 1, count))
    (shard,) = checkpoint.shards
    touched: dict[str, int] = {}

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint.stream():
            before = mapped_bytes(shard)
            yield name, tensor
            # Whoever asks for the next one has placed this one.
            touched[name] = mapped_bytes(shard) - before

    Weights(pair, "cpu").load(watched(), "test", names=checkpoint.names())
    whole = HIDDEN * INNER * 4
    own, row = whole // count, INNER * 4
    up, down = (first_byte(shard, name) for name in ("mlp.up.weight", "mlp.down.weight"))
    controls = {
        "mlp.up.weight": control_bytes(shard, [(up + whole - own, own)]),
        # A range of each row.
        "mlp.down.weight": control_bytes(
            shard, [(down + (n + 1) * row - row // count, row // count) for n in range(HIDDEN)]
        ),
    }
    assert touched.keys() == controls.keys()
    for name, expected in controls.items():
        assert touched[name] == pytest.approx(expected, rel=0.2), name
