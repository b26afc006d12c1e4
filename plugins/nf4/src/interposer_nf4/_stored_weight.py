"""The tensors of one layer of the checkpoint, read and checked.

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
    """Return the names of the tensors below the layer's, by what they are."""
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
    """A weight of four bits, with the scales in float32.

    Attributes:
        codes: ``[O, I / 2]`` uint8, the first of two inputs in the high nibble.
        absmax: ``[B]`` float32, one for each block of ``blocksize`` weights in the order of rows;
            the last block may be shorter.
        codebook: ``[16]`` float32.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    codebook: torch.Tensor
    blocksize: int

    @property
    def inputs_per_scale(self) -> int:
        """Return how many inputs of a row lie in one block wherever the row begins."""
        return gcd(2 * self.codes.shape[1], self.blocksize)

    def scales(self, inputs_per_scale: int) -> torch.Tensor:
        """Return ``[O, I / G]``: what blocks say about every G inputs, G dividing both."""
        repeated = self.absmax.repeat_interleave(self.blocksize // inputs_per_scale)
        outputs, inputs = self.codes.shape[0], 2 * self.codes.shape[1]
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
        """Return the weight that ``tensors`` hold.

        Args:
            kind: what the config says of the layer.
            shape: outputs and inputs.
            tensors: by what they are, as ``names_of`` lists them.
            names: the checkpoint's own, likewise.
        Raises: CheckpointError: tensors contradict each other, the config or the format.
        """
        state = QuantState.read(names["state"], tensors["state"])
        facts = {
            "quant_type": (state.quant_type, kind.quant_type),
            "shape": (state.shape, shape),
            "double quantization": (state.nested, kind.double),
        }
        for fact, (found, expected) in facts.items():
            if found != expected:
                raise CheckpointError(
                    names["state"],
                    f"states {fact} {found}, the config asks for {expected}",
                    "copy config and weights again, from one place",
                )
        outputs, inputs = shape
        packed = tensors["weight"]
        if packed.nbytes != outputs * inputs // 2:
            raise CheckpointError(
                names["weight"],
                f"has {packed.nbytes} bytes, {outputs * inputs // 2} hold the codes of {outputs} "
                f"outputs and {inputs} inputs",
                _MEND,
            )
        num_blocks = -(-outputs * inputs // state.blocksize)
        if state.nested:
            absmax = _dequantized(state, num_blocks, tensors, names)
        else:
            absmax = _numbers(names["absmax"], tensors["absmax"], num_blocks)
            if (absmax < 0).any():
                place = int((absmax < 0).nonzero()[0])
                raise CheckpointError(
                    names["absmax"],
                    f"holds the scale {float(absmax[place])} for block {place}, must not be "
                    "negative",
                    _MEND,
                )
        codebook = _numbers(names["quant_map"], tensors["quant_map"], _CODES)
        largest = absmax.abs().amax() * codebook.abs().amax()
        if not largest.isfinite():
            raise CheckpointError(
                names["absmax"], "holds scales with which weights are infinite", _MEND
            )
        codes = packed.contiguous().flatten().view(torch.uint8).view(outputs, inputs // 2)
        return cls(codes, absmax, codebook, state.blocksize)


def _dequantized(
    state: QuantState,
    num_blocks: int,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
) -> torch.Tensor:
    """Return the scales ``[B]`` float32: nested_quant_map[absmax] * nested_absmax + offset.

    Product and sum are rounded apart, as bitsandbytes does.
    """
    codes, name = tensors["absmax"], names["absmax"]
    if codes.dtype != torch.uint8 or codes.numel() != num_blocks:
        raise CheckpointError(
            name,
            f"holds {codes.numel()} {codes.dtype}, must be {num_blocks} torch.uint8 with double "
            "quantization",
            _MEND,
        )
    assert state.nested_blocksize is not None
    assert state.nested_offset is not None
    num_outer = -(-num_blocks // state.nested_blocksize)
    outer = _numbers(names["nested_absmax"], tensors["nested_absmax"], num_outer)
    codebook = _numbers(names["nested_quant_map"], tensors["nested_quant_map"], _NESTED_CODES)
    spread = outer.repeat_interleave(state.nested_blocksize)[:num_blocks]
    offset = torch.tensor(state.nested_offset, dtype=torch.float32, device=codes.device)
    absmax = codebook[codes.flatten().long()] * spread + offset
    if not absmax.isfinite().all():
        raise CheckpointError(name, "holds scales that are infinite", _MEND)
    return absmax


def _numbers(name: str, stored: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``stored`` as ``[count]`` float32; raise CheckpointError unless all are finite."""
    if not stored.is_floating_point() or stored.itemsize < 2 or stored.numel() != count:
        raise CheckpointError(
            name, f"holds {stored.numel()} {stored.dtype}, must be {count} floats", _MEND
        )
    numbers = stored.flatten().float()
    wrong = ~numbers.isfinite()
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise CheckpointError(
            name,
            f"holds {int(wrong.sum())} numbers that are infinite or not a number, the first is "
            f"{float(numbers[place])} at {place}",
            _MEND,
        )
    return numbers
