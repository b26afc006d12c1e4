"""The model that a checkpoint would become: every choice is made, and no weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interposer import (
    CausalModel,
    CheckpointFile,
    ModelFamily,
    Placement,
    Resolver,
    Verdict,
)
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._offload.planning import Offloading
from interposer_ops.layers.sampler import Sampler


@dataclass(frozen=True, eq=False)
class Plan:
    """A model built on the meta device: every choice is made, no weight is read.

    Attributes:
        quantization: the method by which plain weights are quantized while they load, or its
            settings, as asked for.
        decoder: sizes and options of the model, by the family that was chosen for it.
        page_size: number of tokens in a page of the cache, which all attention backends take.
        graphs: whether decode steps become graphs; None where nobody asks for it.
        compiled: whether torch.compile compiles steps, and by what; None where nobody asks for it.
        offload: what of the weights is not resident; None where all of it is.
    """

    checkpoint: Checkpoint | CheckpointFile
    decoder: ModelFamily
    quantization: str | Mapping[str, Any] | None
    placement: Placement
    dtype: torch.dtype
    resolver: Resolver
    page_size: int
    model: CausalModel
    sampler: Sampler
    graphs: Verdict | None
    compiled: Verdict | None
    offload: Offloading | None = None

    @property
    def path(self) -> Path:
        """The directory, or the file, of the checkpoint."""
        return self.checkpoint.path

    def numerics(self) -> AbstractContextManager[None]:
        """Return a block in which products are as exact as the policy of this model says."""
        return self.placement.platform.numerics(self.resolver.config.numerics)
