"""Facts that must be equal on all ranks of a model."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import version

import torch

from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.file_digest import sampled_digest
from interposer_models._checkpoint.hub import DESCRIPTION
from interposer_models._plan import Plan

_DISTRIBUTIONS = ("interposer", "interposer-ops", "interposer-models")


def facts_of(planned: Plan, **options: object) -> dict[str, object]:
    """Return the facts that ranks compare before reading weights, by name.

    Args:
        options: options of ``load``, as the user passed them.
    """
    config = json.dumps(planned.checkpoint.config, sort_keys=True, default=str)
    facts: dict[str, object] = {name: version(name) for name in _DISTRIBUTIONS}
    facts |= {
        "torch": torch.__version__,
        "a checkpoint with the digest": _digest(config),
        "weights with the digest": _digest(_weights(planned)),
        "a tokenizer and defaults with the digest": _digest(_descriptions(planned)),
        "dtype": str(planned.dtype).removeprefix("torch."),
        "page size": planned.page_size,
        "seed": planned.resolver.config.seed,
        **{name.replace("_", " "): value for name, value in options.items()},
    }
    return facts


def _weights(planned: Plan) -> list[tuple[str, int, str]]:
    """Return names, sizes and sampled digests of the weight files that are on the disk."""
    path = planned.path
    # Pickled files are not read, but also show that the folders of two ranks differ.
    if isinstance(planned.checkpoint, Checkpoint):
        files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    else:
        files = [path]
    return [(file.name, file.stat().st_size, sampled_digest(file)) for file in files]


def _descriptions(planned: Plan) -> list[tuple[str, str]]:
    """Return names and digests of tokenizer and default files, which affect the tokens."""
    if not isinstance(planned.checkpoint, Checkpoint):
        return []
    files = {file for pattern in DESCRIPTION for file in planned.path.glob(pattern)}
    return [(file.name, sha256(file.read_bytes()).hexdigest()) for file in sorted(files)]


def _digest(value: object) -> str:
    return sha256(str(value).encode()).hexdigest()[:12]
