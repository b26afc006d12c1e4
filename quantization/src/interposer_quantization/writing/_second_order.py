"""Rounding a weight so that its outputs change least, by GPTQ.

Dimensions: O output features, I input features, G inputs of a group, T tokens.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", arXiv:2210.17323, section 3; the order of the columns by their second moments is
that of the authors' later "act order".
"""

from __future__ import annotations

import torch

from interposer_quantization.writing._weight_format import Grid, WeightFormat, tensor_peak

DAMPING = 0.01
"""The addition to the diagonal of the second moments, as a fraction of its mean."""

_COLUMNS = 128


class SecondMoments:
    """The mean of x x^T over all inputs ``x`` of a layer that were added, ``[I, I]`` float32."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(in_features, in_features, device=device)
        self.num_tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Count in the rows of ``x`` ``[T, I]``."""
        wide = x.float()
        self._sum.addmm_(wide.T, wide)
        self.num_tokens += len(x)

    def mean(self) -> torch.Tensor:
        """Return the second moments.

        Raises: ValueError: nothing was added.
        """
        if not self.num_tokens:
            raise ValueError("no input was added")
        return self._sum / self.num_tokens


class Curvature:
    """The change of the outputs with each weight, which rounding takes from the inputs.

    Layers of one input share it.

    Args:
        moments: H = E x x^T, ``[I, I]`` float32.
        act_order: take the columns with the largest moments first, with the scales of all groups
            fixed before; else each group gets its scales when its first column is reached.
        damping: added to the diagonal of H, as a share of its mean.
    Attributes:
        importance: the damped diagonal of H, ``[I]``.
        order: the columns as they are taken, ``[I]`` int64.
        factor: U in that order, ``[I, I]`` float32: the upper Cholesky factor of the inverse of H.
    Raises: ValueError: the moments are not finite.
    """

    def __init__(
        self, moments: torch.Tensor, *, act_order: bool = True, damping: float = DAMPING
    ) -> None:
        if not moments.isfinite().all():
            raise ValueError("the second moments of the inputs are not finite")
        diagonal = moments.diagonal()
        # An input that was never seen still counts for something.
        self.importance = diagonal + damping * diagonal.mean()
        self.act_order = act_order
        self.order = torch.arange(len(moments), device=moments.device)
        if act_order:
            self.order = diagonal.argsort(descending=True)
        self.factor = _inverse_factor(moments[self.order][:, self.order], damping)


def second_order_rounded(
    chosen: WeightFormat,
    weight: torch.Tensor,
    curvature: Curvature,
    peak: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``weight``, rounded so that E |(W - Q) x|^2 is small.

    Columns are rounded one after the other. The error of each is made good in those that are
    still to come: with U the upper Cholesky factor of the inverse of H = E x x^T,

        W[:, j:] -= (W[:, j] - Q[:, j]) / U[j, j] * U[j, j:]

    Args:
        weight: ``[O, I]``, any float dtype; scales are stored in it.
        peak: see ``WeightFormat.rounded``.
    """
    rest = weight.float().clone()
    num_inputs = rest.shape[1]
    importance = curvature.importance.view(-1, chosen.inputs_per_scale or num_inputs)
    scale = chosen.tensor_scale(tensor_peak(rest) if peak is None else peak)
    grid = chosen.fitted(chosen.groups(rest), weight.dtype, scale, importance)
    size = chosen.inputs_per_scale or num_inputs
    # Groups in order get their scales at the start of a block, of weights that are up to date.
    renewed = not curvature.act_order and size < num_inputs
    order, factor = curvature.order, curvature.factor
    rest = rest[:, order]
    rounded = torch.empty_like(rest)
    scales, zeros = [], []
    columns = size if renewed else _COLUMNS
    for start in range(0, num_inputs, columns):
        stop = min(start + columns, num_inputs)
        if renewed:
            index = start // size
            group = chosen.fitted(
                rest[:, start:stop].unsqueeze(1), weight.dtype, scale, importance[index : index + 1]
            )
            scales.append(group.scale)
            zeros.append(group.zero)
        groups = [0] * (stop - start) if renewed else (order[start:stop] // size).tolist()
        source = group if renewed else grid
        errors = torch.empty_like(rest[:, start:stop])
        for offset, index in enumerate(groups):
            column = start + offset
            exact = rest[:, column : column + 1]
            nearest = chosen.snapped(exact.unsqueeze(1), source.group(index)).squeeze(1)
            rounded[:, column : column + 1] = nearest
            error = (exact - nearest) / factor[column, column]
            rest[:, column:stop] -= error * factor[column, column:stop]
            errors[:, offset : offset + 1] = error
        rest[:, stop:] -= errors @ factor[start:stop, stop:]
    if renewed:
        stacked = None if zeros[0] is None else torch.cat([z for z in zeros if z is not None], 1)
        grid = Grid(torch.cat(scales, 1), stacked, scale)
    restored = torch.empty_like(rounded)
    restored[:, order] = rounded
    return chosen.stored(restored, grid, weight.dtype)


def _inverse_factor(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped inverse, float32."""
    # In float64, which not every device has.
    wide = moments.double().cpu()
    diagonal = wide.diagonal()
    # An input that was never seen would stay as undetermined without it.
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    diagonal += damping * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float().to(moments.device)
