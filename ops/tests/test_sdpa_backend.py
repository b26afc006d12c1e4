"""Attention through torch's scaled dot products gives right results on the processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interposer import AttentionSpec, Capability, Config, Device, Resolver, Site, current_registry
from interposer_ops.attention import SdpaBackend
from interposer_testing import attention_specs, check_attention

ANY = Capability("sm_90")
DEVICE = Device("none", "cpu", "a device without kernels of its own", Capability("any"))
SPECS = [(label, spec) for label, spec in attention_specs() if SdpaBackend.accepts(spec, ANY)]
# Of the dtypes one has most of the cases, of the others a few stand for all.
CHOSEN = [(f"{label} {spec.dtype}", spec) for label, spec in SPECS]


def site(dtype: torch.dtype) -> Site:
    registry = current_registry(Config(plugins={"interposer-ops"}))
    return Site(Resolver(registry, DEVICE, Config()), "attention", dtype)


def test_many_specs_are_accepted() -> None:
    windows = [spec for _, spec in SPECS if spec.window_tokens]
    grouped = [spec for _, spec in SPECS if spec.num_heads > spec.num_kv_heads > 1]
    assert len(SPECS) >= 10
    assert windows
    assert grouped
    assert {spec.dtype for _, spec in SPECS} >= {torch.float32, torch.bfloat16}


@pytest.mark.landing(7)
@pytest.mark.parametrize("spec", [spec for _, spec in CHOSEN], ids=[label for label, _ in CHOSEN])
def test_sdpa_matches_the_ops(spec: AttentionSpec) -> None:
    assert check_attention(SdpaBackend, spec, site(spec.dtype)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"softcap": 30.0}, "does not cap scores, softcap is 30.0"),
        ({"sinks": True}, "does not do sinks"),
        ({"type": "encoder"}, "serves decoder attention only, got encoder"),
        ({"cache_dtype": torch.float8_e4m3fn}, "stores the cache as torch."),
        ({"num_heads": 3, "num_kv_heads": 2}, "needs heads in groups of one size, got 3 heads"),
        ({"dtype": torch.float64}, "computes in 32 or 16 bit floats, got torch.float64"),
    ],
)
def test_unsupported_specs_are_refused(change: dict[str, object], expected: str) -> None:
    spec = replace(SPECS[0][1], **change)  # type: ignore[arg-type]
    assert SdpaBackend.accepts(spec, ANY).reason.startswith(expected)
