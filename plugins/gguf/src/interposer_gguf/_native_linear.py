"""CPU kernels in C++ for every block format, at the processor's highest instruction level.

Shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from interposer_gguf._block_formats import format_named
from interposer_gguf._kernels import matmul_by_rows
from interposer_gguf._native_library import Library, library

MOST_TOKENS = (1, 16, 32, 32)
"""The most tokens, by level, for which blocks are unpacked in registers. For more tokens, rows are
dequantized into a buffer that torch multiplies. By measurement, both are equally fast here."""

_TYPES = {torch.float32: 0, torch.bfloat16: 1}

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, str], torch.Tensor]


def gguf_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stored_as: str
) -> torch.Tensor:
    """Compute the op ``gguf_linear``, ``[..., O]``."""
    native = library()
    return _linear(native, native.level, x, weight, bias, stored_as)


def gguf_embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, stored_as: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute the op ``gguf_embedding``, ``[T, H]``."""
    rows = weight.index_select(0, token_ids)
    return dequantized(library().level, rows, stored_as).to(out_dtype)


def at_level(level: int) -> Linear:
    """Return the kernel for an instruction level, which may be lower than the processor's.

    Raises: ValueError: the processor lacks the level.
    """
    native = library()
    if not 0 <= level <= native.level:
        raise ValueError(f"level is {level}, must be from 0 to {native.level} on this processor")

    def linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stored_as: str
    ) -> torch.Tensor:
        return _linear(native, level, x, weight, bias, stored_as)

    return linear


def dequantized(level: int, rows: torch.Tensor, stored_as: str) -> torch.Tensor:
    """Dequantize rows ``[O, row]`` uint8 to float32 ``[O, I]``, at an instruction level.

    Args:
        rows: the bytes of each row must be contiguous.
    """
    native, layout = library(), format_named(stored_as)
    numbers = torch.empty(len(rows), layout.row_numbers(rows.shape[1]), dtype=torch.float32)
    native.dequantize(
        level,
        layout.number,
        rows.data_ptr(),
        rows.stride(0),
        *numbers.shape,
        numbers.data_ptr(),
        native.parallel,
        torch.get_num_threads(),
    )
    return numbers


def _linear(
    native: Library,
    level: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stored_as: str,
) -> torch.Tensor:
    out_features, in_features = len(weight), x.shape[-1]
    # Rows may be strided, but the bytes of a row must be contiguous.
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_tokens = x.numel() // in_features
    if num_tokens > MOST_TOKENS[level]:

        def rows(row_slice: slice) -> torch.Tensor:
            return dequantized(level, weight[row_slice], stored_as)

        return matmul_by_rows(x, out_features, rows, bias)
    inputs = x.reshape(num_tokens, in_features)
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    result = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype)
    if bias is not None:
        bias = bias.contiguous()
    failed = native.linear(
        level,
        format_named(stored_as).number,
        _TYPES[x.dtype],
        inputs.data_ptr(),
        inputs.stride(0),
        num_tokens,
        weight.data_ptr(),
        weight.stride(0),
        out_features,
        in_features,
        None if bias is None else bias.data_ptr(),
        result.data_ptr(),
        native.parallel,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for {num_tokens} rows of {in_features} inputs in float32")
    return result
