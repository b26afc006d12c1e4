"""Base class of the weight formats: groups of inputs that share scales.

Dimensions: O output features, I input features, N groups of an output, G inputs of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Candidate ranges for the scale of a group, as fractions of the group's range; the first is the
# full range.
_SHRINK_FACTORS = tuple(1 - step / 40 for step in range(17))


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zero points of a weight: value = (code - zero) * scale / tensor_scale.

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
        """Return the distance between neighbouring quantized values, ``[O, N]``."""
        return self.scale if self.tensor_scale is None else self.scale / self.tensor_scale

    def group(self, index: int) -> Grid:
        """Return the scales and zero points of the group ``index`` of every output."""
        chosen = slice(index, index + 1)
        zero = None if self.zero is None else self.zero[:, chosen]
        return Grid(self.scale[:, chosen], zero, self.tensor_scale)


def tensor_peak(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a tensor, ``[1]`` float32."""
    return weight.abs().amax().float().reshape(1)


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Create a meta-device tensor, which has no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def storable_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round scales to ``dtype`` and return them in float32; a scale of 0 becomes 1."""
    info = torch.finfo(dtype)
    # The clamp stops small scales from underflowing to 0 in dtype, which would lose the group.
    storable = scale.clamp(min=info.tiny * info.eps).to(dtype).float()
    return torch.where(scale > 0, storable, 1.0)


class WeightFormat(ABC):
    """Base class of quantized formats for the weights of linear layers.

    Attributes:
        storage: compressed-tensors' name of the format.
        inputs_per_scale: G; None for one scale per output.
        shares_tensor_scale: fused layers must share one scale per tensor, derived from the largest
            magnitude of all of them.
    """

    storage: str
    inputs_per_scale: int | None = None
    shares_tensor_scale = False

    @abstractmethod
    def weight_settings(self) -> Mapping[str, Any]:
        """Return the ``weights`` entry of a group in ``quantization_config``."""

    def input_settings(self) -> Mapping[str, Any] | None:
        """Return the ``input_activations`` entry of a group, or None if inputs stay unquantized."""
        return None

    @abstractmethod
    def stored(
        self, weight: torch.Tensor, grid: Grid, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Quantize a weight ``[O, I]`` with the scales of ``grid``; return the tensors to store.

        Args:
            weight: float32.
            dtype: of the model; used for scales if the format does not fix a dtype.
        """

    @abstractmethod
    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return meta-device tensors with the shapes and dtypes that ``rounded`` returns."""

    @abstractmethod
    def read(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Dequantize the stored tensors to the float32 weight ``[O, I]``."""

    @abstractmethod
    def _span(
        self,
        low: torch.Tensor,
        high: torch.Tensor,
        dtype: torch.dtype,
        tensor_scale: torch.Tensor | None,
    ) -> Grid:
        """Return scales and zero points for values from ``low`` to ``high``, both ``[O, N]``."""

    @abstractmethod
    def _rounded(self, quotients: torch.Tensor) -> torch.Tensor:
        """Round the quotients weight / step to the nearest values of the format, as float32."""

    def tensor_scale(self, peak: torch.Tensor) -> torch.Tensor | None:
        """Return the per-tensor scale for the magnitude ``peak``; None if the format has none."""
        return None

    def groups(self, weight: torch.Tensor) -> torch.Tensor:
        """Reshape the weight ``[O, I]`` to groups ``[O, N, G]``."""
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
        """Compute the scales and zero points of each group.

        Without ``importance`` the scales cover the full range of the group. With ``importance``,
        narrower ranges are tried too, and the range with the least weighted squared error is used:
        clipping a few large values can make many small values more precise.

        Args:
            groups: ``[O, N, G]`` float32.
            importance: ``[N, G]`` float32, not negative.
        """
        # Zero is always part of the range, so that zeros stay exact.
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        best = self._span(low, high, dtype, tensor_scale)
        if importance is None:
            return best
        least_error = self._error(groups, best, importance)
        for shrink in _SHRINK_FACTORS[1:]:
            grid = self._span(low * shrink, high * shrink, dtype, tensor_scale)
            error = self._error(groups, grid, importance)
            # Each group keeps its own best range.
            better = error < least_error
            least_error = torch.where(better, error, least_error)
            zero = None
            if grid.zero is not None and best.zero is not None:
                zero = torch.where(better, grid.zero, best.zero)
            best = Grid(torch.where(better, grid.scale, best.scale), zero, tensor_scale)
        return best

    def codes(self, groups: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Quantize ``groups`` ``[O, N, G]`` to the nearest values of the format, as float32."""
        quotients = groups / grid.step.unsqueeze(-1)
        if grid.zero is not None:
            quotients = quotients + grid.zero.unsqueeze(-1)
        return self._rounded(quotients)

    def snapped(self, groups: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Quantize and dequantize ``groups`` ``[O, N, G]`` of a weight."""
        quantized = self.codes(groups, grid)
        if grid.zero is not None:
            quantized = quantized - grid.zero.unsqueeze(-1)
        return quantized * grid.step.unsqueeze(-1)

    def rounded(
        self, weight: torch.Tensor, peak: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Round ``weight`` ``[O, I]`` to nearest; return the tensors to store.

        Args:
            peak: the largest magnitude of all layers that share a scale per tensor; None for a
                layer with its own scale.
        """
        wide = weight.float()
        scale = self.tensor_scale(tensor_peak(wide) if peak is None else peak)
        grid = self.fitted(self.groups(wide), weight.dtype, scale)
        return self.stored(wide, grid, weight.dtype)

    def _error(self, groups: torch.Tensor, grid: Grid, importance: torch.Tensor) -> torch.Tensor:
        return ((self.snapped(groups, grid) - groups).square() * importance).sum(-1)
