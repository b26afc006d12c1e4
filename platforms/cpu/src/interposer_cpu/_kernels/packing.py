"""Descriptions of weights to be packed by the compiled library in panels of sixteen outputs.

Dimensions: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from interposer_cpu._kernels.interface import SCALE_TYPES

Description = tuple[int, ...]
"""Arguments of the library's ``packed_bytes`` and ``pack``."""


class PackedFormat(IntEnum):
    """Number formats of packed weights, with the library's numbers."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    E2M1 = 4
    E4M3 = 5
    COMPACT = 6

    @property
    def codes_per_element(self) -> int:
        """Return the number of quantized values in one element of the unpacked weight."""
        return 2 if self in (PackedFormat.INT4, PackedFormat.E2M1) else 1


PLAIN_FORMATS = {torch.float32: PackedFormat.FLOAT32, torch.bfloat16: PackedFormat.BFLOAT16}


def describe_weight(
    form: PackedFormat,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zero_points: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[Description, list[torch.Tensor]]:
    """Build the native description of a weight to be packed.

    Args:
        weight: ``[O, I]``, or ``[O, I / 2]`` with two 4-bit values per byte.
        scales: ``[O, G]`` or ``[1, G]``.
        zero_points: ``[O, G]``.
        bias: ``[O]``, converted to float32.
    Returns: the description, and the tensors to which the description points; the caller must keep
        the tensors alive until the weight is packed.
    """
    out_features, columns = weight.shape
    in_features = columns * form.codes_per_element
    wide_bias = None if bias is None else bias.float()
    parts = [
        None if part is None else part.contiguous()
        for part in (weight, scales, zero_points, wide_bias)
    ]
    scale_type, group, stride = -1, 0, 0  # -1 is kNone
    if scales is not None:
        rows, num_groups = scales.shape
        scale_type, group = SCALE_TYPES[scales.dtype], in_features // num_groups
        stride = num_groups if rows > 1 or out_features == 1 else 0  # 0: all rows share the scales
    # The order is that of interposer_plain in native/linear/packed.h.
    addresses = (0 if part is None else part.data_ptr() for part in parts)
    description = (form, scale_type, out_features, in_features, group, *addresses, stride)
    return description, [part for part in parts if part is not None]
