"""Experts of MoE layers. T tokens, H hidden size, E experts, I intermediate size, K chosen experts.

Each expert is a gated MLP. The first half of the first projection's outputs are gates, the second
half the up projection. The expert id -1 means an expert on another rank: the slot contributes
nothing, and its routing weight is not read.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Tolerance
from interposer.errors import RequestError
from interposer_ops._declare import DEQUANTIZES, standard_op
from interposer_ops.quantizers._small_floats import decode_e2m1, decode_e8m0, unpack_nibbles

_op = partial(
    standard_op,
    cases="interposer_ops.experts._experts_cases",
    tolerance=Tolerance(roundings=2),
    batched=("x", "weights", "expert_ids"),
)
_dequantizing = partial(_op, emulation=DEQUANTIZES)

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Factor of the gate inside the sigmoid of ``swiglu_oai``, and clamp of gate and up."""


@_op("fused_experts", constants=("gate_up", "gate_up_bias", "down", "down_bias"))
def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    """Send each token through its experts, and sum the weighted results.

    [g, u] = gate_up[e] x + gate_up_bias[e]; h = act(g, u)
    y = sum_k weights[k] * (down[e_k] h_k + down_bias[e_k])

    Matmuls, biases, activation and the weighted sum are computed in float32 or wider. Only h, the
    input of the second projection, and y are rounded to the dtype of ``x``.

    - ``"silu"``: g sigmoid(g) u
    - ``"gelu"``: g Phi(g) u, with the error function
    - ``"swiglu_oai"``: g sigmoid(1.702 g) (u + 1) with g at most 7 and u from -7 to 7

    Args:
        x: ``[T, H]``, any float dtype; rows may be strided.
        gate_up: ``[E, 2 I, H]``, dtype of ``x``.
        gate_up_bias: ``[E, 2 I]``, dtype of ``x``.
        down: ``[E, H, I]``, dtype of ``x``.
        down_bias: ``[E, H]``, dtype of ``x``.
        weights: ``[T, K]`` float32.
        expert_ids: ``[T, K]`` int32 or int64, from -1 to E - 1.
        activation: one of the three names.
    Returns: ``[T, H]``, dtype of ``x``.
    Dims: hidden_size, intermediate_size, num_experts, top_k, activation, biased.
    Raises: RequestError: ``activation`` is none of the three.
    Source: arXiv:2401.04088 (silu); arXiv:2508.10925 and its modeling code (swiglu_oai).
    """
    ids = expert_ids.clamp(min=0)
    wide = torch.promote_types(x.dtype, torch.float32)
    first = gate_up[ids].to(wide), _biases(gate_up_bias, ids)
    second = down[ids].to(wide), _biases(down_bias, ids)
    return _weighted_experts(x, *first, *second, weights, expert_ids, activation)


