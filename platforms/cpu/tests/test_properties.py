"""What kernels and the backend promise of themselves holds, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interposer import AttentionSpec, Config, CustomOp, Kernel, Resolver, Site, current_registry
from interposer.records import load_target
from interposer.tuning.workload import random_projections, typical_step
from interposer_cpu.attention import SdpaBackend
from interposer_cpu.platform import CPUPlatform
from interposer_cpu.plugin import interposer_records

DEVICE = CPUPlatform().devices()[0]
KERNELS = [record for record in interposer_records() if isinstance(record, Kernel)]
DIMS = {
    "hidden_size": 96,
    "vocab_size": 512,
    "in_features": 96,
    "out_features": 160,
    "bias": True,
    "intermediate_size": 80,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 32,
    "rotary_size": 32,
    "page_size": 16,
    "windowed": False,
    "softcapped": False,
}
Call = Callable[[], Any]


def calls(record: Kernel, dtype: torch.dtype) -> Call:
    """Return a call of the kernel on a sample of its op; what it writes is given anew each time."""
    op: CustomOp[..., Any] = load_target(current_registry().ops[record.op].target)
    function = load_target(record.target)
    prepare = load_target(record.prepare) if record.prepare else None

    def call() -> Any:
        assert op.sample is not None
        arguments = dict(op.sample(dtype, DIMS, 40, 0).arguments)
        if prepare is not None:
            arguments |= prepare(**{name: arguments[name] for name in op.constants})
        result = function(*op.signature.bind(**arguments).args)
        return result, [arguments[name] for name in op.mutates]

    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("record", KERNELS, ids=lambda record: record.name)
def test_deterministic_kernels_repeat_themselves(record: Kernel, dtype: torch.dtype) -> None:
    assert "deterministic" in record.properties
    if record.requires.dtypes and str(dtype).removeprefix("torch.") not in record.requires.dtypes:
        pytest.skip(f"{record.name} needs {record.requires.dtypes}")
    call = calls(record, dtype)
    # A cache is not initialised: its NaN are equal too.
    torch.testing.assert_close(call(), call(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_tokens", [1, 8, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backend_repeats_itself(dtype: torch.dtype, num_tokens: int) -> None:
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        dtype=dtype,
        cache_dtype=dtype,
        page_size=16,
        scale=0.2,
    )
    backend = SdpaBackend(spec, Site(Resolver(current_registry(), DEVICE, Config()), "a", dtype))

    def call() -> torch.Tensor:
        batch, num_pages = typical_step(num_tokens, spec.page_size)
        (cache,) = backend.kv_layout().allocate(1, num_pages, "cpu")
        cache.fill_(0.5)
        generator = torch.Generator().manual_seed(0)
        query, key, value = random_projections(spec, num_tokens, generator, fused=False)
        return backend.forward(query, key, value, cache, backend.plan(batch))

    assert torch.equal(call(), call())
