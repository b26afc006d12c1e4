"""Facts in which the ranks of a model must not differ."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import torch

from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._plan import Plan

_DISTRIBUTIONS = ("interposer", "interposer-ops", "interposer-models")


def facts_of(planned: Plan, **options: object) -> dict[str, object]:
    """Return what ranks compare before they read weights, by what it is called.

    Args:
        options: of ``load``, as they were given.
    """
    config = json.dumps(planned.checkpoint.config, sort_keys=True, default=str)
    facts: dict[str, object] = {f"{name}": version(name) for name in _DISTRIBUTIONS}
    facts |= {
        "torch": torch.__version__,
        "a checkpoint with the digest": _digest(config),
        "weights with the digest": _digest(_weights(planned)),
        "dtype": str(planned.dtype).removeprefix("torch."),
        "page size": planned.page_size,
        "seed": planned.resolver.config.seed,
        **{name.replace("_", " "): value for name, value in options.items()},
    }
    return facts


def _weights(planned: Plan) -> str:
    """Return the names and bytes of the files of weights, as far as they are here."""
    path = planned.path
    if not isinstance(planned.checkpoint, Checkpoint):
        return str(path.stat().st_size)
    files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    return str([(file.name, file.stat().st_size) for file in files])


def _digest(text: Any) -> str:
    return sha256(str(text).encode()).hexdigest()[:12]