@_dequantizing("fused_experts_fp8", constants=("gate_up", "gate_up_scale", "down", "down_scale"))
def fused_experts_fp8(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    """Send each token through experts whose weights are 8-bit floats with scales.

    ``fused_experts`` with weights times scales, which are not rounded; activations are not
    quantized. Scales divide a matrix into equal parts: one scale per matrix, per output channel, or
    per block.

    Args:
        gate_up: ``[E, 2 I, H]``, an 8-bit float dtype.
        gate_up_scale: ``[E, R, C]`` float32, R a divisor of 2 I and C of H.
        down: ``[E, H, I]``, an 8-bit float dtype.
        down_scale: ``[E, R, C]`` float32, R a divisor of H and C of I.
        x, weights, expert_ids, activation: as in ``fused_experts``.
    Returns: ``[T, H]``, dtype of ``x``.
    Dims: hidden_size, intermediate_size, num_experts, top_k, activation, weight_dtype, granularity
    ("tensor", "channel" or "block"); block_rows and block_columns of ``gate_up`` for block scales.
    Raises: RequestError: ``activation`` is none of the three.
    """
    ids = expert_ids.clamp(min=0)
    wide = torch.promote_types(x.dtype, torch.float32)
    first = _scaled(gate_up[ids].to(wide), gate_up_scale[ids])
    second = _scaled(down[ids].to(wide), down_scale[ids])
    return _weighted_experts(x, first, None, second, None, weights, expert_ids, activation)


@_dequantizing("fused_experts_w4a16", constants=("gate_up", "gate_up_scale", "down", "down_scale"))
def fused_experts_w4a16(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    """Send each token through experts whose weights are 4-bit integers with one scale per group.

    ``fused_experts`` with w = (q - 8) * scale, which is not rounded. A byte holds two q of one
    output channel, each from 0 to 15, the first one in the low half.

    Args:
        gate_up: ``[E, 2 I, H / 2]`` uint8.
        gate_up_scale: ``[E, 2 I, H / group]``, dtype of ``x``.
        down: ``[E, H, I / 2]`` uint8.
        down_scale: ``[E, H, I / group]``, dtype of ``x``.
        x, weights, expert_ids, activation: as in ``fused_experts``.
    Returns: ``[T, H]``, dtype of ``x``.
    Dims: hidden_size, intermediate_size, num_experts, top_k, activation, group_size.
    Raises: RequestError: ``activation`` is none of the three.
    """
    ids = expert_ids.clamp(min=0)
    wide = torch.promote_types(x.dtype, torch.float32)
    first = _scaled(_unpacked(gate_up[ids], wide), gate_up_scale[ids])
    second = _scaled(_unpacked(down[ids], wide), down_scale[ids])
    return _weighted_experts(x, first, None, second, None, weights, expert_ids, activation)


@_dequantizing(
    "fused_experts_mxfp4",
    constants=("gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias"),
)
def fused_experts_mxfp4(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    """Send each token through experts whose weights are MXFP4.

    ``fused_experts`` with w = e2m1(q) * 2^(scale - 127), which is not rounded; activations are not
    quantized. One scale covers 32 inputs of one output channel; a scale of 255 makes the weights
    NaN. A byte holds two q of one output channel, the first one in the low half.

    Args:
        x: ``[T, H]``, any float dtype; rows may be strided; H a multiple of 32.
        gate_up: ``[E, 2 I, H / 2]`` uint8; I a multiple of 32.
        gate_up_scale: ``[E, 2 I, H / 32]`` uint8.
        down: ``[E, H, I / 2]`` uint8.
        down_scale: ``[E, H, I / 32]`` uint8.
        gate_up_bias, down_bias, weights, expert_ids, activation: as in ``fused_experts``.
    Returns: ``[T, H]``, dtype of ``x``.
    Dims: hidden_size, intermediate_size, num_experts, top_k, activation, biased.
    Raises: RequestError: ``activation`` is none of the three.
    Source: OCP Microscaling Formats (MX) Specification v1.0; arXiv:2508.10925.
    """
    ids = expert_ids.clamp(min=0)
    wide = torch.promote_types(x.dtype, torch.float32)
    first = _microscaled(gate_up[ids], gate_up_scale[ids], wide), _biases(gate_up_bias, ids)
    second = _microscaled(down[ids], down_scale[ids], wide), _biases(down_bias, ids)
    return _weighted_experts(x, *first, *second, weights, expert_ids, activation)


def _weighted_experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
) -> Tensor:
    """Compute ``fused_experts`` from weights gathered per slot, ``[T, K, ...]``."""
    # Each slot has matrices of its own here: simple, but T K copies. Kernels group by expert.
    projected = (gate_up @ x.to(gate_up.dtype)[:, None, :, None]).squeeze(-1)
    if gate_up_bias is not None:
        projected = projected + gate_up_bias
    hidden = activated(projected, activation).to(x.dtype)
    results = (down @ hidden.to(down.dtype)[..., None]).squeeze(-1)
    if down_bias is not None:
        results = results + down_bias
    is_local = expert_ids >= 0
    factors = torch.where(is_local, weights.to(results.dtype), 0)[..., None]
    # A factor of zero alone is not enough: skipped slots were computed with expert 0, whose result
    # may be infinite.
    return torch.where(is_local[..., None], results * factors, 0).sum(1).to(x.dtype)


def _biases(bias: Tensor | None, ids: Tensor) -> Tensor | None:
    return None if bias is None else bias[ids]


def activated(projected: Tensor, activation: str) -> Tensor:
    """Apply the gated activation of ``fused_experts`` to ``[..., 2 I]``, gates first.

    Raises: RequestError: ``activation`` is none of the three.
    """
    gate, up = projected.chunk(2, -1)
    match activation:
        case "silu":
            return functional.silu(gate) * up
        case "gelu":
            return functional.gelu(gate) * up
        case "swiglu_oai":
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * (SWIGLU_ALPHA * gate).sigmoid() * (up + 1)
    alternatives = "'silu', 'gelu' or 'swiglu_oai'"
    raise RequestError(f"No activation {activation!r} of experts; try {alternatives}")


def _scaled(matrices: Tensor, scales: Tensor) -> Tensor:
    """Multiply matrices ``[T, K, M, N]`` by block scales ``[T, K, R, C]``."""
    rows, columns = scales.shape[-2:]
    blocks = matrices.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
    result: Tensor = (blocks * scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return result


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack 4-bit integers, two per byte with the low nibble first, minus 8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(dtype) - 8


def _microscaled(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode packed e2m1 values, and multiply each block of 32 by its power of two."""
    quantized = decode_e2m1(unpack_nibbles(packed), dtype)
    return _scaled(quantized, decode_e8m0(scales, dtype))
