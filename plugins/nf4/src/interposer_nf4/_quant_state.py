"""The quantization state of a packed weight: JSON in a uint8 tensor, as bitsandbytes stores it."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from interposer.errors import CheckpointError
from interposer_nf4._codebooks import QuantType

_MAX_BYTES = 4096
# The largest block size of bitsandbytes.
_MAX_BLOCK = 4096
_MEND = "copy the checkpoint again, or quantize the model again"


def _block(size: int) -> int:
    if not 1 <= size <= _MAX_BLOCK or size & (size - 1):
        raise ValueError(f"must be a power of two up to {_MAX_BLOCK}")
    return size


def _positive(size: int) -> int:
    if size < 1:
        raise ValueError("must be positive")
    return size


BlockSize = Annotated[int, AfterValidator(_block)]
Size = Annotated[int, AfterValidator(_positive)]
Dtype = Literal["float32", "bfloat16", "float16"]


class QuantState(BaseModel):
    """Quantization state of a bitsandbytes weight, as stored in the checkpoint.

    Attributes:
        blocksize: number of weights that share a scale; a block may continue into the next row.
        dtype: of the weight before quantization.
        shape: outputs and inputs.
        nested_blocksize: number of scales that share a nested scale; None without double
            quantization, like ``nested_dtype`` and ``nested_offset``.
        nested_offset: added to each dequantized scale.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    quant_type: QuantType
    blocksize: BlockSize
    dtype: Dtype
    shape: tuple[Size, Size]
    nested_blocksize: BlockSize | None = None
    nested_dtype: Dtype | None = None
    nested_offset: FiniteFloat | None = None

    @model_validator(mode="after")
    def _coherent(self) -> QuantState:
        nested = (self.nested_blocksize, self.nested_dtype, self.nested_offset)
        if None in nested and any(fact is not None for fact in nested):
            raise ValueError("some of nested_blocksize, nested_dtype and nested_offset is missing")
        return self

    @property
    def nested(self) -> bool:
        """Return whether the scales are quantized too (double quantization)."""
        return self.nested_blocksize is not None

    @classmethod
    def read(cls, name: str, stored: torch.Tensor) -> QuantState:
        """Parse the state from the tensor ``name``.

        Args:
            stored: ``[N]`` uint8, a JSON object in UTF-8.
        Raises: CheckpointError: the tensor is not a valid quantization state.
        """
        if stored.dtype != torch.uint8 or stored.ndim != 1 or len(stored) > _MAX_BYTES:
            form = f"{stored.dtype} of shape {list(stored.shape)}"
            raise CheckpointError(name, f"is {form}, must be up to {_MAX_BYTES} uint8", _MEND)
        try:
            return cls.model_validate_json(bytes(stored.tolist()))
        except ValidationError as error:
            problems = "; ".join(map(_problem, error.errors(include_input=False)))
            raise CheckpointError(name, f"is no quantization state: {problems}", _MEND) from error

    def stored(self) -> torch.Tensor:
        """Return the state as a tensor ``[N]`` uint8."""
        text = self.model_dump_json(exclude_none=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _problem(error: object) -> str:
    assert isinstance(error, dict)
    field = ".".join(map(str, error["loc"]))
    text = error["msg"].removeprefix("Value error, ")
    return f"{field}: {text}" if field else str(text)
