import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interposer import Capability, Config, Device, Platform, Verdict, place
from interposer.errors import MissingMemberError
from interposer_cpu import host
from interposer_cpu.platform import CPUPlatform

PROVIDED = {
    "peak_memory_bytes",
    "numa_nodes",
    "bind_threads",
    "num_threads",
    "distributed_backend",
    "compile_backend",
}
BIND = """
import json, os, sys
import torch
from interposer_cpu.platform import CPUPlatform

torch.set_num_threads(2)
torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # starts the pool of threads
platform = CPUPlatform()
verdict = platform.bind_threads(json.loads(sys.argv[1]))
affinities = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
print(json.dumps([verdict.accepted, verdict.reason, sorted(affinities), platform.num_threads()]))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's thread affinity")


def bind(processors: list[int]) -> tuple[bool, str, list[list[int]], int]:
    arguments = [sys.executable, "-c", BIND, json.dumps(processors)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    accepted, reason, affinities, num_threads = json.loads(done.stdout)
    return accepted, reason, affinities, num_threads


def test_the_plugin_is_found_and_placed() -> None:
    placement = place(Config(platform="cpu"))
    assert isinstance(placement.platform, CPUPlatform)
    assert placement.device.torch_device == "cpu"


def test_probe_accepts_and_names_the_processor() -> None:
    verdict = CPUPlatform.probe()
    assert verdict
    assert host.processor_name() in verdict.reason


def test_there_is_one_device_and_tensors_go_there() -> None:
    (device,) = CPUPlatform().devices()
    assert isinstance(device, Device)
    assert torch.ones(1, device=device.torch_device).device.type == CPUPlatform.device_type
    assert device.capability == CPUPlatform().capability("cpu")


def test_capability_is_within_what_this_process_may_use() -> None:
    capability = CPUPlatform().capability("cpu")
    assert isinstance(capability, Capability)
    assert 1 <= capability.units <= len(host.allowed_processors())
    assert capability.memory_bytes == CPUPlatform().memory("cpu").total_bytes
    assert "float32" in capability.formats
    assert all(feature == feature.lower() for feature in capability.features)


def test_dtypes_have_hardware_arithmetic() -> None:
    platform = CPUPlatform()
    names = [str(dtype).removeprefix("torch.") for dtype in platform.dtypes("cpu")]
    formats = platform.capability("cpu").formats
    assert names == [n for n in ("bfloat16", "float32", "float16") if n in formats]


def test_memory_figures_are_sane() -> None:
    platform = CPUPlatform()
    memory = platform.memory("cpu")
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert 1 << 20 < platform.peak_memory_bytes("cpu") < 1 << 50


def test_peak_memory_counts_bytes() -> None:
    block = torch.ones(1 << 24)  # 64 MiB, touched
    assert CPUPlatform().peak_memory_bytes("cpu") > block.nbytes


def test_seed_repeats_random_numbers() -> None:
    platform = CPUPlatform()
    platform.seed(3)
    first = torch.rand(4)
    platform.synchronize("cpu")
    platform.seed(3)
    assert torch.equal(first, torch.rand(4))


def test_optional_members_are_the_declared_ones() -> None:
    assert {m for m in Platform.optional_members() if CPUPlatform.provides(m)} == PROVIDED
    with pytest.raises(MissingMemberError, match="pin_memory"):
        CPUPlatform().pin_memory(torch.ones(1))


def test_threads_numa_and_backends() -> None:
    platform = CPUPlatform()
    assert platform.num_threads() == torch.get_num_threads()
    processors = {p for node in platform.numa_nodes().values() for p in node}
    assert processors >= set(host.allowed_processors())
    assert torch.distributed.is_backend_available(platform.distributed_backend())
    assert platform.compile_backend() in torch.compiler.list_backends()


@linux
def test_binding_reaches_every_thread() -> None:
    target = host.allowed_processors()[-1]
    accepted, reason, affinities, num_threads = bind([target])
    assert accepted, reason
    assert affinities == [[target]]
    assert num_threads == 1


@linux
@pytest.mark.parametrize("extra", [[100_000], [-1], [1 << 80]])
def test_denied_processors_are_a_refusal_that_changes_nothing(extra: list[int]) -> None:
    before = host.allowed_processors()
    accepted, reason, affinities, num_threads = bind([before[0], *extra])
    assert not accepted
    assert str(extra[0]) in reason
    assert affinities == [before]
    assert num_threads == 2


def test_binding_to_nothing_is_refused() -> None:
    assert "no processors" in CPUPlatform().bind_threads([]).reason


def test_a_system_that_cannot_bind_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    verdict = CPUPlatform().bind_threads([0])
    assert isinstance(verdict, Verdict)
    assert "cannot bind" in verdict.reason


def test_the_plugin_module_imports_no_torch() -> None:
    script = (
        "import sys, interposer_cpu.plugin as plugin\n"
        "assert len(plugin.interposer_records()) > 2\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=Path.home()
    )
    assert done.stdout.strip() == "False"
