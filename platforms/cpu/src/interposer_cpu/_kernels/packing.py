"""Weights as the compiled library packs them: for vectors of sixteen outputs.

Dimensions: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from interposer_cpu._kernels.interface import SCALE_TYPES

Description = tuple[int, ...]
"""Arguments of the library's ``packed_bytes``, and of its ``pack``."""


class PackedFormat(IntEnum):
    """The library's numbers of the formats that it holds weights in."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    E2M1 = 4
    E4M3 = 5

    @property
    def codes_per_element(self) -> int:
        """Return how many codes an element of the unpacked weight holds."""
        return 2 if self in (PackedFormat.INT4, PackedFormat.E2M1) else 1


PLAIN_FORMATS = {torch.float32: PackedFormat.FLOAT32, torch.bfloat16: PackedFormat.BFLOAT16}


def described(
    form: PackedFormat,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zero_points: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[Description, list[torch.Tensor]]:
    """Return the description of a weight to pack, and the tensors whose addresses are in it.

    Args:
        weight: ``[O, I]``, or ``[O, I / 2]`` of pairs.
        scales: ``[O, G]`` or ``[1, G]``.
        zero_points: ``[O, G]``.
        bias: ``[O]``, held in float32.
    """
    out_features, columns = weight.shape
    in_features = columns * form.codes_per_element
    offsets = None if bias is None else bias.float()
    given = (weight, scales, zero_points, offsets)
    parts = [None if part is None else part.contiguous() for part in given]
    scale_type, group, stride = -1, 0, 0
    if scales is not None:
        rows, num_groups = scales.shape
        scale_type, group = SCALE_TYPES[scales.dtype], in_features // num_groups
        stride = num_groups if rows > 1 or out_features == 1 else 0
    addresses = (0 if part is None else part.data_ptr() for part in parts)
    description = (form, scale_type, out_features, in_features, group, *addresses, stride)
    return description, [part for part in parts if part is not None]
