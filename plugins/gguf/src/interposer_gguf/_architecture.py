"""The description of one model architecture: family, tensor names and conversions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from interposer_gguf._conversions import Conversion, RowSplit
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import MetadataReader

RMS_EPSILON = "attention.layer_norm_rms_epsilon"
"""The metadata key of the epsilon of RMS norms."""

LAYER_EPSILON = "attention.layer_norm_epsilon"
"""The metadata key of the epsilon of layer norms."""

FIRST_BIAS = "blk.0.attn_q.bias"
"""A tensor that exists if the query, key and value projections have biases."""

Fields = Callable[[MetadataReader, GGUFFile], Mapping[str, Any]]
"""Returns the fields of config.json that are special to an architecture."""

Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Joins two tensors of a file to one tensor of a Hugging Face checkpoint."""


@dataclass(frozen=True)
class Architecture:
    """The model family of one value of ``general.architecture``, and the conversion of a file.

    Attributes:
        family: name of the architecture in config.json.
        block_modules: Hugging Face names of the modules in a block, by names in the file, if
            different from Llama's. A name with ``{}`` is the module of one expert: the file has the
            matrices of all experts as one tensor. A name such as ``attn_sinks.weight`` or ``ssm_a``
            stands for a tensor, not for a module.
        outer_modules: the same for modules outside of blocks.
        block_prefix: prefix of the names of blocks in Hugging Face checkpoints.
        permuted: the rows of queries and keys are in the order of llama.cpp's Llama files.
        norm_offset: number that the file has added to the weights of norms.
        norms_without_offset: ends of the names of norms to which nothing was added.
        transposed: matrices of blocks are ``[inputs, outputs]`` in Hugging Face checkpoints.
        epsilon: metadata key, and field of config.json.
        fields: see ``Fields``.
        has_experts: the model has MoE layers.
        is_uniform: all layers have attention and MLPs of one size. If not, ``fields`` returns the
            sizes and everything that belongs to attention.
        joins: by the name of a tensor in the file, the tensor to join and the function that joins.
        conversions: by the name of a tensor in the file.
        splits: tensors to split, by the name in the file.
        row_vectors: vectors in the file that are tensors of one row in Hugging Face checkpoints.
        interleaved_experts: the module of experts with alternating gate and up rows in checkpoints;
            may be in MXFP4.
    """

    family: str
    block_modules: Mapping[str, str] = field(default_factory=dict)
    outer_modules: Mapping[str, str] = field(default_factory=dict)
    block_prefix: str = "model.layers"
    permuted: bool = False
    norm_offset: float = 0.0
    norms_without_offset: tuple[str, ...] = ()
    transposed: bool = False
    epsilon: tuple[str, str] = (RMS_EPSILON, "rms_norm_eps")
    fields: Fields = lambda metadata, file: {}
    has_experts: bool = False
    is_uniform: bool = True
    joins: Mapping[str, tuple[str, Join]] = field(default_factory=dict)
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    splits: Mapping[str, RowSplit] = field(default_factory=dict)
    row_vectors: tuple[str, ...] = ()
    interleaved_experts: str = ""


def granite_multipliers(metadata: MetadataReader, file: GGUFFile) -> Mapping[str, Any]:
    """Return the config fields of Granite's scaling multipliers."""
    scale = metadata.number("attention.scale", 0.0)
    return {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        **({"attention_multiplier": scale} if scale else {}),
    }
