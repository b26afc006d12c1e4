"""LoRA kernels of the compiled library, at every level of this processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer import Config, CustomOp, current_registry
from interposer_cpu import native
from interposer_cpu._kernels import lora
from interposer_cpu._platform import CPUPlatform
from interposer_ops.lora import lora_expand, lora_shrink
from interposer_testing import check_kernel, conformance

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(
    bool(native.why_absent()), reason=f"needs native kernels: {native.why_absent()}"
)

Op = CustomOp[..., Any]
KERNELS: dict[str, tuple[Op, Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "lora_shrink": (lora_shrink, lora.lora_shrink, lora.prepare_shrink),
    "lora_expand": (lora_expand, lora.lora_expand, lora.prepare_expand),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    native.force_level(None)


@pytest.mark.parametrize(
    "level",
    # The lowest differs most from the best; those between are tried when there is time.
    [
        pytest.param(name, marks=[pytest.mark.slow] if index else [])
        for index, name in enumerate(native.levels()[:-1])
    ],
)
def test_kernels_conform_on_every_level_below_the_best(level: str) -> None:
    native.force_level(level)
    registry, device = current_registry(Config(isolation="off")), CPUPlatform().devices()[0]
    for name in KERNELS:
        trials = conformance(registry, device, distribution="interposer-cpu", op=name, quick=True)
        own = [t for t in trials if (t.candidate.name, t.aspect) == (f"{name}_native", "numerics")]
        assert own
        for trial in own:
            assert trial.run() == [], str(trial)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=num_examples(25), deadline=None)
@given(
    width=st.integers(1, 700),
    rank=st.integers(1, 40),
    num_tokens=st.integers(1, 24),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_lora_is_correct_for_any_sizes(
    name: str, width: int, rank: int, num_tokens: int, dtype: torch.dtype, seed: int
) -> None:
    op, function, prepare = KERNELS[name]
    assert op.sample is not None
    dims = {"in_features": width, "out_features": width, "rank": rank, "num_adapters": 3}
    case = op.sample(dtype, dims, num_tokens, seed)
    assert check_kernel(op, function, case, prepare=prepare, fenced=True) == []


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_multithreaded_results_are_correct(name: str, num_tokens: int) -> None:
    """One token of a wide layer, and a prompt."""
    op, function, prepare = KERNELS[name]
    assert op.sample is not None
    dims = {"in_features": 9000, "out_features": 9000, "rank": 18, "num_adapters": 2}
    case = op.sample(torch.bfloat16, dims, num_tokens, 0)
    assert check_kernel(op, function, case, prepare=prepare, fenced=True) == []
