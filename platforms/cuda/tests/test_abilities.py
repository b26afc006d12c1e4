"""Features of a device follow from its architecture and from its driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interposer_cuda._hardware.architectures import architecture_of
from interposer_cuda._hardware.driver import CUDADevice, bandwidth_bytes_per_s, capability_of

H100 = CUDADevice(
    name="NVIDIA H100 80GB HBM3",
    uuid="61626364-6566-6768-696a-6b6c6d6e6f00",
    memory_bytes=85520809984,
    peers=(1,),
    shared_bytes=49152,
    integrated=False,
    multiprocessors=132,
    can_map_host_memory=True,
    compute_mode=0,
    memory_khz=2619000,
    bus_bits=5120,
    l2_bytes=52428800,
    unified_addressing=True,
    major=9,
    minor=0,
    shared_optin_bytes=232448,
    cluster_launch=True,
    tensor_map_access=True,
)


def test_an_h100_is_described() -> None:
    capability = capability_of(H100)
    assert capability.architecture == "sm_90"
    assert capability.units == 132
    assert capability.memory_bytes == 85520809984
    assert capability.caches_bytes == {"l2": 50 * 2**20, "shared": 227 * 2**10}
    assert capability.features == {
        *("bandwidth_250g", "bandwidth_500g", "bandwidth_1t", "bandwidth_2t"),
        *(f"tensor_cores_{generation}" for generation in (1, 2, 3, 4)),
        *("clusters", "cp_async", "dependent_launch", "host_mapping", "p2p", "tma"),
        *("triton", "wgmma"),
    }
    assert capability.formats == {
        *("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"),
    }


def test_bandwidth_follows_from_clock_and_bus() -> None:
    assert bandwidth_bytes_per_s(H100) == pytest.approx(3.352e12, rel=1e-3)


def test_driver_attributes_override_the_architecture_table() -> None:
    part = replace(
        H100, cluster_launch=False, tensor_map_access=False, peers=(), can_map_host_memory=False
    )
    assert not {"clusters", "tma", "p2p", "host_mapping"} & capability_of(part).features
    assert "wgmma" in capability_of(part).features


def test_shared_memory_without_opt_in_is_used_if_the_driver_reports_no_opt_in() -> None:
    assert capability_of(replace(H100, shared_optin_bytes=0)).caches_bytes["shared"] == 49152


@pytest.mark.parametrize(
    ("version", "generation", "has", "lacks"),
    [
        ((6, 1), 0, set(), {"triton", "tensor_cores_1"}),
        ((7, 0), 1, {"tensor_cores_1"}, {"triton", "tensor_cores_2"}),
        ((7, 5), 2, {"triton"}, {"cp_async", "tma"}),
        ((8, 0), 3, {"cp_async"}, {"tma", "clusters"}),
        ((8, 9), 4, {"cp_async"}, {"tma", "wgmma"}),
        ((9, 0), 4, {"wgmma", "tma", "clusters"}, {"tcgen05"}),
        ((10, 0), 5, {"tcgen05", "tma"}, {"wgmma"}),
        ((12, 0), 5, {"tma", "clusters"}, {"wgmma", "tcgen05"}),
    ],
)
def test_features_of_an_architecture(
    version: tuple[int, int], generation: int, has: set[str], lacks: set[str]
) -> None:
    features = architecture_of(*version).features
    tensor_cores = {name for name in features if name.startswith("tensor_cores")}
    assert tensor_cores == {f"tensor_cores_{number}" for number in range(1, generation + 1)}
    assert has <= features
    assert not lacks & features


@pytest.mark.parametrize(
    ("version", "expected", "absent"),
    [
        ((7, 5), {"float16", "int8", "int4"}, {"bfloat16", "tf32"}),
        ((8, 6), {"bfloat16", "tf32", "int4"}, {"float8_e4m3fn"}),
        ((8, 9), {"float8_e4m3fn", "float8_e5m2"}, {"mxfp8"}),
        ((9, 0), {"float8_e4m3fn"}, {"int4", "nvfp4", "mxfp4"}),
        ((10, 0), {"mxfp8", "mxfp4", "nvfp4"}, {"int4"}),
        ((12, 0), {"mxfp8", "mxfp4", "nvfp4"}, {"int4"}),
    ],
)
def test_formats_of_an_architecture(
    version: tuple[int, int], expected: set[str], absent: set[str]
) -> None:
    formats = architecture_of(*version).formats
    assert expected <= formats
    assert not absent & formats


def test_an_unknown_architecture_has_no_instructions_of_a_single_one() -> None:
    assert architecture_of(10, 9) == architecture_of(10, 3)
    future = architecture_of(15, 0)
    assert future.name == "newer than Blackwell"
    assert "nvfp4" in future.formats
    assert not {"wgmma", "tcgen05"} & future.features
    assert "triton" in future.features
