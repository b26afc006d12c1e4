"""Blocks of vLLM are viewed as the cache of a backend that follows strides, and of no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interposer import AttentionBackend, AttentionSpec, Config
from interposer.errors import ConfigError
from interposer_vllm._block_views import view_for
from interposer_vllm._session import Session

SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "page_size": 32}


def backend(name: str, dtype: torch.dtype = torch.float32, **facts: Any) -> AttentionBackend:
    spec = AttentionSpec(**{"dtype": dtype, "cache_dtype": dtype, "scale": 0.2, **SIZES, **facts})
    session = Session("cpu", Config(attention={"decoder": name}))
    made: AttentionBackend = session.resolver.attention(spec, session.site("here", dtype))
    return made


@pytest.mark.native
@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"dtype": torch.bfloat16},
        {"sinks": True},
        {"window_tokens": 7, "softcap": 20.0},
        {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn},
        {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e5m2, "sinks": True},
    ],
    ids=str,
)
def test_the_compiled_backend_reads_vllms_blocks_without_a_copy(facts: dict[str, Any]) -> None:
    native_backend = backend("native", **facts)
    stored = torch.uint8 if native_backend.spec.is_quantized else native_backend.spec.cache_dtype
    blocks = torch.zeros(5, 2, 32, 2 * 32, dtype=stored)
    cache = view_for(native_backend)(blocks)
    assert cache.shape == native_backend.kv_layout().shape(5)
    assert cache.data_ptr() == blocks.data_ptr()


def test_a_backend_without_support_for_strides_is_refused() -> None:
    with pytest.raises(ConfigError, match="SdpaBackend relies on the order of its cache"):
        view_for(backend("sdpa"))
