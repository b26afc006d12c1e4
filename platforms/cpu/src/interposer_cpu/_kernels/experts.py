"""Fused MoE kernels of the compiled library, with weights packed in panels of sixteen outputs.

Dimensions: T tokens, K experts per token, E experts, H hidden size, I intermediate size, R rows and
C columns of scales.

An expert is packed as three weights: gate, up and down. The kernel computes gate and up block by
block side by side, so that the activation is applied while both results are in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from interposer import Request, Verdict
from interposer.errors import RequestError
from interposer_cpu import native
from interposer_cpu._kernels.fusion import fused
from interposer_cpu._kernels.interface import TYPES
from interposer_cpu._kernels.packing import (
    PLAIN_FORMATS,
    Description,
    PackedFormat,
    describe_weight,
)
from interposer_ops.devices import host_memory

EXPERT_ACTIVATIONS = {"silu": 0, "gelu": 1, "swiglu_oai": 2}
"""Activations of fused experts, as in the library."""

_INT32 = torch.int32

# Bytes of the header that precedes the packed experts.
_HEADER = 64
# Inputs that every packed format stores as one unit; a unit cannot have two scales.
_WORD = 8


@fused("fused_experts")
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
    """Compute the op ``fused_experts``; ``gate_up`` holds all packed weights and biases."""
    return _run_experts(x, gate_up, weights, expert_ids, activation)


@fused("fused_experts")
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
    """Compute the op ``fused_experts_w4a16``; ``gate_up`` holds all packed constants."""
    return _run_experts(x, gate_up, weights, expert_ids, activation)


@fused("fused_experts")
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
    """Compute the op ``fused_experts_mxfp4``; ``gate_up`` holds all packed constants."""
    return _run_experts(x, gate_up, weights, expert_ids, activation)


@fused("fused_experts")
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
    """Compute the op ``fused_experts_fp8``; ``gate_up`` holds all packed constants."""
    return _run_experts(x, gate_up, weights, expert_ids, activation)


def pack_fused_experts(
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
) -> dict[str, Any]:
    """Pack weights and biases of ``fused_experts`` into one tensor, ``gate_up``."""
    form = PLAIN_FORMATS[gate_up.dtype]
    packed = _pack(
        _ExpertWeights(form, gate_up, bias=gate_up_bias), _ExpertWeights(form, down, bias=down_bias)
    )
    return {"gate_up": packed, "gate_up_bias": None, "down": None, "down_bias": None}


def unpack_fused_experts(
    gate_up: torch.Tensor,
    gate_up_bias: None,
    down: None,
    down_bias: None,
    into: Mapping[str, torch.Tensor],
) -> None:
    """Unpack the weights into dense tensors ``into["gate_up"]`` and ``into["down"]``."""
    first, second = into["gate_up"], into["down"]
    count, dtype = first.shape[0], first.dtype
    form, library = PLAIN_FORMATS[dtype], native.library()
    expert_bytes = (gate_up.numel() - _HEADER) // count
    for has_bias in (False, True):
        # The packed weight does not say whether it has biases; its size does.
        biases = (
            weight.new_zeros(weight.shape[:2]) if has_bias else None for weight in (first, second)
        )
        gate_up_weights, down_weights = (
            _ExpertWeights(form, weight, bias=bias)
            for weight, bias in zip((first, second), biases, strict=True)
        )
        parts = (gate_up_weights.half(True), gate_up_weights.half(False), down_weights)
        sizes = [library.packed_bytes(*part.describe(0)[0]) for part in parts]
        if sum(sizes) == expert_bytes:
            break
    inner = first.shape[1] // 2
    rows = torch.arange(max(inner, second.shape[1]))
    address = gate_up.data_ptr() + _HEADER
    for expert in range(count):
        targets = (first[expert, :inner], first[expert, inner:], second[expert])
        for target, size in zip(targets, sizes, strict=True):
            arguments = rows.data_ptr(), len(target), target.data_ptr(), TYPES[dtype]
            library.rows(address, *arguments)
            address += size


def pack_fused_experts_w4a16(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, Any]:
    """Pack weights, scales and biases of ``fused_experts_w4a16`` into one tensor, ``gate_up``."""
    packed = _pack(
        _ExpertWeights(PackedFormat.INT4, gate_up, gate_up_scale),
        _ExpertWeights(PackedFormat.INT4, down, down_scale),
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
    """Pack weights, scales and biases of ``fused_experts_mxfp4`` into one tensor, ``gate_up``."""
    packed = _pack(
        _ExpertWeights(PackedFormat.E2M1, gate_up, gate_up_scale, gate_up_bias),
        _ExpertWeights(PackedFormat.E2M1, down, down_scale, down_bias),
    )
    names = ("gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias")
    return {"gate_up": packed, **dict.fromkeys(names)}


def pack_fused_experts_fp8(
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> dict[str, Any]:
    """Pack weights, scales and biases of ``fused_experts_fp8`` into one tensor, ``gate_up``.

    The library decodes e4m3 only. Weights in e5m2 are packed as bfloat16, which represents every
    e5m2 number. Weights whose scale blocks are no multiple of 8 inputs are multiplied by the scales
    and packed as float32.
    """
    packed = _pack(_float_weights(gate_up, gate_up_scale), _float_weights(down, down_scale))
    return {"gate_up": packed, "gate_up_scale": None, "down": None, "down_scale": None}


def judge_groups(request: Request) -> Verdict:
    """Accept group sizes that are multiples of 8 inputs, or one group per projection."""
    group_size = int(request.dims["group_size"])
    sizes = {int(request.dims["hidden_size"]), int(request.dims["intermediate_size"])}
    if group_size % _WORD and sizes != {group_size}:
        return Verdict.refuse(f"takes groups of multiples of {_WORD} inputs, got {group_size}")
    return native.judge(request)


def routed_rows(
    x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``x``, weights and int32 expert ids with contiguous rows."""
    if x.stride(1) != 1:
        x = x.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    if expert_ids.dtype is not _INT32 or expert_ids.stride(1) != 1:
        expert_ids = expert_ids.to(_INT32).contiguous()
    return x, weights, expert_ids


