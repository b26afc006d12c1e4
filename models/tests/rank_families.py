"""One process of those that compute the models of all families: see test_rank_families."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interposer import Config, Ranks, Resolver
from interposer_engine import EncoderFeatures, SamplingParams, load
from interposer_ops.layers.tensor_parallel.sharding import Shard

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
COUNT = 6
ADAPTER = "adapter"
RESOLVERS: list[Resolver] = []
_AT = Resolver.at.__func__  # type: ignore[attr-defined]


def told(path: Path, ranks: Ranks | None) -> dict[str, Any]:
    """Return a model's completion of one prompt, and the shards and notes of this rank."""
    # With the layers that a plain installation has, so that fused blocks of the CPU are tried too.
    disabled, layers = ("interposer-example-norm",), {"rms_norm": "standard"}
    config = Config(graphs="off", packed="off", disable=disabled, layers=layers)
    with with_ranks(ranks):
        lm = load(path, dtype="float32", platform="cpu", cache_tokens=128, config=config)
    params = SamplingParams(max_new_tokens=COUNT, temperature=0, ignore_eos=True)
    model = lm.engine.model
    shape = getattr(model, "feature_shape", None)
    source = PROMPT if shape is None else EncoderFeatures(torch.ones(shape))
    (completion,) = lm.generate([source], params)
    adapted = None
    if (path / ADAPTER).exists():
        lm.load_adapter("own", path / ADAPTER)
        (adapted,) = lm.generate([PROMPT], params.model_copy(update={"adapter": "own"}))
    shards = [m.shard for m in model.modules() if isinstance(getattr(m, "shard", None), Shard)]
    notes = [note for note in RESOLVERS[-1].notes if note.startswith("every rank computes")]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "adapted": [] if adapted is None else list(adapted.logprobs),
        "shards": sorted({shard.kind for shard in shards}),
        "notes": notes,
    }


@contextmanager
def with_ranks(ranks: Ranks | None) -> Iterator[None]:
    """Let models be planned for these ranks within a ``with`` block."""
    Resolver.at = classmethod(partial(_at, ranks))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Resolver.at = classmethod(_AT)  # type: ignore[method-assign, assignment]


def _at(ranks: Ranks | None, cls: Any, *args: Any, **kwargs: Any) -> Resolver:
    resolver: Resolver = _AT(cls, *args, **kwargs)
    resolver.ranks = ranks
    RESOLVERS.append(resolver)
    return resolver


def main(rank: int, size: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pairs = [dist.new_group([first, first + 1], backend="gloo") for first in range(0, size, 2)]
    families = sorted(folder.iterdir())
    found: dict[str, dict[str, Any]] = {}
    for number, path in enumerate(families):
        mine = found[path.name] = {}
        if number % size == rank:
            mine["1"] = told(path, None)
        if number % len(pairs) == rank // 2:
            ranks = Ranks(rank % 2, 2, (0, 0), ("cpu",) * 2, pairs[rank // 2])
            mine["2"] = told(path, ranks)
        if number % 4 == 0:
            mine["4"] = told(
                path, Ranks(rank, size, (0,) * size, ("cpu",) * size, dist.group.WORLD)
            )
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
