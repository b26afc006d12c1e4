"""One of the processes that torchrun starts, which differ: see test_rank_differences.

torchrun --nproc-per-node 2 models/engine/tests/rank_differences.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from interposer import Config
from interposer.errors import RankError
from interposer_engine import LanguageModel, load

FILES = ("config", "tokenizer", "weights")


def loaded(path: Path, seed: int = 1, **options: Any) -> Any:
    sizes: dict[str, Any] = {"cache_tokens": 64, "max_sequences": 2, **options}
    return load(path, tensor_parallel=2, config=Config(seed=seed), **sizes)


def refusal(path: Path, **options: Any) -> str:
    """Return why the ranks do not load the model together; empty where they do."""
    try:
        loaded(path, **options)
    except RankError as error:
        return str(error)
    return ""


def drift(lm: LanguageModel, prompt: list[int]) -> str:
    """Return why the ranks do not generate together; empty where they do."""
    try:
        lm.generate([prompt], max_new_tokens=4)
    except RankError as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    same = folder / "same"
    found = {name: refusal(folder / name if rank else same) for name in FILES}
    found["seed"] = refusal(same, seed=rank)
    found["offload"] = refusal(same, offload="100%" if rank else None)
    with loaded(same) as lm:
        found["nothing"] = drift(lm, [5, 6])
        found["prompt"] = drift(lm, [5, 6 + rank])
    gathered: list[Any] = [None] * 2
    dist.all_gather_object(gathered, found)
    if rank == 0:
        json.dump(gathered, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
