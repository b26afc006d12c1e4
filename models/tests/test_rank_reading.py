"""What a rank reads of a file: the pages of its own share, and hardly any of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import interposer_ops.plugin
from interposer import Capability, Config, Device, Ranks, Registry, Resolver, Site
from interposer.tooling import Plugins
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.weights import Weights
from interposer_ops.layers.divided_pairs import PairNames, share_inner

HIDDEN, INNER = 4, 2**21
# Linux maps a page together with what it holds in one piece of memory, of 2 MiB at most.
AROUND = 2 * 1024 * 1024


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
        shares = share_inner(site, HIDDEN, INNER, PairNames("up", "down"), {"up": 1})
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


def mapped_bytes(path: Path) -> int:
    """Return how much of a file this process has in its memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.partition(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_rank_reads_its_own_bytes(checkpoint: Checkpoint, count: int) -> None:
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
    own = HIDDEN * INNER * 4 // count
    assert touched.keys() == {"mlp.up.weight", "mlp.down.weight"}
    assert 0.9 * own <= touched["mlp.up.weight"] <= own + 2 * AROUND
    # A range of each row, with what is around both of its ends.
    assert 0.9 * own <= touched["mlp.down.weight"] <= own + 2 * HIDDEN * AROUND
    first = (count - 1) * INNER // count
    x = torch.zeros(1, HIDDEN)
    x[0, 3] = 1.0
    kernel = pair.up.kernel
    assert kernel is not None
    expected = torch.arange(first, INNER, dtype=torch.float32) * HIDDEN + 3
    assert torch.equal(kernel(x, *pair.up.operands)[0], expected)
