"""Tests on an NVIDIA GPU: graphs, memory, mapping, and conformance of all declared kernels.

On an H200 all tests passed except the fork test, whose cause has been fixed since.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from interposer import AttentionSpec, Config, Resolver, Site, current_registry, place
from interposer_cuda._flash_attention.version_2 import FlashAttention2Backend
from interposer_cuda._platform import CUDAPlatform
from interposer_ops.attention import FlexBackend
from interposer_testing import TrialGroup, attention_specs, check_attention

FOUND = CUDAPlatform.probe()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not FOUND, reason=f"needs a GPU of NVIDIA: {FOUND.reason}"),
]


@pytest.fixture(scope="module")
def platform() -> CUDAPlatform:
    return CUDAPlatform()


@pytest.mark.conformance("interposer-cuda")
def test_conformance(trial: TrialGroup) -> None:
    trial.verify()


def test_it_is_chosen() -> None:
    placement = place(Config())
    assert placement.platform.name == "cuda"
    assert placement.device.torch_device == "cuda:0"


def test_devices_are_those_of_torch(platform: CUDAPlatform) -> None:
    devices = platform.devices()
    assert len(devices) == torch.cuda.device_count()
    for ordinal, device in enumerate(devices):
        properties = torch.cuda.get_device_properties(ordinal)
        assert device.name == properties.name
        assert device.capability.architecture == f"sm_{properties.major}{properties.minor}"
        assert device.capability.units == properties.multi_processor_count
        assert device.capability.memory_bytes == properties.total_memory
        assert device.capability.caches_bytes["l2"] == properties.L2_cache_size


def test_a_graph_replays_on_other_numbers(platform: CUDAPlatform) -> None:
    given = torch.zeros(1024, device="cuda")

    def step(factor: float) -> torch.Tensor:
        return given * factor + 1

    replays = [platform.capture_graph(partial(step, factor)) for factor in (2.0, 3.0)]
    for number in (5.0, 7.0):
        given.fill_(number)
        for factor, replay in zip((2.0, 3.0), replays, strict=True):
            found = replay()
            platform.synchronize("cuda:0")
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, torch.full_like(given, number * factor + 1))


def test_memory_is_told_apart(platform: CUDAPlatform) -> None:
    with platform.memory_profile("cuda:0") as profile:
        kept = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert profile.torch_bytes >= kept.numel()
    assert profile.after.total_bytes == platform.memory("cuda:0").total_bytes
    assert platform.peak_memory_bytes("cuda:0") >= kept.numel()
    assert 0 < profile.room_bytes() < profile.after.total_bytes


def spec_and_site(platform: CUDAPlatform, label: str) -> tuple[AttentionSpec, Site]:
    found = dict(attention_specs())
    spec = replace(found[label], dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    resolver = Resolver(current_registry(Config()), platform.devices()[0], Config())
    return spec, Site(resolver, "attention", spec.dtype)


def test_flex_attention_is_no_graph_whatever_is_set(platform: CUDAPlatform) -> None:
    spec, site = spec_and_site(platform, "GQA window+softcap head 64 page 16")
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert check_attention(FlexBackend, spec, site) == []


def test_flash_attention_2_reads_large_pages(platform: CUDAPlatform) -> None:
    spec, site = spec_and_site(platform, "GQA window+softcap head 64 page 16")
    large = replace(spec, page_size=256)
    verdict = FlashAttention2Backend.accepts(large, platform.capability("cuda:0"))
    if not verdict:
        pytest.skip(verdict.reason)
    assert check_attention(FlashAttention2Backend, large, site) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_host_memory_is_read_where_it_lies(platform: CUDAPlatform, dtype: torch.dtype) -> None:
    host = platform.pin_memory(torch.arange(12).view(3, 4).to(dtype))
    view = platform.map_host_memory(host.T)
    assert view.device.type == "cuda"
    assert view.data_ptr() == host.data_ptr()
    assert torch.equal(view.float().cpu(), host.T.float())


def test_a_stream_of_its_own_is_used(platform: CUDAPlatform) -> None:
    outside = torch.cuda.current_stream()
    with platform.stream("cuda:0"):
        assert torch.cuda.current_stream() != outside
    assert torch.cuda.current_stream() == outside


def test_a_process_that_chose_the_platform_can_be_forked() -> None:
    """Choose and list devices in a new process, then fork it and compute in the fork."""
    program = """
import os, torch
from interposer import Config, place
assert place(Config(platform="cuda")).platform.name == "cuda"
assert not torch.cuda.is_initialized()
child = os.fork()
if not child:
    os._exit(0 if float(torch.ones(4, device="cuda").sum()) == 4 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert done.returncode == 0
