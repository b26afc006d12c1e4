"""Attention through FlexAttention gives right results on the processor, without a compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.landing import landing_sample
from torch.nn.attention import flex_attention

from interposer import AttentionSpec, Capability, Config, Device, Resolver, Site, current_registry
from interposer_ops.attention import FlexBackend
from interposer_testing import attention_specs, check_attention

ANY = Capability("any")
DEVICE = Device("none", "cpu", "a device without kernels of its own", ANY)
# Each heads, mask and kind of cache once.
LABELS = (
    "MHA full head 32 page 4",
    "GQA window+softcap head 80 page 16",
    "MQA full head 32 page 4 sinks",
    "GQA softcap head 32 page 4 e4m3 with sinks",
    "GQA window head 32 page 4 int8 per head",
    "MHA full head 32 page 4 e5m2",
)


@pytest.mark.landing(1)
@pytest.mark.parametrize("label", landing_sample(LABELS, every=3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_matches_the_ops(
    label: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    spec = next(s for name, s in attention_specs() if name == label and s.dtype == dtype)
    assert FlexBackend.accepts(spec, ANY)
    registry = current_registry(Config(plugins={"interposer-ops"}))
    site = Site(Resolver(registry, DEVICE, Config()), "attention", dtype)
    assert check_attention(FlexBackend, spec, site) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": torch.float64}, "computes in 32 or 16 bit floats, got torch.float64"),
        ({"head_size": 8}, "takes heads of 16 or more, got 8"),
        ({"cache_dtype": torch.float16}, "stores the cache as torch.float32, requested torch."),
        ({"alibi": True}, "does not do alibi"),
        ({"prefix_lm": True}, "does not do prefix_lm"),
        ({"num_heads": 3, "num_kv_heads": 2}, "needs heads in groups of one size, got 3 heads"),
    ],
)
def test_unsupported_specs_are_refused(change: dict[str, object], expected: str) -> None:
    spec: AttentionSpec = next(attention_specs())[1]
    verdict = FlexBackend.accepts(replace(spec, **change), ANY)  # type: ignore[arg-type]
    assert verdict.reason.startswith(expected)
