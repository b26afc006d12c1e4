"""Kernels that compute something else. T tokens, H hidden size, D head size, G group."""

from __future__ import annotations

import torch
from tests.wrong_kernels.wrong import wrong
from torch.nn import functional

from interposer_ops.activations import gelu_and_mul, silu_and_mul
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_ops.rotary import rotary_embedding
from interposer_ops.sampling import apply_penalties, sample_tokens

Tensor = torch.Tensor


@wrong("rms_norm", "value", axis="shape")
def rms_norm_leaves_out_the_tail_of_a_row(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    whole = x.shape[-1] // 4 * 4
    y = x.clone()
    y[..., :whole] = rms_norm(x, weight, eps)[..., :whole]
    return y


@wrong("rms_norm", "value", axis="dtype")
def rms_norm_sums_in_the_storage_dtype(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    squares = x.square()
    total = torch.zeros_like(squares[..., :1])
    for column in range(x.shape[-1]):
        total = total + squares[..., column : column + 1]
    return x * torch.rsqrt(total / x.shape[-1] + eps) * weight


@wrong("rms_norm", "value")
def rms_norm_ignores_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, 0.0)


@wrong("rms_norm", "value", axis="scale")
def rms_norm_squares_in_the_storage_dtype(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = x.square().float().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean + eps) * weight).to(x.dtype)


@wrong("rms_norm", "value", axis="eps")
def rms_norm_has_an_eps_of_its_own(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, 1e-5)


@wrong("rms_norm", "value", axis="special")
def rms_norm_hides_nan(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.nan_to_num(0.0, torch.inf, -torch.inf), weight, eps)


@wrong("rms_norm", "value", axis="special")
def rms_norm_clamps_infinities(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    limit = torch.finfo(x.dtype).max
    return rms_norm(torch.where(x.isinf(), x.sign() * limit, x).double(), weight, eps).to(x.dtype)


@wrong("fused_add_rms_norm", "dtype", axis="stream", says="float32 expected")
def fused_add_rms_norm_narrows_the_stream(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    y, total = fused_add_rms_norm(x, residual, weight, eps)
    return y, total.to(x.dtype)


@wrong("fused_add_rms_norm", "value")
def fused_add_rms_norm_returns_the_old_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return fused_add_rms_norm(x, residual, weight, eps)[0], residual.clone()


@wrong("silu_and_mul", "value")
def silu_and_mul_gates_with_the_wrong_half(x: Tensor) -> Tensor:
    return silu_and_mul(torch.cat(x.chunk(2, -1)[::-1], -1))


@wrong("silu_and_mul", "value")
def silu_and_mul_multiplies_by_hand(x: Tensor) -> Tensor:
    """The exponential of a large negative number overflows, and inf / inf is no number."""
    gate, up = x.float().chunk(2, -1)
    grown = gate.exp()
    return (gate * grown / (1 + grown) * up).to(x.dtype)


@wrong("gelu_and_mul", "value")
def gelu_and_mul_ignores_the_approximation(x: Tensor, approximate: str) -> Tensor:
    return gelu_and_mul(x, "none")


@wrong("linear", "value", axis="features")
def linear_leaves_out_the_last_block_of_a_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    whole = weight.shape[1] // 64 * 64 or weight.shape[1]
    return functional.linear(x[..., :whole], weight[:, :whole], bias)


@wrong("linear", "value")
def linear_ignores_the_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight)


@wrong("linear", "value")
def linear_sums_in_blocks_of_the_storage_dtype(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Accumulates in half the bits of the dtype."""
    narrow = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=narrow)
    for start in range(0, x.shape[-1], 8):
        part = functional.linear(x[..., start : start + 8], weight[:, start : start + 8])
        total = total + part.to(narrow)
    return (total if bias is None else total + bias).to(x.dtype)


@wrong("embedding", "value")
def embedding_reads_the_next_row(token_ids: Tensor, weight: Tensor) -> Tensor:
    return functional.embedding((token_ids + 1) % weight.shape[0], weight)


@wrong("rotary_embedding", "value")
def rotary_embedding_rotates_neighbours(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    size = 2 * cos.shape[-1]

    def turned(heads: Tensor) -> Tensor:
        even, odd = heads[..., 0:size:2], heads[..., 1:size:2]
        c, s = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
        pairs = torch.stack((even * c - odd * s, odd * c + even * s), -1)
        return torch.cat((pairs.flatten(-2), heads[..., size:]), -1)

    return turned(query), turned(key)


@wrong("rotary_embedding", "value")
def rotary_embedding_turns_the_other_way(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return rotary_embedding(query, key, cos, -sin)


@wrong("apply_penalties", "value")
def apply_penalties_divides_negative_logits(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    shifted = logits.float() - logits.float().min() if logits.numel() else logits
    lowest = logits.float().min() if logits.numel() else 0
    changed = apply_penalties(shifted, prompt_mask, output_counts, repetition, presence, frequency)
    return changed.float() + lowest


@wrong("apply_penalties", "value")
def apply_penalties_counts_once(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    return apply_penalties(
        logits, prompt_mask, output_counts.clamp(max=1), repetition, presence, frequency
    )


@wrong("sample_tokens", "value")
def sample_tokens_takes_the_last_of_equals(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    steps: Tensor,
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = sample_tokens(logits, temperature, top_k, top_p, min_p, seeds, steps)
    if temperature is None:
        tokens = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)
    return tokens, logprobs


@wrong("sample_tokens", "value")
def sample_tokens_ignores_min_p(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    steps: Tensor,
) -> tuple[Tensor, Tensor]:
    return sample_tokens(logits, temperature, top_k, top_p, None, seeds, steps)


@wrong("sample_tokens", "value")
def sample_tokens_repeats_the_noise_of_the_first_step(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    steps: Tensor,
) -> tuple[Tensor, Tensor]:
    return sample_tokens(logits, temperature, top_k, top_p, min_p, seeds, torch.zeros_like(steps))
