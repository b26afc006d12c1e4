"""Constant arguments of a fused decoder block: the C struct ``interposer_block``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NO_SCALES: tuple[int, ...] = (0, 0, 0, 0)


class BoundBlock:
    """Native arguments of a decoder block, valid while the projections keep their kernels.

    Attributes:
        kernels: kernels of the projections.
        is_whole: the call also computes the MLP.
        statics: for each projection, whether its last operand is a static input scale; empty if no
            projection has one.
        address: address of the interposer_block; None if the block cannot be fused.
    """

    __slots__ = ("address", "is_whole", "kernels", "memory", "statics")

    def __init__(
        self,
        kernels: tuple[object, ...],
        is_whole: bool,
        facts: bytes | None,
        statics: tuple[bool, ...] = (),
    ) -> None:
        self.kernels = kernels
        self.is_whole = is_whole
        self.statics = statics
        # The tensor owns the memory of ``address``.
        self.memory = (
            None if facts is None else torch.frombuffer(bytearray(facts), dtype=torch.int64)
        )
        self.address = None if self.memory is None else self.memory.data_ptr()

    def input_scales(self, projections: Sequence[Any]) -> Sequence[int]:
        """List the addresses of the four projections' static input scales; 0 without a scale."""
        if not self.statics:
            return _NO_SCALES
        return [
            projection.operands[-1].data_ptr() if is_static else 0
            for projection, is_static in zip(projections, self.statics, strict=True)
        ]

    def __reduce__(self) -> tuple[type[BoundBlock], tuple[tuple[object, ...], bool, None]]:
        """Copy the object without the address: a copied layer builds its own struct."""
        return BoundBlock, ((), False, None)


def attention_arguments(attn: Any) -> tuple[int, int, int, int]:
    """List the addresses of sinks, key scales and value scales, and the stride of the scales."""
    sinks = attn._parameters["sinks"].data_ptr() if attn.spec.sinks else 0
    if attn.scales is None:
        return sinks, 0, 0, 0
    # scales is [2, 1] or [2, K] float32: key scales, then value scales.
    num_scales, keys = attn.scales.shape[1], attn.scales.data_ptr()
    return sinks, keys, keys + 4 * num_scales, 1 if num_scales > 1 else 0
