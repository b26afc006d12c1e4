"""Launch parameters: what a file may say, and which entry a device gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton")

from interposer.errors import ConfigError, UnknownNameError
from interposer_ops._triton.parameters import (
    Parameters,
    architecture,
    assumed,
    parameters_for,
    table_of,
    tuned_kernels,
)

GOOD = {
    "num_warps": 4,
    "num_stages": 2,
    "blocks": {"width": 512, "tile": 1024, "warp": 256},
}
META = torch.device("meta")


@pytest.mark.landing(46)
@pytest.mark.parametrize("kernel", tuned_kernels())
def test_every_file_is_valid_and_has_a_default(kernel: str) -> None:
    assert isinstance(table_of(kernel)["default"], Parameters)


@pytest.mark.parametrize(
    ("device", "entry"),
    [
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("sm_89", "sm_80"),
        ("sm_120", "sm_100"),
        ("sm_75", "default"),
        ("gfx942", "gfx942"),
        ("gfx90a", "default"),
        ("gfx1101", "gfx1100"),
        ("gfx1201", "default"),
        ("interpreter", "default"),
        ("xe2", "default"),
    ],
)
def test_the_nearest_older_architecture_of_the_family_is_used(device: str, entry: str) -> None:
    with assumed(device):
        assert architecture(META) == device
        assert parameters_for("rms_norm", META) == table_of("rms_norm")[entry]


def test_assumed_architectures_end_with_the_block() -> None:
    with assumed("sm_90"):
        modern = parameters_for("rms_norm", META)
    with assumed("gfx1100"):
        assert parameters_for("rms_norm", META) != modern


def test_overrides_replace_entries_of_the_package() -> None:
    table = table_of("rms_norm", {"sm_90": GOOD})
    assert table["sm_90"].blocks["width"] == 512
    assert table["sm_80"] == table_of("rms_norm")["sm_80"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_warps": 3}, r"num_warps=3: .*power of two"),
        ({"num_warps": 32}, "num_warps=32"),
        ({"num_warps": 0}, "num_warps=0"),
        ({"num_stages": 9}, "num_stages=9"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"blocks": {**GOOD["blocks"], "width": 96}}, r"blocks\.width=96"),  # type: ignore[dict-item]
        ({"blocks": {"width": 64, "tile": 64}}, "no block 'warp'"),
    ],
)
def test_a_value_out_of_its_range_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table_of("rms_norm", {"sm_90": {**GOOD, **changed}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"gfx943": GOOD}, "Unknown architecture 'gfx943'.* first: 'gfx942'"),
        ({"sm_90": {**GOOD, "num_warp": 4}}, "Unknown key 'num_warp'.* first: 'num_warps'"),
        (
            {"sm_90": {**GOOD, "blocks": {**GOOD["blocks"], "with": 64}}},  # type: ignore[dict-item]
            "Unknown block 'with'.* first: 'width'",
        ),
    ],
)
def test_an_unknown_name_lists_the_alternatives(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        table_of("rms_norm", overrides)


def test_an_unknown_kernel_lists_the_alternatives() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown kernel 'rms_norms'.* first: 'rms_norm'"):
        table_of("rms_norms")
