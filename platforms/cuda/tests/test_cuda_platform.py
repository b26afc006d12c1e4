"""The CUDA platform without a GPU: its services, and its errors without a driver."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from interposer import NumericsPolicy
from interposer.errors import ConfigError, PluginError, UnknownNameError
from interposer_cuda._hardware.driver import Answer, CUDADevice
from interposer_cuda._hardware.host_mapping import device_view
from interposer_cuda._hardware.system import read_system
from interposer_cuda._platform import CUDAPlatform

DEVICE = CUDADevice(
    "NVIDIA H100 80GB HBM3",
    "uuid",
    85520809984,
    (1,),
    *(49152, False, 132, True, 3, 2619000, 5120, 52428800, True, 9, 0, 232448, True, True),
)
T4 = replace(DEVICE, name="Tesla T4", major=7, minor=5, peers=(), compute_mode=0)
without_gpu = pytest.mark.skipif(bool(read_system().nodes), reason="needs a machine without a GPU")


@pytest.fixture
def platform() -> CUDAPlatform:
    """Return a platform with a given answer of the driver."""
    found = CUDAPlatform()
    found.__dict__["_answer"] = Answer((12, 8), (DEVICE, T4))
    return found


def test_the_platform_provides_its_services() -> None:
    provided = {m for m in CUDAPlatform.optional_members() if CUDAPlatform.provides(m)}
    assert provided == {
        *("capture_graph", "compile_backend", "distributed_backend", "facts", "map_host_memory"),
        *("memory_profile", "peak_memory_bytes", "pin_memory", "start_method", "stream"),
    }


def test_devices_are_in_the_order_of_the_driver(platform: CUDAPlatform) -> None:
    devices = platform.devices()
    assert [(d.platform, d.torch_device, d.name) for d in devices] == [
        ("cuda", "cuda:0", "NVIDIA H100 80GB HBM3"),
        ("cuda", "cuda:1", "Tesla T4"),
    ]
    assert platform.capability("cuda") == platform.capability("cuda:0") == devices[0].capability
    assert platform.capability("cuda:1").architecture == "sm_75"


def test_dtypes_match_the_device(platform: CUDAPlatform) -> None:
    assert platform.dtypes("cuda:0") == [torch.bfloat16, torch.float16, torch.float32]
    assert platform.dtypes("cuda:1") == [torch.float16, torch.float32]


def test_an_unknown_device_is_refused(platform: CUDAPlatform) -> None:
    with pytest.raises(UnknownNameError, match=r"'cuda:2'.*'cuda:0', 'cuda:1'"):
        platform.capability("cuda:2")


def test_facts_describe_the_devices(
    platform: CUDAPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    facts = platform.facts()
    assert facts["CUDA_VISIBLE_DEVICES"] == "'0,1'"
    assert facts["driver"].endswith("serves CUDA up to 12.8")
    assert facts["cuda:0"] == (
        "NVIDIA H100 80GB HBM3, sm_90, 132 multiprocessors, 79.6 GiB at 3352 GB/s, uuid, "
        "reaches cuda:1, its compute mode is for one process"
    )


def test_numerics_set_the_library_switches(platform: CUDAPlatform) -> None:
    matmul = torch.backends.cuda.matmul
    with platform.numerics(NumericsPolicy(reduce_in_16_bits=False)):
        assert not matmul.allow_fp16_reduced_precision_reduction
        assert not matmul.allow_bf16_reduced_precision_reduction
    assert matmul.allow_fp16_reduced_precision_reduction
    assert matmul.allow_bf16_reduced_precision_reduction


def test_backend_names_equal_torch(platform: CUDAPlatform) -> None:
    assert platform.distributed_backend() == "nccl"
    assert platform.compile_backend() == "inductor"
    assert platform.start_method() == "spawn"


@pytest.mark.process
@without_gpu
def test_without_a_driver_there_is_no_device() -> None:
    with pytest.raises(PluginError, match=r"CUDA's driver lists no device: .*libcuda\.so\.1"):
        CUDAPlatform().devices()


def test_a_compiled_step_is_not_captured(platform: CUDAPlatform) -> None:
    step = torch.compile(partial(torch.zeros, 1), backend="eager")
    with pytest.raises(ConfigError, match=r"compiled by torch\.compile, which may capture graphs"):
        platform.capture_graph(step)


def test_unpinned_memory_cannot_be_mapped() -> None:
    with pytest.raises(ConfigError, match="this tensor is on cpu and not pinned"):
        device_view(torch.zeros(4))
