"""Reading and checking of one layer's 4-bit tensors.

Dimensions: I input features, O output features, G inputs per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch

from interposer.errors import CheckpointError
from interposer_nf4._quant_state import QuantState
from interposer_nf4._settings import FourBit

_MEND = "copy the checkpoint again, or quantize the model again"
_CODES, _NESTED_CODES = 16, 256


def names_of(kind: FourBit) -> dict[str, str]:
    """Return the tensor names relative to the layer's name, by role."""
    names = {
        "weight": "weight",
        "absmax": "weight.absmax",
        "quant_map": "weight.quant_map",
        "state": f"weight.quant_state.bitsandbytes__{kind.quant_type}",
    }
    if kind.double:
        names["nested_absmax"] = "weight.nested_absmax"
        names["nested_quant_map"] = "weight.nested_quant_map"
    return names


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A 4-bit weight with float32 scales.

    Attributes:
        packed: ``[O, I / 2]`` uint8, the first of two inputs in the high nibble.
        absmax: ``[B]`` float32, one scale per block of ``blocksize`` weights in row order; the last
            block may be shorter.
        codebook: ``[16]`` float32.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    codebook: torch.Tensor
    blocksize: int

    @property
    def inputs_per_scale(self) -> int:
        """Return the largest G for which no group of G inputs crosses a block boundary."""
        # Blocks may continue into the next row, so a group has to divide both block and row.
        return gcd(2 * self.packed.shape[1], self.blocksize)

    def scales(self, inputs_per_scale: int) -> torch.Tensor:
        """Expand the block scales to one per group of G inputs, ``[O, I / G]``.

        Args:
            inputs_per_scale: G, which divides the block size and the number of inputs.
        """
        repeated = self.absmax.repeat_interleave(self.blocksize // inputs_per_scale)
        outputs, inputs = self.packed.shape[0], 2 * self.packed.shape[1]
        count = outputs * inputs // inputs_per_scale
        return repeated[:count].view(outputs, inputs // inputs_per_scale)

    @classmethod
    def read(
        cls,
        kind: FourBit,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
    ) -> StoredWeight:
        """Check the tensors of a layer and return the weight.

        Args:
            kind: storage that the config states.
            shape: outputs and inputs.
            tensors: by role, as ``names_of`` lists them.
            names: the checkpoint's tensor names, by role.
        Raises: CheckpointError: tensors contradict each other, the config or the format.
        """
        state = QuantState.read(names["state"], tensors["state"])
        facts = {
            "quant_type": (state.quant_type, kind.quant_type),
            "shape": (state.shape, shape),
            "double quantization": (state.nested, kind.double),
        }
        for fact, (stated_value, expected) in facts.items():
            if stated_value != expected:
                raise CheckpointError(
                    names["state"],
                    f"states {fact} {stated_value}, the config asks for {expected}",
                    "copy config and weights again, from one place",
                )
        outputs, inputs = shape
        # Compared in bytes, because bnb_4bit_quant_storage may be a wider dtype than uint8.
        packed = tensors["weight"]
        if packed.nbytes != outputs * inputs // 2:
            raise CheckpointError(
                names["weight"],
                f"has {packed.nbytes} bytes, {outputs * inputs // 2} hold the values of {outputs} "
                f"outputs and {inputs} inputs",
                _MEND,
            )
        num_blocks = -(-outputs * inputs // state.blocksize)
        if state.nested:
            absmax = _dequantized(state, num_blocks, tensors, names)
        else:
            absmax = _numbers(names["absmax"], tensors["absmax"], num_blocks)
            if (absmax < 0).any():
                index = int((absmax < 0).nonzero()[0])
                raise CheckpointError(
                    names["absmax"],
                    f"holds the scale {float(absmax[index])} for block {index}, must not be "
                    "negative",
                    _MEND,
                )
        codebook = _numbers(names["quant_map"], tensors["quant_map"], _CODES)
        # Finite scales and codebook values can still overflow when they are multiplied.
        largest = absmax.abs().amax() * codebook.abs().amax()
        if not largest.isfinite():
            raise CheckpointError(
                names["absmax"], "holds scales with which weights are infinite", _MEND
            )
        rows = packed.contiguous().flatten().view(torch.uint8).view(outputs, inputs // 2)
        return cls(rows, absmax, codebook, state.blocksize)


def _dequantized(
    state: QuantState,
    num_blocks: int,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
) -> torch.Tensor:
    """Dequantize the scales ``[B]`` float32: nested_quant_map[absmax] * nested_absmax + offset.

    Multiplication and addition are rounded separately, as in bitsandbytes.
    """
    quantized, name = tensors["absmax"], names["absmax"]
    if quantized.dtype != torch.uint8 or quantized.numel() != num_blocks:
        raise CheckpointError(
            name,
            f"holds {quantized.numel()} {quantized.dtype}, must be {num_blocks} torch.uint8 "
            "with double quantization",
            _MEND,
        )
    assert state.nested_blocksize is not None
    assert state.nested_offset is not None
    num_nested = -(-num_blocks // state.nested_blocksize)
    nested_scales = _numbers(names["nested_absmax"], tensors["nested_absmax"], num_nested)
    codebook = _numbers(names["nested_quant_map"], tensors["nested_quant_map"], _NESTED_CODES)
    scale_by_block = nested_scales.repeat_interleave(state.nested_blocksize)[:num_blocks]
    offset = torch.tensor(state.nested_offset, dtype=torch.float32, device=quantized.device)
    absmax = codebook[quantized.flatten().long()] * scale_by_block + offset
    if not absmax.isfinite().all():
        raise CheckpointError(name, "holds scales that are infinite", _MEND)
    return absmax


def _numbers(name: str, stored: torch.Tensor, count: int) -> torch.Tensor:
    """Flatten ``stored`` to ``[count]`` float32; raise CheckpointError unless all are finite."""
    if not stored.is_floating_point() or stored.itemsize < 2 or stored.numel() != count:
        raise CheckpointError(
            name, f"holds {stored.numel()} {stored.dtype}, must be {count} floats", _MEND
        )
    values = stored.flatten().float()
    is_wrong = ~values.isfinite()
    if is_wrong.any():
        index = int(is_wrong.nonzero()[0])
        raise CheckpointError(
            name,
            f"holds {int(is_wrong.sum())} numbers that are infinite or not a number, the first is "
            f"{float(values[index])} at {index}",
            _MEND,
        )
    return values
