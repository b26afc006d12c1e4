"""The kernel computes the op where it takes more than one panel, too."""

from __future__ import annotations

import pytest
import torch

from interposer import Capability, Config, Device, Resolver, Site, current_registry, explain
from interposer_nf4 import _byte_table as byte_table
from interposer_nf4._codebook_linear import nf4_linear
from interposer_nf4._codebooks import CODEBOOKS, QuantType
from interposer_testing import check_kernel

DISTRIBUTION = "interposer-nf4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_large_layer_is_computed_panel_by_panel(num_tokens: int, dtype: torch.dtype) -> None:
    dims = {"in_features": 1024, "out_features": 1100}
    assert nf4_linear.sample is not None
    case = nf4_linear.sample(dtype, dims, num_tokens, 0)
    faults = check_kernel(nf4_linear, byte_table.nf4_linear, case, prepare=byte_table.prepare)
    assert faults == []


@pytest.mark.parametrize("name", CODEBOOKS)
def test_table_holds_both_values_of_each_byte(name: QuantType) -> None:
    codebook = torch.tensor(CODEBOOKS[name])
    empty = torch.empty(0)
    table = byte_table.prepare(weight=empty, absmax=empty, codebook=codebook, bias=None)["codebook"]
    assert table is not None
    pairs = table.view(torch.float32).view(256, 2)
    for byte, pair in enumerate(pairs.tolist()):
        assert pair == [codebook[byte // 16], codebook[byte % 16]]


def test_nan_in_the_codebook_affects_only_its_weights() -> None:
    codebook = torch.tensor(CODEBOOKS["nf4"])
    codebook[3] = torch.nan
    weight = torch.tensor([[0x00, 0x11], [0x03, 0x00], [0x30, 0x22]], dtype=torch.uint8)
    prepared = byte_table.prepare(weight, torch.ones(3, 1), codebook, None)
    y = byte_table.nf4_linear(torch.ones(1, 4), **prepared)  # type: ignore[arg-type]
    assert y.isnan().tolist() == [[False, True, True]]


def test_other_platforms_get_the_reference() -> None:
    device = Device("bare", "cpu", "a device without kernels of its own", Capability("any"))
    site = Site(Resolver(current_registry(), device, Config()), "block.o_proj", torch.float32)
    bound = site.bind_kernel(nf4_linear, in_features=64, out_features=64)
    assert bound.function is nf4_linear.reference
    text = str(explain(site).why("nf4_linear"))
    assert "dequantizes, then multiplies floats" in text
    assert "nf4_linear_byte_table (interposer-nf4 0.1.0): runs on cpu" in text
