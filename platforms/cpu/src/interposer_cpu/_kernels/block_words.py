"""The numbers that the compiled library takes of a decoder block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NO_SCALES: tuple[int, ...] = (0, 0, 0, 0)


class BoundBlock:
    """The fused call for the kernels that the projections hold, as long as they hold them.

    Attributes:
        kernels: of the projections.
        is_whole: the MLP is computed too.
        statics: of each projection, whether its last operand is a scale; empty where none is.
        address: of the interposer_block that the library reads, None where there is no such call.
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
        self.memory = (
            None if facts is None else torch.frombuffer(bytearray(facts), dtype=torch.int64)
        )
        self.address = None if self.memory is None else self.memory.data_ptr()

    def input_scales(self, products: Sequence[Any]) -> Sequence[int]:
        """Return addresses of one scale for all tokens, for each of four projections, or 0."""
        if not self.statics:
            return _NO_SCALES
        return [
            product.operands[-1].data_ptr() if is_static else 0
            for product, is_static in zip(products, self.statics, strict=True)
        ]

    def __reduce__(self) -> tuple[type[BoundBlock], tuple[tuple[object, ...], bool, None]]:
        """Leave a copy of a layer without an address, so that it binds memory of its own."""
        return BoundBlock, ((), False, None)


def attention_words(attn: Any) -> tuple[int, int, int, int]:
    """Return addresses of sinks, of scales of keys and of values, and the stride of these."""
    sinks = attn._parameters["sinks"].data_ptr() if attn.spec.sinks else 0
    if attn.scales is None:
        return sinks, 0, 0, 0
    num_scales, keys = attn.scales.shape[1], attn.scales.data_ptr()
    return sinks, keys, keys + 4 * num_scales, 1 if num_scales > 1 else 0
