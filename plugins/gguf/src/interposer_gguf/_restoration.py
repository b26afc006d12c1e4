"""Tensors of a file turned into those of a Hugging Face checkpoint, where they differ.

Dimensions: N heads, D head size, G key heads, R value heads for each of them, C channels, W window.

Source: the conversions of llama.cpp, of which these are the inverse.
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
class Restored:
    """The change of one tensor.

    Attributes:
        function: returns it as checkpoints have it.
        keeps: says whether blocks of so many numbers stay as they are: ``function`` moves them
            then, and takes and returns their bytes as well as numbers.
    """

    function: Callable[[torch.Tensor, Config], torch.Tensor]
    keeps: Callable[[Config, int], bool] = _never


@dataclass(frozen=True)
class Divided:
    """Several tensors of checkpoints that are one in a file, each some of its rows.

    Attributes:
        names: of the modules below a block.
        function: returns them, of numbers or of bytes of blocks.
    """

    names: tuple[str, ...]
    function: Callable[[torch.Tensor, Config], tuple[torch.Tensor, ...]]


def _decay_log(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return the logarithm of the decay ``[N]``, of the rates ``[N]`` or ``[N, 1]`` below 0."""
    return values.flatten().neg().log()


def _vector(values: torch.Tensor, config: Config) -> torch.Tensor:
    return values.flatten()


def _channels(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return the weight ``[C, 1, W]`` of a convolution of each channel by itself."""
    return values.unsqueeze(1)


def _inputs_first(values: torch.Tensor, config: Config) -> torch.Tensor:
    return values.mT.contiguous()


def _by_head(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return rows of query, key and value of one head beside each other, not those of all heads."""
    heads = int(config["num_attention_heads"])
    ordered: torch.Tensor = values.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    return ordered


def _value_heads(config: Config) -> tuple[int, int]:
    """Return R and G."""
    groups = int(config["linear_num_key_heads"])
    return int(config["linear_num_value_heads"]) // groups, groups


def _grouped_rows(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return rows of value heads sorted by key head, of those in which key heads alternate."""
    heads: torch.Tensor = values.unflatten(0, (*_value_heads(config), -1))
    return heads.transpose(0, 1).flatten(0, 2)


def _grouped_last(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return rows, of which the last are those of value heads, in the order of checkpoints."""
    others = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return torch.cat((values[:others], _grouped_rows(values[others:], config)))


def _grouped_columns(values: torch.Tensor, config: Config) -> torch.Tensor:
    """Return a matrix whose inputs are value heads, in the order of checkpoints."""
    heads: torch.Tensor = values.unflatten(1, (*_value_heads(config), -1))
    return heads.transpose(1, 2).flatten(1)


def _keeps_heads(config: Config, size: int) -> bool:
    return int(config["linear_value_head_dim"]) % size == 0


DECAY = Restored(_decay_log)
"""The logarithm of a decay, which files have as a rate below 0."""
GROUPED_DECAY = Restored(lambda values, config: _decay_log(_grouped_rows(values, config), config))
"""The same of value heads that files have in another order."""
VECTOR = Restored(_vector)
"""A vector, which files have as a matrix."""
CHANNELS = Restored(_channels)
"""The weight of a convolution, whose dimension of 1 files leave out."""
GROUPED_CHANNELS = Restored(lambda values, config: _channels(_grouped_last(values, config), config))
"""The same of value heads that files have in another order."""
INPUTS_FIRST = Restored(_inputs_first)
"""Matrices of experts as ``[E, inputs, outputs]``."""
BY_HEAD = Restored(_by_head, _always)
"""The projection to queries, keys and values of a head, which files have as those of all heads."""
GROUPED_ROWS = Restored(_grouped_rows, _always)
"""The projection to value heads that files have in another order."""
GROUPED_LAST = Restored(_grouped_last, _always)
"""The projection to queries, keys and value heads that files have in another order."""
GROUPED_COLUMNS = Restored(_grouped_columns, _keeps_heads)
"""The projection of value heads that files have in another order."""
