"""Mixtures of experts whose weights are packed for vectors of sixteen outputs.

Dimensions: T tokens, K chosen experts, E experts, H hidden size, I intermediate size, R rows and
C columns of scales.

An expert is packed as three weights, gates, what they act on, and the second projection, so that
the first two can be multiplied block by block beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from interposer import Request, Verdict
from interposer.errors import RequestError
from interposer_cpu import native
from interposer_cpu._kernels.interface import TYPES
from interposer_cpu._kernels.packing import PLAIN_FORMATS, Description, PackedFormat, described
from interposer_ops.devices import host_memory

_ACTIVATIONS = {"silu": 0, "gelu": 1, "swiglu_oai": 2}
_INT32 = torch.int32

# What a mixture begins with, in bytes.
_HEADER = 64
# A scale that inputs share belongs to whole words of all formats.
_WORD = 8


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: None,
    down: None,
    down_bias: None,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return the op ``fused_experts`` for a ``gate_up`` that holds all constants."""
    return _mixture(x, gate_up, weights, expert_ids, activation)


def fused_experts_w4a16(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: None,
    down: None,
    down_scale: None,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return the op ``fused_experts_w4a16`` for a ``gate_up`` that holds all constants."""
    return _mixture(x, gate_up, weights, expert_ids, activation)


def fused_experts_mxfp4(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: None,
    gate_up_bias: None,
    down: None,
    down_scale: None,
    down_bias: None,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return the op ``fused_experts_mxfp4`` for a ``gate_up`` that holds all constants."""
    return _mixture(x, gate_up, weights, expert_ids, activation)


def fused_experts_fp8(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: None,
    down: None,
    down_scale: None,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return the op ``fused_experts_fp8`` for a ``gate_up`` that holds all constants."""
    return _mixture(x, gate_up, weights, expert_ids, activation)


def pack_fused_experts(
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the constants of ``fused_experts``, all in the packed ``gate_up``."""
    form = PLAIN_FORMATS[gate_up.dtype]
    packed = _pack(
        _Matrices(form, gate_up, bias=gate_up_bias), _Matrices(form, down, bias=down_bias)
    )
    return {"gate_up": packed, "gate_up_bias": None, "down": None, "down_bias": None}


def unpack_fused_experts(
    gate_up: torch.Tensor,
    gate_up_bias: None,
    down: None,
    down_bias: None,
    into: Mapping[str, torch.Tensor],
) -> None:
    """Fill ``gate_up`` and ``down`` of ``into``, dense and both of them, from the packed memory."""
    first, second = into["gate_up"], into["down"]
    count, dtype = first.shape[0], first.dtype
    form, library = PLAIN_FORMATS[dtype], native.library()
    share = (gate_up.numel() - _HEADER) // count
    for biased in (False, True):
        # Only where there are biases is there room for them.
        offsets = (each.new_zeros(each.shape[:2]) if biased else None for each in (first, second))
        wide, narrow = (
            _Matrices(form, each, bias=bias)
            for each, bias in zip((first, second), offsets, strict=True)
        )
        parts = (wide.half(True), wide.half(False), narrow)
        sizes = [library.packed_bytes(*part.described(0)[0]) for part in parts]
        if sum(sizes) == share:
            break
    inner = first.shape[1] // 2
    rows = torch.arange(max(inner, second.shape[1]))
    address = gate_up.data_ptr() + _HEADER
    for expert in range(count):
        filled = (first[expert, :inner], first[expert, inner:], second[expert])
        for part, size in zip(filled, sizes, strict=True):
            words = rows.data_ptr(), len(part), part.data_ptr(), TYPES[dtype]
            library.rows(address, *words)
            address += size


def pack_fused_experts_w4a16(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, Any]:
    """Return the constants of ``fused_experts_w4a16``, all in the packed ``gate_up``."""
    packed = _pack(
        _Matrices(PackedFormat.INT4, gate_up, gate_up_scale),
        _Matrices(PackedFormat.INT4, down, down_scale),
    )
    return {"gate_up": packed, "gate_up_scale": None, "down": None, "down_scale": None}


def pack_fused_experts_mxfp4(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the constants of ``fused_experts_mxfp4``, all in the packed ``gate_up``."""
    packed = _pack(
        _Matrices(PackedFormat.E2M1, gate_up, gate_up_scale, gate_up_bias),
        _Matrices(PackedFormat.E2M1, down, down_scale, down_bias),
    )
    names = ("gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias")
    return {"gate_up": packed, **dict.fromkeys(names)}


def pack_fused_experts_fp8(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, Any]:
    """Return the constants of ``fused_experts_fp8``, all in the packed ``gate_up``.

    The library decodes e4m3. Weights of e5m2 are held as bfloat16, which has every number of
    theirs, and those with scales of blocks that cut words are held as float32, with their scales.
    """
    packed = _pack(_of_floats(gate_up, gate_up_scale), _of_floats(down, down_scale))
    return {"gate_up": packed, "gate_up_scale": None, "down": None, "down_scale": None}


def judge_groups(request: Request) -> Verdict:
    """Accept groups of whole words of eight codes, or one for all inputs of both projections."""
    group_size = int(request.dims["group_size"])
    sizes = {int(request.dims["hidden_size"]), int(request.dims["intermediate_size"])}
    if group_size % _WORD and sizes != {group_size}:
        return Verdict.refuse(f"takes groups of multiples of {_WORD} inputs, got {group_size}")
    return native.judge(request)


def routed_rows(
    x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``x`` ``[T, H]``, weights and ids ``[T, K]`` with rows without gaps, int32 ids."""
    if x.stride(1) != 1:
        x = x.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    if expert_ids.dtype is not _INT32 or expert_ids.stride(1) != 1:
        expert_ids = expert_ids.to(_INT32).contiguous()
    return x, weights, expert_ids


def _mixture(
    x: torch.Tensor,
    packed: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    number = _ACTIVATIONS.get(activation)
    if number is None:
        known = "'silu', 'gelu' or 'swiglu_oai'"
        raise RequestError(f"No activation {activation!r} of experts; try {known}")
    x, weights, expert_ids = routed_rows(x, weights, expert_ids)
    dtype = x.dtype
    count, width = x.shape
    out = torch.empty(count, width, dtype=dtype)
    if torch.compiler.is_compiling():
        torch.ops.interposer_cpu.experts_out(out, x, packed, weights, expert_ids, number)
        return out
    native.library().experts(
        packed.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        weights.data_ptr(),
        expert_ids.data_ptr(),
        TYPES[dtype],
        number,
        count,
        expert_ids.shape[1],
        x.stride(0),
        weights.stride(0),
        expert_ids.stride(0),
    )
    return out


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Matrices of all experts, and what belongs to them.

    Attributes:
        form: that they are packed in.
        weight: ``[E, outputs, inputs]``, or two inputs in a byte.
        scales: ``[E, R, C]``, each for an equal share of a matrix.
        bias: ``[E, outputs]``.
        is_scaled: scales become part of the weights.
    """

    form: PackedFormat
    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    is_scaled: bool = False

    def half(self, first: bool) -> _Matrices:
        """Return the first or the second half of all outputs."""

        def halved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(2, 1)[0 if first else 1]

        scales = self.scales
        if scales is not None:
            # A share of rows may lie in both halves.
            scales = halved(_by_output(scales, self.weight.shape[1]))
        bias = None if self.bias is None else halved(self.bias)
        return replace(self, weight=halved(self.weight), scales=scales, bias=bias)

    def described(self, expert: int) -> tuple[Description, list[torch.Tensor]]:
        """Return the description of one expert, and the tensors whose addresses are in it."""
        weight, scales, bias = self.weight[expert], None, None
        outputs, columns = weight.shape
        if self.scales is not None:
            scales = _by_output(self.scales[expert : expert + 1], outputs)[0]
        if self.is_scaled and scales is not None:
            weight = weight.float() * scales.repeat_interleave(columns // scales.shape[1], 1)
            scales = None
        elif self.form == PackedFormat.BFLOAT16:
            weight = weight.to(torch.bfloat16)
        if self.bias is not None:
            bias = self.bias[expert]
        return described(self.form, weight, scales, bias=bias)


def _by_output(scales: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return ``[E, R, C]`` as ``[E, outputs, C]``; a view where nothing is repeated."""
    rows = scales.shape[1]
    if rows == outputs:
        return scales
    if rows == 1:
        return scales.expand(-1, outputs, -1)
    return scales.repeat_interleave(outputs // rows, 1)


def _of_floats(weight: torch.Tensor, scales: torch.Tensor) -> _Matrices:
    columns = scales.shape[2]
    if columns > 1 and weight.shape[2] // columns % _WORD:
        return _Matrices(PackedFormat.FLOAT32, weight, scales, is_scaled=True)
    return _Matrices(
        PackedFormat.E4M3 if weight.dtype == torch.float8_e4m3fn else PackedFormat.BFLOAT16,
        weight,
        scales,
    )


def _pack(gate_up: _Matrices, down: _Matrices) -> torch.Tensor:
    """Return all experts in one memory, uint8; besides it, one of them is copied at a time."""
    library = native.library()
    parts = (gate_up.half(True), gate_up.half(False), down)
    count = down.weight.shape[0]
    sizes = [library.packed_bytes(*part.described(0)[0]) for part in parts]
    packed = host_memory.empty([_HEADER + count * sum(sizes)], torch.uint8, lasting=True)
    library.begin_mixture(count, sum(sizes), packed.data_ptr())
    address = packed.data_ptr() + _HEADER
    for expert in range(count):
        for part, size in zip(parts, sizes, strict=True):
            description, _held = part.described(expert)
            library.pack(*description, address)
            address += size
    return packed
