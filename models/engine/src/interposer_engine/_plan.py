"""The class ``Plan``: a model with all choices made, but without weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interposer import CausalModel, CheckpointFile, ModelFamily, Placement, Resolver, Verdict
from interposer.errors import UnknownNameError
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._offload.planning import Offloading
from interposer_ops.layers.sampler import Sampler


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A model on the meta device: all choices are made, but no weights are loaded.

    Attributes:
        checkpoint: The checkpoint of the weights.
        decoder: Sizes and options of the model, parsed by the model family.
        quantization: Method of online quantization or its settings, as requested; None for none.
        placement: The device and the platform.
        dtype: The dtype of computation.
        resolver: The resolver of all kernel choices.
        page_size: Tokens per page of the KV cache, common to all attention backends.
        model: The model without weights.
        sampler: The sampler of the engine.
        graphs: Whether decode steps are captured as graphs; None if not requested.
        compiled: Whether and by which backend torch.compile compiles steps; None if not requested.
        offload: The weights that are not resident; None if all weights are resident.
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
        """The directory or file of the checkpoint."""
        return self.checkpoint.path

    def numerics(self) -> AbstractContextManager[None]:
        """Return a context manager that sets the matmul precision by the model's policy."""
        return self.placement.platform.numerics(self.resolver.config.numerics)


DTYPES = ("float32", "bfloat16", "float16")


def compute_dtype(requested: str | torch.dtype, stored: str, placement: Placement) -> torch.dtype:
    """Return the dtype to compute in; ``"auto"`` means the checkpoint's dtype where supported.

    Raises: UnknownNameError: there is no such dtype, or the platform does not support it.
    """
    supported = placement.platform.dtypes(placement.device.torch_device)
    name = str(requested).removeprefix("torch.")
    if name == "auto":
        by_name = {str(dtype).removeprefix("torch."): dtype for dtype in supported}
        return by_name.get(stored, supported[0])
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, (*DTYPES, "auto"))
    dtype: torch.dtype = getattr(torch, name)
    if dtype not in supported:
        supported_names = [str(d).removeprefix("torch.") for d in supported]
        where = f"on platform {placement.platform.name!r}"
        raise UnknownNameError("dtype", name, supported_names, where=where)
    return dtype
