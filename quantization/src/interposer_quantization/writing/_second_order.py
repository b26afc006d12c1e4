"""GPTQ: round a weight so that the layer's outputs change least.

Dimensions: O output features, I input features, G inputs of a group, T tokens.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", arXiv:2210.17323, section 3; the order of the columns by their second moments is
the authors' later "act order".
"""

from __future__ import annotations

import torch

from interposer_quantization.writing._weight_format import Grid, WeightFormat, tensor_peak

DAMPING = 0.01
"""Default damping: a fraction of the mean diagonal of the second moments, added to the diagonal."""

_COLUMNS = 128


class SecondMoments:
    """Running mean of x x^T over a layer's inputs, ``[I, I]`` float32."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(in_features, in_features, device=device)
        self.num_tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Add the tokens ``x`` ``[T, I]`` to the mean."""
        wide = x.float()
        # In place: the matrix is large.
        self._sum.addmm_(wide.T, wide)
        self.num_tokens += len(x)

    def mean(self) -> torch.Tensor:
        """Return the mean second moments ``[I, I]`` of the inputs.

        Raises: ValueError: no input was added.
        """
        if not self.num_tokens:
            raise ValueError("no input was added")
        return self._sum / self.num_tokens


class Curvature:
    """Factorized second moments of a layer's inputs, for ``second_order_rounded``.

    Layers with the same input share one instance.

    Args:
        moments: H = E x x^T, ``[I, I]`` float32.
        act_order: round the columns with the largest moments first, with the scales of all groups
            fixed beforehand; else compute each group's scales when its first column is reached.
        damping: added to the diagonal of H, as a fraction of the diagonal's mean.
    Attributes:
        importance: the damped diagonal of H, ``[I]``.
        order: the columns in rounding order, ``[I]`` int64.
        factor: upper Cholesky factor U of the inverse of H in that order, ``[I, I]`` float32.
    Raises: ValueError: the moments are not finite.
    """

    def __init__(
        self, moments: torch.Tensor, *, act_order: bool = True, damping: float = DAMPING
    ) -> None:
        if not moments.isfinite().all():
            raise ValueError("the second moments of the inputs are not finite")
        diagonal = moments.diagonal()
        # The damping gives inputs that were always zero a positive importance.
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
    """Quantize ``weight`` so that E |(W - Q) x|^2 is small; return the tensors to store.

    Columns are rounded one after the other. The error of each column is compensated in the columns
    that are not rounded yet: with U the upper Cholesky factor of the inverse of H = E x x^T,

        W[:, j:] -= (W[:, j] - Q[:, j]) / U[j, j] * U[j, j:]

    Args:
        weight: ``[O, I]``, any float dtype; scales are stored in it.
        peak: see ``WeightFormat.rounded``.
    """
    remaining = weight.float().clone()
    num_inputs = remaining.shape[1]
    importance = curvature.importance.view(-1, chosen.inputs_per_scale or num_inputs)
    scale = chosen.tensor_scale(tensor_peak(remaining) if peak is None else peak)
    grid = chosen.fitted(chosen.groups(remaining), weight.dtype, scale, importance)
    size = chosen.inputs_per_scale or num_inputs
    # Without act order, the scales of a group are computed when rounding reaches the group, from
    # weights that already include the compensation.
    has_late_scales = not curvature.act_order and size < num_inputs
    order, factor = curvature.order, curvature.factor
    remaining = remaining[:, order]
    rounded = torch.empty_like(remaining)
    scales, zeros = [], []
    block_columns = size if has_late_scales else _COLUMNS
    for start in range(0, num_inputs, block_columns):
        stop = min(start + block_columns, num_inputs)
        if has_late_scales:
            index = start // size
            group = chosen.fitted(
                remaining[:, start:stop].unsqueeze(1),
                weight.dtype,
                scale,
                importance[index : index + 1],
            )
            scales.append(group.scale)
            zeros.append(group.zero)
        # Index of each column's group in group_grid, which has one group in the late-scales case.
        groups = [0] * (stop - start) if has_late_scales else (order[start:stop] // size).tolist()
        group_grid = group if has_late_scales else grid
        errors = torch.empty_like(remaining[:, start:stop])
        for offset, index in enumerate(groups):
            column = start + offset
            exact = remaining[:, column : column + 1]
            nearest = chosen.snapped(exact.unsqueeze(1), group_grid.group(index)).squeeze(1)
            rounded[:, column : column + 1] = nearest
            error = (exact - nearest) / factor[column, column]
            remaining[:, column:stop] -= error * factor[column, column:stop]
            errors[:, offset : offset + 1] = error
        # Within the block, compensation was immediate; later blocks get it as one matmul.
        remaining[:, stop:] -= errors @ factor[start:stop, stop:]
    if has_late_scales:
        all_zeros = None if zeros[0] is None else torch.cat([z for z in zeros if z is not None], 1)
        grid = Grid(torch.cat(scales, 1), all_zeros, scale)
    restored = torch.empty_like(rounded)
    # Undo the permutation of the columns.
    restored[:, order] = rounded
    return chosen.stored(restored, grid, weight.dtype)


def _inverse_factor(moments: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped inverse, float32."""
    # On the CPU, because not every device supports float64.
    damped = moments.double().cpu()
    diagonal = damped.diagonal()
    # The clamp keeps the matrix positive definite even if every input was zero.
    mean = diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    diagonal += damping * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float().to(moments.device)
