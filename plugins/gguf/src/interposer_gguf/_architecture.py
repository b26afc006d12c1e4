"""The architecture that a value of ``general.architecture`` stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from interposer_gguf._file_format import GGUFFile
from interposer_gguf._restoration import Divided, Restored
from interposer_gguf._settings import Settings

RMS_EPSILON = "attention.layer_norm_rms_epsilon"
"""The key of the metadata for the epsilon of norms that do not subtract a mean."""

LAYER_EPSILON = "attention.layer_norm_epsilon"
"""The key of the metadata for the epsilon of norms that subtract the mean."""

FIRST_BIAS = "blk.0.attn_q.bias"
"""The tensor that says whether projections of queries, keys and values have biases."""

Fields = Callable[[Settings, GGUFFile], Mapping[str, Any]]
"""Returns fields of config.json that only this architecture has, or has otherwise."""

Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns one tensor of a Hugging Face checkpoint from the two that a file has for it."""


@dataclass(frozen=True)
class Architecture:
    """The family and the names that one value of ``general.architecture`` stands for.

    Attributes:
        family: the architecture's name in config.json.
        inner: modules below a block by the names in the file, where they are not Llama's. With
            ``{}`` in it, a name is of one expert, and the file has the matrices of all as one
            tensor. A name that the file has without more, as ``attn_sinks.weight`` or ``ssm_a``,
            stands for a whole tensor.
        outer: the same of modules outside of blocks.
        blocks: what the names of blocks begin with in Hugging Face checkpoints.
        permuted: rows of queries and keys are stored in Llama's other order.
        norm_offset: what the file adds to the weights of norms, those apart that ``plain`` names.
        plain: ends of the names of norms that are stored as they are.
        transposed: matrices of blocks are ``[inputs, outputs]`` in Hugging Face checkpoints.
        epsilon: key of the metadata, and the field of config.json.
        fields: see ``Fields``.
        mixture: layers have experts.
        regular: all layers that have attention or an MLP have one of the same size; where they
            differ, ``fields`` returns those sizes, and all that belongs to attention.
        joined: names in the file of two tensors that are one in Hugging Face checkpoints, the
            first with the second and what makes one of them.
        restored: tensors by their names in the file, and what becomes of them.
        divided: tensors by their names in the file, and which they are in checkpoints.
        rows: tensors of one row in Hugging Face checkpoints that are vectors in the file.
        alternating: the module of experts whose matrices are stored together, gates and what
            they act on in turn, and may be microscaled.
    """

    family: str
    inner: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    blocks: str = "model.layers"
    permuted: bool = False
    norm_offset: float = 0.0
    plain: tuple[str, ...] = ()
    transposed: bool = False
    epsilon: tuple[str, str] = (RMS_EPSILON, "rms_norm_eps")
    fields: Fields = lambda settings, file: {}
    mixture: bool = False
    regular: bool = True
    joined: Mapping[str, tuple[str, Join]] = field(default_factory=dict)
    restored: Mapping[str, Restored] = field(default_factory=dict)
    divided: Mapping[str, Divided] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    alternating: str = ""


def multiplied(settings: Settings, file: GGUFFile) -> Mapping[str, Any]:
    """Return the multipliers of Granite models."""
    scale = settings.number("attention.scale", 0.0)
    return {
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "logits_scaling": settings.number("logit_scale", 1.0),
        **({"attention_multiplier": scale} if scale else {}),
    }
