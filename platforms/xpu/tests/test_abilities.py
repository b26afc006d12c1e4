"""Features of a device follow from its architecture and from its driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interposer_xpu._hardware.architectures import architecture_of, packed
from interposer_xpu._hardware.level_zero import XPUDevice, capability_of

MAX1550 = XPUDevice(
    name="Intel(R) Data Center GPU Max 1550",
    uuid="8680d50b-2f00-0000-1a00-000000000002",
    device_id=0x0BD5,
    ip_version=packed(12, 60, 7),
    integrated=False,
    xe_cores=64,
    vector_engines=512,
    memory_bytes=65520 * 2**20,
    bandwidth_bytes_per_s=1638 * 10**9,
    shared_bytes=128 * 1024,
    cache_bytes=192 * 2**20,
    sub_group_sizes=(16, 32),
    float64=True,
)


def test_a_stack_of_a_max_1550_is_described() -> None:
    capability = capability_of(MAX1550, triton=True)
    assert capability.architecture == "pvc"
    assert capability.units == 64
    assert capability.memory_bytes == 65520 * 2**20
    assert capability.caches_bytes == {"l2": 192 * 2**20, "shared": 128 * 2**10}
    assert capability.features == {
        *("bandwidth_250g", "bandwidth_500g", "bandwidth_1t"),
        *("block_2d_io", "dpas", "dpas_16", "float64", "xe_hpc"),
        *("sub_group_16", "sub_group_32", "triton"),
    }
    assert capability.formats == {"float32", "tf32", "bfloat16", "float16", "int8"}


def test_driver_properties_override_the_architecture_table() -> None:
    other = replace(MAX1550, float64=False, integrated=True, bandwidth_bytes_per_s=0)
    features = capability_of(other).features
    assert "integrated" in features
    assert not {"float64", "triton", "bandwidth_250g"} & features


def test_local_memory_of_the_architecture_is_used_if_not_reported() -> None:
    silent = replace(MAX1550, shared_bytes=0)
    assert capability_of(silent).caches_bytes["shared"] == 128 * 2**10


@pytest.mark.parametrize(
    ("ip_version", "name", "has", "lacks"),
    [
        (0x030DC008, "acm_g10", {"dpas_8"}, {"dpas_16", "block_2d_io", "float64"}),
        (0x030F0007, "pvc", {"dpas_16", "block_2d_io", "xe_hpc"}, {"xe2"}),
        (0x03118004, "mtl_u", set(), {"dpas"}),
        (0x05004004, "bmg_g21", {"dpas_16", "block_2d_io", "xe2"}, {"xe_hpc"}),
        (0x05010004, "lnl_m", {"dpas_16", "xe2"}, {"dpas_8"}),
        (0x07800004, "ptl_h", {"dpas_16", "xe3"}, {"xe2"}),
    ],
)
def test_features_of_an_architecture(
    ip_version: int, name: str, has: set[str], lacks: set[str]
) -> None:
    known = architecture_of(ip_version)
    assert known.name == name
    assert has <= known.features
    assert not lacks & known.features


def test_no_architecture_multiplies_8_bit_floats() -> None:
    versions = [(12, 55), (12, 60), (12, 70), (20, 1), (20, 4), (30, 0)]
    for version in versions:
        formats = architecture_of(packed(*version)).formats
        assert "float16" in formats
        assert not [name for name in formats if name.startswith(("float8", "mx", "nv"))]


def test_an_unknown_architecture_has_no_instructions_of_a_single_one() -> None:
    future = architecture_of(packed(35, 3))
    assert future.name == "xe_35_3"
    assert "dpas_16" in future.features
    assert not {"xe2", "xe3", "xe_hpc"} & future.features
    assert architecture_of(packed(12, 72)).features == frozenset()
    assert architecture_of(0).computes
    assert not architecture_of(packed(12, 10)).computes
    assert not architecture_of(packed(9, 0)).computes
