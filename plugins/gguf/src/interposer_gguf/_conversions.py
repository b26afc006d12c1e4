"""Conversions of tensors from a GGUF file to a Hugging Face checkpoint.

Shapes: N heads, D head size, G key heads, R value heads per key head, C channels, W window.

Source: the conversions of llama.cpp, inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Config = Mapping[str, Any]
"""The contents of config.json."""


def _never(config: Config, size: int) -> bool:
    return False


def _always(config: Config, size: int) -> bool:
    return True


@dataclass(frozen=True)
class Conversion:
    """Conversion of one GGUF tensor to a checkpoint tensor.

    Attributes:
        function: returns the tensor of the checkpoint.
        keeps: returns whether a tensor in blocks of a given number of elements may stay in blocks.
            ``function`` then only moves rows or whole blocks, and is called with bytes.
    """

    function: Callable[[torch.Tensor, Config], torch.Tensor]
    keeps: Callable[[Config, int], bool] = _never


@dataclass(frozen=True)
class RowSplit:
    """The split of a tensor's rows into several checkpoint tensors.

    Attributes:
        names: names of the modules in a block.
        function: returns the parts, of values or of bytes of blocks.
    """

    names: tuple[str, ...]
    function: Callable[[torch.Tensor, Config], tuple[torch.Tensor, ...]]


def _decay_log(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return the logarithm of the decay ``[N]`` from negative rates ``[N]`` or ``[N, 1]``."""
    return values.flatten().neg().log()


def _vector(values: torch.Tensor, config: Config) -> torch.Tensor:
    return values.flatten()


def _channels(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return a depthwise convolution's weight in the checkpoint's shape, ``[C, 1, W]``."""
    return values.unsqueeze(1)


def _inputs_first(values: torch.Tensor, config: Config) -> torch.Tensor:
    return values.mT.contiguous()


def _by_head(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Regroup the rows of a QKV weight by head instead of by projection."""
    heads = int(config["num_attention_heads"])
    # (projection, head, row) becomes (head, projection, row).
    ordered: torch.Tensor = values.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    return ordered


def _value_heads(config: Config) -> tuple[int, int]:
    """Return the value heads per key head and the number of key heads."""
    groups = int(config["linear_num_key_heads"])
    return int(config["linear_num_value_heads"]) // groups, groups


def _grouped_rows(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Sort rows of value heads by key head; in the file, the key heads alternate."""
    heads: torch.Tensor = values.unflatten(0, (*_value_heads(config), -1))
    return heads.transpose(0, 1).flatten(0, 2)


def _grouped_last(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Sort the value heads by key head; the rows of queries and keys come first and stay."""
    query_key_rows = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return torch.cat((values[:query_key_rows], _grouped_rows(values[query_key_rows:], config)))


def _grouped_columns(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Sort the columns of value heads by key head."""
    heads: torch.Tensor = values.unflatten(1, (*_value_heads(config), -1))
    return heads.transpose(1, 2).flatten(1)


def _keeps_heads(config: Config, size: int) -> bool:
    # Columns of a head can move as blocks only if no block reaches into the next head.
    return int(config["linear_value_head_dim"]) % size == 0


DECAY = Conversion(_decay_log)
"""A logarithm of a decay, stored in files as a negative rate."""
GROUPED_DECAY = Conversion(lambda values, config: _decay_log(_grouped_rows(values, config), config))
"""A logarithm of a decay, with the value heads reordered."""
VECTOR = Conversion(_vector)
"""A vector, stored in files as a matrix."""
CHANNELS = Conversion(_channels)
"""The weight of a depthwise convolution, stored in files without its dimension of size 1."""
GROUPED_CHANNELS = Conversion(
    lambda values, config: _channels(_grouped_last(values, config), config)
)
"""The weight of a depthwise convolution, with the value heads reordered."""
INPUTS_FIRST = Conversion(_inputs_first)
"""Matrices of experts, transposed to ``[E, inputs, outputs]``."""
BY_HEAD = Conversion(_by_head, _always)
"""A fused QKV projection, grouped by head in checkpoints and by projection in files."""
GROUPED_ROWS = Conversion(_grouped_rows, _always)
"""A projection to value heads, with the heads reordered."""
GROUPED_LAST = Conversion(_grouped_last, _always)
"""A fused QKV projection, with the value heads reordered."""
GROUPED_COLUMNS = Conversion(_grouped_columns, _keeps_heads)
"""A projection from value heads, with the heads reordered."""
