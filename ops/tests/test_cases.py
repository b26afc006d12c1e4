"""The cases of every op: reproducible, complete, and stating what layers state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interposer import AttentionSpec, Case, CustomOp, OpEntry, Site
from interposer.records import load_target
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.moe.router import Router
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.sampler import Sampler
from interposer_ops.plugin import interposer_records
from interposer_testing.cases import CaseSpace

OPS: dict[str, CustomOp[..., Any]] = {
    record.name: load_target(record.target)
    for record in interposer_records()
    if isinstance(record, OpEntry)
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each op with one dtype at a landing, the dtypes in turn, and with all of them in `make test-all`.
each_op_and_dtype = pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(
            op,
            dtype,
            id=f"{name}-{dtype}",
            marks=[] if place == turn % len(dtypes) else [pytest.mark.slow],
        )
        for turn, (name, op) in enumerate(OPS.items())
        for dtypes in [getattr(op.cases, "dtypes", DTYPES)]
        for place, dtype in enumerate(dtypes)
    ],
)


def same(one: Case, other: Case) -> bool:
    def equal(a: object, b: object) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            one, other = a.double(), b.double()  # there is no comparison of 8-bit floats
            return a.shape == b.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        return a == b

    return one.label == other.label and all(
        equal(value, other.arguments[name]) for name, value in one.arguments.items()
    )


@pytest.mark.landing(8)
@each_op_and_dtype
def test_cases_depend_only_on_their_seed(op: CustomOp[..., Any], dtype: torch.dtype) -> None:
    space = op.cases
    assert isinstance(space, CaseSpace)
    # Every value of every axis, and not every combination, which takes minutes.
    points = space.covering(dtype)
    first, again, other = ([space.build(p, dtype, seed) for p in points] for seed in (1, 1, 2))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not all(same(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.landing(30)
@each_op_and_dtype
def test_cases_are_complete(op: CustomOp[..., Any], dtype: torch.dtype) -> None:
    cases = list(op.cases(dtype, 0))
    labels = [case.label for case in cases]
    assert len(set(labels)) == len(labels) >= 5
    for case in cases:
        assert list(case.arguments) == list(op.signature.parameters)
        assert case.reduction >= 0
        assert 0 <= case.magnitude < float("inf")
    tensors = [v for c in cases for v in c.arguments.values() if isinstance(v, torch.Tensor)]
    # An op without a tensor of the dtype has the dtype as its ``out_dtype``.
    out_dtypes = [case.arguments.get("out_dtype") for case in cases]
    assert any(tensor.dtype == dtype for tensor in tensors) or dtype in out_dtypes
    # Where everything must be dense, it still may begin anywhere.
    assert any(not t.is_contiguous() or t.storage_offset() for t in tensors)
    # A gathering op can return nothing from a cache and a table that are not empty.
    assert any(t.numel() == 0 for t in tensors) or "gather_cache" in op.name


@pytest.mark.slow
def test_cases_state_the_dims_that_layers_state(make_site: Callable[..., Site]) -> None:
    site = make_site("", torch.float32)
    RMSNorm(site, 8, 1e-6)
    GatedActivation(site, "silu", 8)
    GatedActivation(site, "gelu", 8)
    RotaryEmbedding(site, 8, 4)
    # Those that share a table say so by one dim more.
    Embedding(site, 8, 8)
    LMHead(site, 8, 8)
    Sampler(site, 8)
    Router(site, 8, num_experts=4, top_k=2, renormalize=True)
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        page_size=4,
        scale=1.0,
    )
    Attention(site, spec)
    stated = {
        choice.request.name: set(choice.request.dims)
        for choice, _ in site.resolver.choices.values()
        if choice.request.kind == "kernel"
    }
    assert len(stated) > 8
    for name in stated:
        for case in OPS[name].cases(torch.float32, 0):
            assert set(case.dims) == stated[name], f"{name}: {case.label}"