def _run_experts(
    x: torch.Tensor,
    packed: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    number = EXPERT_ACTIVATIONS.get(activation)
    if number is None:
        choices = "'silu', 'gelu' or 'swiglu_oai'"
        raise RequestError(f"No activation {activation!r} of experts; try {choices}")
    x, weights, expert_ids = routed_rows(x, weights, expert_ids)
    dtype = x.dtype
    count, width = x.shape
    out = torch.empty(count, width, dtype=dtype)
    # A traced graph has no addresses: it calls an op that takes tensors.
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
class _ExpertWeights:
    """Unpacked weights, scales and biases of one projection of all experts.

    Attributes:
        form: packed format.
        weight: ``[E, outputs, inputs]``, or two 4-bit inputs per byte.
        scales: ``[E, R, C]``, each for a block of ``outputs / R`` by ``inputs / C`` weights.
        bias: ``[E, outputs]``.
        is_scaled: packing multiplies the weights by the scales.
    """

    form: PackedFormat
    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    is_scaled: bool = False

    def half(self, first: bool) -> _ExpertWeights:
        """Return the first or second half of all outputs: gate or up of a gate_up projection."""

        def half_outputs(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.chunk(2, 1)[0 if first else 1]

        scales = self.scales
        if scales is not None:
            # A block of scaled rows can span both halves.
            scales = half_outputs(_scales_by_output(scales, self.weight.shape[1]))
        bias = None if self.bias is None else half_outputs(self.bias)
        return replace(self, weight=half_outputs(self.weight), scales=scales, bias=bias)

    def describe(self, expert: int) -> tuple[Description, list[torch.Tensor]]:
        """Describe one expert's weight to the library; see ``describe_weight``."""
        weight, scales, bias = self.weight[expert], None, None
        outputs, columns = weight.shape
        if self.scales is not None:
            scales = _scales_by_output(self.scales[expert : expert + 1], outputs)[0]
        # Conversion happens for one expert at a time, so that no wide copy of all experts exists.
        if self.is_scaled and scales is not None:
            weight = weight.float() * scales.repeat_interleave(columns // scales.shape[1], 1)
            scales = None
        elif self.form == PackedFormat.BFLOAT16:
            weight = weight.to(torch.bfloat16)
        if self.bias is not None:
            bias = self.bias[expert]
        return describe_weight(self.form, weight, scales, bias=bias)


def _scales_by_output(scales: torch.Tensor, outputs: int) -> torch.Tensor:
    """Repeat scales ``[E, R, C]`` to ``[E, outputs, C]``; a view if R is 1 or ``outputs``."""
    rows = scales.shape[1]
    if rows == outputs:
        return scales
    if rows == 1:
        return scales.expand(-1, outputs, -1)
    return scales.repeat_interleave(outputs // rows, 1)


def _float_weights(weight: torch.Tensor, scales: torch.Tensor) -> _ExpertWeights:
    columns = scales.shape[2]
    if columns > 1 and weight.shape[2] // columns % _WORD:
        return _ExpertWeights(PackedFormat.FLOAT32, weight, scales, is_scaled=True)
    return _ExpertWeights(
        PackedFormat.E4M3 if weight.dtype == torch.float8_e4m3fn else PackedFormat.BFLOAT16,
        weight,
        scales,
    )


def _pack(gate_up: _ExpertWeights, down: _ExpertWeights) -> torch.Tensor:
    """Pack all experts of a projection into one uint8 tensor, one expert at a time."""
    library = native.library()
    parts = (gate_up.half(True), gate_up.half(False), down)
    count = down.weight.shape[0]
    sizes = [library.packed_bytes(*part.describe(0)[0]) for part in parts]
    packed = host_memory.empty([_HEADER + count * sum(sizes)], torch.uint8, lasting=True)
    library.begin_mixture(count, sum(sizes), packed.data_ptr())
    address = packed.data_ptr() + _HEADER
    for expert in range(count):
        for part, size in zip(parts, sizes, strict=True):
            description, _tensors = part.describe(expert)
            library.pack(*description, address)
            address += size
    return packed
