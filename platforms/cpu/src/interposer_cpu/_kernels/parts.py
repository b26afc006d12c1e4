"""What layers must hold for the compiled library to compute them together."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as every_module

from interposer_cpu._kernels import activations as native_activations
from interposer_cpu._kernels import heads as native_heads
from interposer_cpu._kernels import linear as native_linear
from interposer_cpu._kernels import norms as native_norms
from interposer_cpu._kernels import quantizers as native_quantizers
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.quantized_linear import CodedProduct, StaticProduct
from interposer_ops.quantizers import MX_BLOCK_SIZE

# Kernels that multiply floats by a weight that holds everything else.
_PRODUCTS = frozenset(
    {
        native_linear.linear,
        native_linear.mxfp4_linear,
        native_linear.w4a16_linear,
        native_linear.w8a16_linear,
    }
)
Words = tuple[int, int, int, int]
Coding = Callable[..., Words | None]
"""Of the options of a quantizer, the words of its coding, None where the library has none."""
Quantizers = Mapping[object, tuple[frozenset[object], Coding]]


def _int8_coding(zero_point: None = None) -> Words:
    return native_quantizers.CODES[torch.int8], 0, 0, 0


def _fp8_coding(dtype: torch.dtype, scale_limit: float | None = None) -> Words | None:
    if dtype not in native_quantizers.CODES:
        return None
    (bits,) = _INT64.unpack(_FLOAT64.pack(scale_limit or 0.0))
    return native_quantizers.CODES[dtype], bits, 0, 0


def _block_coding(size: int, dtype: torch.dtype, powers: bool) -> Words | None:
    if dtype not in native_quantizers.CODES:
        return None
    return native_quantizers.CODES[dtype], 0, size, int(powers)


def _shared_exponents_coding() -> Words:
    code, size = native_quantizers.CODES[torch.float8_e4m3fn], MX_BLOCK_SIZE
    return code, 0, size, native_quantizers.SHARED_EXPONENTS


# Kernels that multiply codes, by the quantizers that make these.
_OF_INT8: frozenset[object] = frozenset({native_linear.int8_linear, native_linear.w4a8_linear})
_OF_FP8: frozenset[object] = frozenset({native_linear.fp8_linear})
_OF_BLOCKS: frozenset[object] = frozenset({native_linear.fp8_block_linear})
_OF_MICROSCALED: frozenset[object] = frozenset({native_linear.mxfp8_linear})
_BY_TOKEN: Quantizers = {
    native_quantizers.quantize_int8_per_token: (_OF_INT8, _int8_coding),
    native_quantizers.quantize_fp8_per_token: (_OF_FP8, _fp8_coding),
    native_quantizers.quantize_fp8_blocks: (_OF_BLOCKS | _OF_MICROSCALED, _block_coding),
    native_quantizers.quantize_mxfp8: (_OF_MICROSCALED, _shared_exponents_coding),
}
_BY_SCALE: Quantizers = {
    native_quantizers.quantize_int8_static: (_OF_INT8, _int8_coding),
    native_quantizers.quantize_fp8_static: (_OF_FP8, _fp8_coding),
}
_FLOAT64, _INT64 = struct.Struct("=d"), struct.Struct("=q")
_GELU = {"none": 1, "tanh": 2}


class Watch:
    """Whether somebody wants to know when one of some modules is called.

    Attributes:
        hooks: those of the modules and of all there are; none is true where nobody does. In an
            object, as whoever copies containers of a layer would keep hooks of before.
    """

    __slots__ = ("hooks", "modules")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)
        own = (h for m in self.modules for h in (m._forward_hooks, m._forward_pre_hooks))
        self.hooks: tuple[Any, ...] = (
            every_module._global_forward_hooks,
            every_module._global_forward_pre_hooks,
            *own,
        )

    def __reduce__(self) -> tuple[type[Watch], tuple[tuple[nn.Module, ...]]]:
        """Let a copy look at the copies of the modules, and at what is common to all."""
        return Watch, (self.modules,)


class Form(NamedTuple):
    """What the library makes of rows before it multiplies them.

    Attributes:
        words: of an interposer_coding: type of the codes, bits of the largest scale as a float64,
            inputs that share a scale, whether scales are powers of two.
        is_static: the last operand is one scale for all rows.
    """

    words: Words
    is_static: bool


FLOATS = Form((-1, 0, 0, 0), False)
"""Of products of rows as they are."""


def form_of(kernel: Callable[..., Any] | None) -> Form | None:
    """Return what the library does with rows for one of its products, None for other kernels."""
    if type(kernel) is StaticProduct:
        return _form_of_codes(kernel, _BY_SCALE, True)
    if type(kernel) is CodedProduct:
        return _form_of_codes(kernel, _BY_TOKEN, False)
    return FLOATS if kernel in _PRODUCTS else None


def _form_of_codes(
    kernel: CodedProduct,
    quantizers: Quantizers,
    static: bool,
) -> Form | None:
    products, coding = quantizers.get(kernel.quantize, (frozenset(), _int8_coding))
    words = coding(*kernel.options) if kernel.product in products else None
    return None if words is None else Form(words, static)


def factor(form: Form, operands: tuple[Any, ...]) -> tuple[int, ...]:
    """Return what the library's calls take for a product with these operands."""
    scale = operands[-1].data_ptr() if form.is_static else 0
    return operands[0][0].data_ptr(), scale, *form.words


def activation_number(activation: GatedActivation) -> int | None:
    """Return the library's number of an activation that it computes, else None."""
    if type(activation) is not GatedActivation:
        return None
    if activation.activate is native_activations.silu_and_mul:
        return 0
    if activation.activate is native_activations.gelu_and_mul:
        return _GELU[activation.options[0]]
    return None


def turns(rotary: RotaryEmbedding) -> bool:
    """Say whether the rotation is the library's."""
    return type(rotary) is RotaryEmbedding and rotary.rotate is native_heads.rotary_embedding


def normalises(norm: RMSNorm | None) -> bool:
    """Say whether there is no norm, or the library's."""
    return norm is None or (type(norm) is RMSNorm and norm.norm is native_norms.rms_norm)


def adds(norm: RMSNorm) -> bool:
    """Say whether the norm is the library's, the one of a stream as well."""
    return normalises(norm) and norm.add_norm is native_norms.fused_add_rms_norm
