"""The base of all weight formats: groups of inputs, each with scales of its own.

Dimensions: O output features, I input features, N groups of an output, G inputs of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Of the range that a group's numbers span; the first is that range itself.
_SHRINKS = tuple(1 - step / 40 for step in range(17))


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that each group can hold: (code - zero) * scale / tensor_scale.

    Attributes:
        scale: ``[O, N]`` float32, exactly as it will be stored.
        zero: ``[O, N]`` float32 of whole numbers, or None for 0.
        tensor_scale: ``[1]`` float32, or None for 1.
    """

    scale: torch.Tensor
    zero: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None

    @property
    def step(self) -> torch.Tensor:
        """Return the value of a code of 1, ``[O, N]``."""
        return self.scale if self.tensor_scale is None else self.scale / self.tensor_scale

    def group(self, index: int) -> Grid:
        """Return the grid of one group of every output."""
        chosen = slice(index, index + 1)
        zero = None if self.zero is None else self.zero[:, chosen]
        return Grid(self.scale[:, chosen], zero, self.tensor_scale)


def tensor_peak(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a tensor, ``[1]`` float32."""
    return weight.abs().amax().float().reshape(1)


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def storable_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales as ``dtype`` can store them, in float32; 1 for a group of zeros."""
    info = torch.finfo(dtype)
    # No number but zero may be lost to a scale that is too small for the dtype.
    kept = scale.clamp(min=info.tiny * info.eps).to(dtype).float()
    return torch.where(scale > 0, kept, 1.0)


class WeightFormat(ABC):
    """A format that weights of linear layers are rounded to and stored in.

    Attributes:
        storage: compressed-tensors' name of the format.
        inputs_per_scale: G; None where one scale serves all inputs of an output.
        shares_tensor_scale: layers that run as one product must have one scale per tensor in
            common, derived from the largest magnitude of all of them.
    """

    storage: str
    inputs_per_scale: int | None = None
    shares_tensor_scale = False

    @abstractmethod
    def weight_settings(self) -> Mapping[str, Any]:
        """Return ``weights`` of a group of quantization_config."""

    def input_settings(self) -> Mapping[str, Any] | None:
        """Return ``input_activations`` of a group of quantization_config; None for plain ones."""
        return None

    @abstractmethod
    def stored(
        self, weight: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds for a weight ``[O, I]``, rounded to ``grid``.

        Args:
            weight: float32.
            dtype: of the model; scales whose dtype the format leaves open are stored in it.
        """

    @abstractmethod
    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the tensors of ``rounded`` for this shape and dtype, on the meta device."""

    @abstractmethod
    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the float32 weight ``[O, I]`` that stored tensors stand for."""

    @abstractmethod
    def _span(
        self,
        low: torch.Tensor,
        high: torch.Tensor,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None,
    ) -> Grid:
        """Return the grid that holds ``low`` to ``high``, both ``[O, N]``."""

    @abstractmethod
    def _rounded(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the numbers nearest to ``codes`` that a code can be, as float32."""

    def tensor_scale(self, peak: torch.Tensor) -> torch.Tensor | None:
        """Return the scale of a tensor whose largest magnitude is ``peak``; None without one."""
        return None

    def groups(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``[O, N, G]``."""
        size = self.inputs_per_scale or weight.shape[1]
        groups: torch.Tensor = weight.unflatten(1, (weight.shape[1] // size, size))
        return groups

    def fitted(
        self,
        groups: torch.Tensor,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None = None,
        importance: torch.Tensor | None = None,
    ) -> Grid:
        """Return a grid for each group.

        Without ``importance`` it spans the group's numbers. With it, it is that of some narrower
        ones, too, whose squared error, weighted so, is the least: a few large numbers are cut
        where many small ones gain by it.

        Args:
            groups: ``[O, N, G]`` float32.
            importance: ``[N, G]`` float32, not negative.
        """
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        best = self._span(low, high, dtype, tensor_scale)
        if importance is None:
            return best
        least = self._error(groups, best, importance)
        for shrink in _SHRINKS[1:]:
            grid = self._span(low * shrink, high * shrink, dtype, tensor_scale)
            error = self._error(groups, grid, importance)
            better = error < least
            least = torch.where(better, error, least)
            zero = None
            if grid.zero is not None and best.zero is not None:
                zero = torch.where(better, grid.zero, best.zero)
            best = Grid(torch.where(better, grid.scale, best.scale), zero, tensor_scale)
        return best

    def codes(self, groups: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the codes nearest to ``groups`` ``[O, N, G]``, as float32."""
        quotients = groups / grid.step.unsqueeze(-1)
        if grid.zero is not None:
            quotients = quotients + grid.zero.unsqueeze(-1)
        return self._rounded(quotients)

    def snapped(self, groups: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the numbers of the grid nearest to ``groups`` ``[O, N, G]``."""
        codes = self.codes(groups, grid)
        if grid.zero is not None:
            codes = codes - grid.zero.unsqueeze(-1)
        return codes * grid.step.unsqueeze(-1)

    def rounded(
        self, weight: torch.Tensor, peak: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds for ``weight`` ``[O, I]``, each number rounded to nearest.

        Args:
            peak: the largest magnitude of all layers that share a scale per tensor; None where
                the layer is alone.
        """
        wide = weight.float()
        scale = self.tensor_scale(tensor_peak(wide) if peak is None else peak)
        grid = self.fitted(self.groups(wide), weight.dtype, scale)
        return self.stored(wide, grid, weight.dtype)

    def _error(self, groups: torch.Tensor, grid: Grid, importance: torch.Tensor) -> torch.Tensor:
        return ((self.snapped(groups, grid) - groups).square() * importance).sum(-1)
