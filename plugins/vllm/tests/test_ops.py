"""Ops that vLLM registers are kernels where their schema is known; ops of this process play them.

What the real ones compute is verified by `make test-vllm`, with vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from interposer import Capability, CustomOp, Request, current_registry
from interposer.records import Kernel, load_target
from interposer_testing import check_kernel
from interposer_testing.cases import planned_cases
from interposer_vllm._ops.library import fault, libraries, op
from interposer_vllm._ops.schemas import SCHEMAS
from interposer_vllm.plugin import interposer_records

X86 = Capability("x86_64", features=frozenset({"avx512_bf16"}))
KERNELS = [record for record in interposer_records() if isinstance(record, Kernel)]
ON_CPU = [kernel for kernel in KERNELS if kernel.platform == "cpu"]
ON_GPUS = [kernel for kernel in KERNELS if kernel.platform != "cpu"]
named = pytest.mark.parametrize("kernel", ON_CPU, ids=lambda kernel: kernel.name)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(wide * scale * weight.float())


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    residual.add_(x)
    rms_norm(x, residual, weight, eps)


def gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def play(out: torch.Tensor, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        gate, up = x.float().chunk(2, dim=-1)
        out.copy_(function(gate) * up)

    return play


def single(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def play(out: torch.Tensor, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        out.copy_(function(x.float()))

    return play


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    assert rope_dim_offset == 0
    assert not inverse
    assert query.dtype == cos_sin_cache.dtype
    cos, sin = (t[:, None] for t in cos_sin_cache[positions].chunk(2, dim=-1))
    size = 2 * cos.shape[-1]
    for flat in (query, key):
        assert flat.dim() == 2
        turning = flat.unflatten(1, (-1, head_size))[..., :size]
        a, b = turning.chunk(2, -1) if is_neox else (turning[..., ::2], turning[..., 1::2])
        one, other = a * cos - b * sin, b * cos + a * sin
        a.copy_(one)
        b.copy_(other)


def static_scaled_int8_quant(
    out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None
) -> None:
    assert x.dim() == out.dim() == 2
    assert azp is None
    out.copy_((x.float() / scale).round().clamp(-128, 127))


def dynamic_scaled_int8_quant(
    out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, azp: torch.Tensor | None
) -> None:
    assert x.dim() == out.dim() == scale.dim() == 2
    assert azp is None
    wide = x.float()
    span = wide.abs().amax(-1, keepdim=True) / 127
    scale.copy_(span)  # 0 for a row of zeros
    out.copy_((wide / torch.where(span > 0, span, 1.0)).round().clamp(-128, 127))


def weight_packed_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    is_vnni: bool,
) -> None:
    assert is_vnni
    assert bias is None or bias.dtype == torch.float32
    product = x.float() @ weight.float().flip(0).t()
    out.copy_(product if bias is None else product + bias)


PLAYED: dict[str, Callable[..., Any]] = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": gated(functional.silu),
    "_C::gelu_and_mul": gated(functional.gelu),
    "_C::gelu_tanh_and_mul": gated(lambda x: functional.gelu(x, approximate="tanh")),
    "_C::gelu_tanh": single(lambda x: functional.gelu(x, approximate="tanh")),
    "_C::gelu_quick": single(lambda x: x * torch.sigmoid(1.702 * x)),
    "_C::rotary_embedding": rotary_embedding,
    "_C::static_scaled_int8_quant": static_scaled_int8_quant,
    "_C::dynamic_scaled_int8_quant": dynamic_scaled_int8_quant,
    # A form of its own, so that a weight that was not prepared is found.
    "_C::convert_weight_packed": lambda weight: weight.flip(0),
    "_C::weight_packed_linear": weight_packed_linear,
}

Play = Callable[..., None]


@pytest.fixture
def play() -> Iterator[Play]:
    """Return a function that registers ops by schema, for the length of a test."""
    with torch.library._scoped_library("_C", "FRAGMENT") as library:

        def registered(schemas: dict[str, str], key: str = "CPU") -> None:
            for name, schema in schemas.items():
                short = name.partition("::")[2]
                library.define(short + schema)
                library.impl(short, PLAYED[name], key)

        yield registered
    op.cache_clear()


def request_of(kernel: Kernel, dtype: str, dims: Any) -> Request:
    return Request("kernel", kernel.op, "cpu", X86, dtype, dims)


def first(**schemas: str) -> dict[str, str]:
    """Return one schema of each op, the first known one or the given one."""
    schema_by_op = {f"_C::{name}": schema for name, schema in schemas.items()}
    return {name: schema_by_op.get(name, known[0]) for name, known in SCHEMAS.items()}


def plain_request(kernel: Kernel) -> Request:
    dims = {"residual_dtype": "bfloat16", "approximate": "tanh", "asymmetric": False}
    return request_of(kernel, "bfloat16", dims)


@named
def test_without_vllm_the_refusal_names_vllm(kernel: Kernel) -> None:
    verdict = load_target(kernel.predicate)(plain_request(kernel))
    assert verdict.reason.startswith("needs vLLM, which is not installed: pip install vllm")


@named
def test_an_op_with_a_known_schema_agrees_with_the_reference(kernel: Kernel, play: Play) -> None:
    play(first())
    judge, function = load_target(kernel.predicate), load_target(kernel.target)
    prepare = load_target(kernel.prepare) if kernel.prepare else None
    defined: CustomOp[..., Any] = load_target(current_registry().ops[kernel.op].target)
    ran = 0
    for planned in planned_cases(defined, 0, quick=True):
        case = planned.build()
        request = request_of(kernel, str(planned.dtype).removeprefix("torch."), case.dims)
        if not kernel.requires.judge(request):
            continue
        assert judge(request) or "takes a residual of" in judge(request).reason
        if judge(request):
            ran += 1
            assert check_kernel(defined, function, case, prepare=prepare) == [], case.label
    assert ran >= 3


@pytest.mark.parametrize(
    ("name", "schema"), [(name, schema) for name, known in SCHEMAS.items() for schema in known]
)
def test_every_known_schema_is_accepted(name: str, schema: str, play: Play) -> None:
    play({name: schema})
    assert fault(name, "CPU") == ""


@named
def test_a_changed_schema_is_refused_with_both_schemas(kernel: Kernel, play: Play) -> None:
    moved = {name: known[0].replace("(", "(int layout, ", 1) for name, known in SCHEMAS.items()}
    play(moved)
    reason = load_target(kernel.predicate)(plain_request(kernel)).reason
    assert "has another schema: _C::" in reason
    there, _, known = reason.partition(", where calls were written for ")
    assert "(int layout, " in there
    assert known.startswith("_C::")
    assert "layout" not in known


def test_a_build_for_other_devices_is_refused(play: Play) -> None:
    play(first(), key="CUDA")
    for kernel in ON_CPU:
        reason = load_target(kernel.predicate)(plain_request(kernel)).reason
        assert "has no kernel for CPU: this build of vLLM is for other devices" in reason
    for kernel in ON_GPUS:
        on_gpu = Request(
            "kernel",
            kernel.op,
            kernel.platform,
            Capability("sm_90"),
            "bfloat16",
            {"residual_dtype": "bfloat16", "approximate": "tanh", "asymmetric": False},
        )
        assert load_target(kernel.predicate)(on_gpu)


def test_unproven_kernels_rank_below_proven_ones() -> None:
    assert ON_GPUS
    assert {kernel.proven_on for kernel in ON_GPUS} == {frozenset()}
    assert {kernel.proven_on for kernel in ON_CPU} == {frozenset({"x86_64"})}


def test_a_cpu_build_loads_one_library(tmp_path: Any) -> None:
    for name in ("_C", "_C_AVX512", "_C_AVX2"):
        (tmp_path / f"{name}.abi3.so").touch()
    assert len(libraries(tmp_path)) == 1
    (tmp_path / "_C_AVX2.abi3.so").unlink()
    (tmp_path / "_rocm_C.abi3.so").touch()
    assert [path.name for path in libraries(tmp_path)] == ["_C.abi3.so", "_rocm_C.abi3.so"]
