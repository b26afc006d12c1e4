"""Grouped GEMM kernels of the CUDA platform match the ops on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from interposer import Capability, Request
from interposer_cuda import _grouped_experts as grouped_experts
from interposer_cuda._grouped_linear import grouped_linear as grouped_linear_grouped_mm
from interposer_ops.experts import fused_experts
from interposer_ops.linear import grouped_linear
from interposer_testing import check_kernel


def test_grouped_gemm_matches_the_op() -> None:
    checked = 0
    for case in grouped_linear.cases(torch.bfloat16, 0):
        x, weight = case.arguments["x"], case.arguments["weight"]
        if weight.shape[1] % 8 or weight.shape[2] % 8:
            continue
        checked += 1
        faults = check_kernel(grouped_linear, grouped_linear_grouped_mm, case)
        assert faults == [], (case.label, tuple(x.shape))
    assert checked >= 10


def products_in_float32(
    rows: torch.Tensor, matrices: torch.Tensor, *, offs: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply as the documented function would, if it returned what it sums in."""
    assert rows.dtype == matrices.dtype == torch.bfloat16
    assert rows.is_contiguous()
    assert matrices.transpose(1, 2).is_contiguous()
    assert rows.data_ptr() % 16 == matrices.data_ptr() % 16 == 0
    assert offs.dtype == torch.int32
    assert rows.shape[1] % 8 == matrices.shape[2] % 8 == 0
    out = rows.new_full((len(rows), matrices.shape[2]), torch.nan, dtype=out_dtype)
    start = 0
    for end, matrix in zip(offs.tolist(), matrices, strict=True):
        out[start:end] = rows[start:end].to(out_dtype) @ matrix.to(out_dtype)
        start = end
    return out


@pytest.fixture
def fresh_verdict() -> Iterator[None]:
    grouped_experts._returns_float32.cache_clear()
    yield
    grouped_experts._returns_float32.cache_clear()


EXPERTS = Request(
    "kernel", "fused_experts", "experts", Capability("sm_90"), "bfloat16", {"biased": False}
)


def test_experts_by_grouped_gemm_match_the_op(
    monkeypatch: pytest.MonkeyPatch, fresh_verdict: None
) -> None:
    monkeypatch.setattr(functional, "grouped_mm", products_in_float32)
    assert grouped_experts.judge(EXPERTS)
    checked: Counter[tuple[Any, Any]] = Counter()
    for case in fused_experts.cases(torch.bfloat16, 0):
        kind = case.dims["activation"], case.dims["biased"]
        if case.dims["hidden_size"] % 8 or case.dims["intermediate_size"] % 8 or checked[kind] > 5:
            continue
        checked[kind] += 1
        faults = check_kernel(
            fused_experts, grouped_experts.fused_experts, case, prepare=grouped_experts.prepare
        )
        assert faults == [], case.label
    assert set(checked) == {(a, b) for a in ("silu", "gelu", "swiglu_oai") for b in (True, False)}


def test_experts_are_refused_if_torch_rounds_grouped_gemm(fresh_verdict: None) -> None:
    reason = grouped_experts.judge(EXPERTS).reason
    assert reason == (
        f"torch {torch.__version__} rounds grouped products of bfloat16 to bfloat16, where the op "
        "keeps float32"
    )


def test_rounded_grouped_gemm_does_not_match_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is refused for that reason."""

    def rounded(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        return products_in_float32(*operands, **options).bfloat16().float()

    monkeypatch.setattr(functional, "grouped_mm", rounded)
    cases = fused_experts.cases(torch.bfloat16, 0)
    case = next(case for case in cases if case.label == "many tokens, other ranks")
    prepare, function = grouped_experts.prepare, grouped_experts.fused_experts
    faults = check_kernel(fused_experts, function, case, prepare=prepare)
    assert [fault.check for fault in faults] == ["value"]
