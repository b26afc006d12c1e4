"""A linear layer whose plain weight becomes integers when it is finalized.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from interposer import Site
from interposer.errors import ConfigError
from interposer_quantization.compressed_tensors import CompressedTensors
from interposer_quantization.fp8_parameters import Members
from interposer_quantization.online_linear import OnlineLinear, chunks
from interposer_quantization.writing.integer_formats import IntegerFormat
from interposer_quantization.writing.schemes import quantization_config

__all__ = ["FormatOf", "OnlineIntegerLinear", "largest_group", "rounded_rows"]

FormatOf = Callable[[Site, int], IntegerFormat]
"""The format of the layer at a site, by its number of inputs."""


class OnlineIntegerLinear(OnlineLinear):
    """A layer that is held as one of compressed-tensors is.

    Attributes:
        scale_dtype: that scales are rounded to before numbers are divided by them.
    """

    def __init__(self, format_of: FormatOf, scale_dtype: torch.dtype = torch.float32) -> None:
        self.format_of = format_of
        self.scale_dtype = scale_dtype

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``weight`` and, if asked for, ``bias``, as plain checkpoints have them.

        Raises: ConfigError: groups do not divide the inputs.
        """
        self.chosen = self.format_of(site, in_features)
        self.quantize = self._tensors
        scheme = CompressedTensors.parse(quantization_config(self.chosen, ()))
        parts = Members(layer, site, out_features).sizes
        method = scheme.linear_method(site.prefix, tuple(parts))
        assert method is not None, "the class of all linear layers is its target"
        self.method = method
        super().create_weights(layer, site, in_features, out_features, bias)

    def _tensors(self, weight: torch.Tensor, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return what a checkpoint would hold, but for the dtype of scales.

        Rows are rounded one by one, so that layers may be fused before.
        """
        stored: dict[str, torch.Tensor] = {}
        for start, rounded in rounded_rows(self.chosen, weight, self.scale_dtype):
            for name, tensor in rounded.items():
                if name not in stored:
                    stored[name] = tensor.new_empty((len(weight), *tensor.shape[1:]))
                stored[name][start : start + len(tensor)] = tensor
        return stored


def rounded_rows(
    chosen: IntegerFormat, weight: torch.Tensor, scale_dtype: torch.dtype
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield where some rows of ``weight`` begin, and what they are rounded to, in bytes.

    Args:
        scale_dtype: that scales, which are float32, are exact in.
    """
    start = 0
    for rows in chunks(weight):
        wide = rows.float()
        grid = chosen.fitted(chosen.groups(wide), scale_dtype)
        yield start, chosen.stored(wide, grid, torch.float32)
        start += len(rows)


def largest_group(site: Site, in_features: int, sizes: Sequence[int]) -> int:
    """Return the first of ``sizes`` of groups that divides the inputs.

    Raises: ConfigError: there is none.
    """
    for size in sizes:
        if in_features % size == 0:
            return size
    listed = ", ".join(map(str, sizes))
    raise ConfigError(
        f"{site.prefix}: no groups of {listed} divide its {in_features} inputs. Try: state a "
        "'group_size' that does, or name the layer in 'modules_to_not_convert'"
    )
