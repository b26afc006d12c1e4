"""Kernels of torch's own functions, where their cases are too small to reach, and their choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interposer import Case, Config, CustomOp, Kernel, Request, current_registry, select
from interposer.records import load_target
from interposer_ops._records import read_records
from interposer_ops.activations import silu_and_mul
from interposer_ops.activations._activations_torch import silu_and_mul_functional
from interposer_ops.attention import paged_attention
from interposer_ops.attention._paged_attention_torch import paged_attention_sdpa
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_ops.norms._norms_torch import (
    fused_add_rms_norm_vector_norm,
    rms_norm_vector_norm,
)
from interposer_ops.rotary import rotary_embedding
from interposer_ops.rotary._rotary_torch import rotary_embedding_addcmul
from interposer_testing import check_kernel

KERNELS = [
    record
    for record in read_records()
    if isinstance(record, Kernel) and record.target.partition(":")[0].endswith("_torch")
]
WITHOUT_OTHERS = Config(plugins={"interposer-ops"})
HALF_AND_SINGLE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def dims_of(op: str) -> dict[str, Any]:
    """Return the dims of the first case of an op."""
    defined = load_target(current_registry().ops[op].target)
    return dict(next(iter(defined.cases(torch.float32, 0))).dims)


@pytest.mark.landing(22)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_unknown_platform_gets_the_torch_kernels(kernel: Kernel, dtype: str) -> None:
    request = Request("kernel", kernel.op, "elsewhere", dtype=dtype, dims=dims_of(kernel.op))
    candidates = current_registry(WITHOUT_OTHERS).candidates("kernel", kernel.op)
    assert select(request, candidates).chosen.name == kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_for_specific_hardware_rank_first(kernel: Kernel) -> None:
    """Negative are the scores of what is taken only where it is wanted."""
    scores = {c.score for c in current_registry().candidates("kernel", kernel.op)}
    assert min(score for score in scores if score > 0) == kernel.score
    assert len(scores) > 2


def test_other_attention_patterns_are_left_to_the_reference() -> None:
    (kernel,) = (kernel for kernel in KERNELS if kernel.op == "paged_attention")
    for name in ("softcapped", "sinks"):
        request = Request("kernel", kernel.op, dtype="float32", dims={**PLAIN, name: True})
        assert kernel.requires.judge(request).reason == f"{name} is True, must be one of [False]"


PLAIN = {"softcapped": False, "sinks": False, "alibi": False, "prefix_lm": False}


@HALF_AND_SINGLE
@pytest.mark.parametrize("window_tokens", [None, 40])
@pytest.mark.parametrize("query_tokens", [[1, 1, 1], [70, 1, 33]])
def test_long_sequences_are_attended_to_as_the_op_defines(
    query_tokens: list[int], window_tokens: int | None, dtype: torch.dtype
) -> None:
    """Longer than the window, on pages in any order, with slots that were never written."""
    lengths, page_size = [130, 17, 96], 16
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(30, generator=generator)[:27].view(3, 9)
    caches = torch.full((2, 30, page_size, 2, 32), torch.nan, dtype=dtype)
    for table, length in zip(pages, lengths, strict=True):
        for position in range(length):
            stored = (2 * torch.rand(2, 2, 32, generator=generator) - 1).to(dtype)
            caches[:, table[position // page_size], position % page_size] = stored
    arguments = {
        "query": torch.randn(sum(query_tokens), 8, 32, generator=generator).to(dtype),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "page_table": pages,
        "query_starts": torch.tensor([0, *query_tokens]).cumsum(0),
        "seq_lens": torch.tensor(lengths),
        "max_query_tokens": max(query_tokens),
        "scale": 0.2,
        "causal": True,
        "window_tokens": window_tokens,
        "softcap": None,
    }
    case = Case("long", arguments, reduction=130 + 32, magnitude=1 + 32 * 0.2, rounded=1.0)
    assert check_kernel(paged_attention, paged_attention_sdpa, case) == []


def norm_arguments(dtype: torch.dtype) -> dict[str, Any]:
    x, residual = torch.randn(2, 9, 4096).to(dtype)
    weight = (1 + 0.1 * torch.randn(4096)).to(dtype)
    return {"x": x, "residual": residual, "weight": weight, "eps": 0.1}


@HALF_AND_SINGLE
@pytest.mark.parametrize(
    ("op", "function"),
    [(rms_norm, rms_norm_vector_norm), (fused_add_rms_norm, fused_add_rms_norm_vector_norm)],
)
def test_norms_of_many_elements(
    op: CustomOp[..., Any], function: Callable[..., Any], dtype: torch.dtype
) -> None:
    arguments = norm_arguments(dtype)
    if op is rms_norm:
        del arguments["residual"]
    case = Case("many elements", arguments, reduction=4096, magnitude=8.0, rounded=8.0)
    assert check_kernel(op, function, case) == []


def test_norms_in_bfloat16_are_as_accurate_as_the_reference() -> None:
    x, _, weight, eps = norm_arguments(torch.bfloat16).values()
    exact = rms_norm(x.double(), weight.double(), eps)
    for part in (slice(0, 1), slice(None)):
        actual = (rms_norm_vector_norm(x[part], weight, eps) - exact[part]).abs().mean()
        reference = (rms_norm(x[part], weight, eps) - exact[part]).abs().mean()
        assert actual <= 1.001 * reference


@pytest.mark.landing(2)
@HALF_AND_SINGLE
@pytest.mark.parametrize("rotary_size", [64, 32])
def test_rotary_embedding_of_many_elements(dtype: torch.dtype, rotary_size: int) -> None:
    angles = 10 * torch.rand(300, rotary_size // 2)
    arguments = {
        "query": torch.randn(300, 64, 64).to(dtype),
        "key": torch.randn(300, 2, 64).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    case = Case("many elements", arguments, reduction=2, magnitude=10.0, rounded=5.0)
    assert check_kernel(rotary_embedding, rotary_embedding_addcmul, case) == []


@HALF_AND_SINGLE
def test_activations_do_not_write_their_input(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 512).to(dtype)
    case = Case("transposed", {"x": x.transpose(0, 1)}, reduction=4, magnitude=25.0)
    assert check_kernel(silu_and_mul, silu_and_mul_functional, case) == []
