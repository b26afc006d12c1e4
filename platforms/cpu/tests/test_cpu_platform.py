import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.forks import forks
from tests.waiting import WAIT_SECONDS

from interposer import Capability, Config, Device, Platform, Verdict, place
from interposer.errors import MissingMemberError
from interposer_cpu import _host as host
from interposer_cpu import native
from interposer_cpu._features import architecture
from interposer_cpu._platform import CPUPlatform

PROVIDED = {
    "memory_profile",
    "peak_memory_bytes",
    "numa_nodes",
    "cores",
    "bind_threads",
    "num_threads",
    "start_method",
    "facts",
    "distributed_backend",
    "compile_backend",
}
# Refusals come first, so that one process shows that they change nothing.
BIND = """
import json, os, sys
import torch
from interposer_cpu._platform import CPUPlatform

torch.set_num_threads(2)
torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # starts the pool of threads
platform = CPUPlatform()
found = []
for processors in json.loads(sys.argv[1]):
    verdict = platform.bind_threads(processors)
    every = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
    found.append([verdict.accepted, verdict.reason, sorted(every), platform.num_threads()])
print(json.dumps(found))
"""
# A process that may use some processors only binds its threads by the public function.
BIND_CORES = """
import json, os, sys
allowed, every = json.loads(sys.argv[1])
os.sched_setaffinity(0, allowed)
import interposer
from interposer.errors import ConfigError
from interposer_ops.devices.threads import bind_threads
found = []
for settings in every:
    os.sched_setaffinity(0, allowed)
    try:
        verdict = bind_threads(config=interposer.Config(platform="cpu"), **settings)
        said = [verdict.accepted, verdict.reason]
    except ConfigError as error:
        said = ["ConfigError", str(error)]
    found.append([*said, sorted(os.sched_getaffinity(0))])
print(json.dumps(found))
"""
# A processor of the first level of its architecture, with and without the compiled library.
OLD = """
import json, sys
present, features = json.loads(sys.argv[2])
if not present:
    sys.modules["interposer_cpu._native"] = None
from interposer import Capability
from interposer_cpu._platform import CPUPlatform

class Old(CPUPlatform):
    def capability(self, device):
        return Capability(sys.argv[1], frozenset(features), frozenset({"float32"}))

print(*Old().dtypes("cpu"))
"""
REDUCE = """
import sys
import torch
import torch.distributed as distributed
from interposer_cpu._platform import CPUPlatform

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group(
    CPUPlatform().distributed_backend(), init_method=f"file://{store}", rank=rank, world_size=2
)
part = torch.arange(1000.0) * (rank + 1)
distributed.all_reduce(part)
assert torch.equal(part, torch.arange(1000.0) * 3), part
distributed.barrier()
distributed.destroy_process_group()
print("reduced")
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's thread affinity")


def bind(*every: list[int]) -> list[tuple[bool, str, list[list[int]], int]]:
    """Return the result of each binding: acceptance, reason, affinities and thread count."""
    done = forks().run("-c", BIND, json.dumps(every), check=True)
    return [tuple(found) for found in json.loads(done.stdout)]


def test_the_plugin_is_found_and_placed() -> None:
    placement = place(Config(platform="cpu"))
    assert isinstance(placement.platform, CPUPlatform)
    assert placement.device.torch_device == "cpu"


def test_probe_accepts_and_names_the_processor() -> None:
    verdict = CPUPlatform.probe()
    assert verdict
    assert host.processor_name() in verdict.reason


def test_the_platform_has_one_device_for_tensors() -> None:
    (device,) = CPUPlatform().devices()
    assert isinstance(device, Device)
    assert torch.ones(1, device=device.torch_device).device.type == CPUPlatform.device_type
    assert device.capability == CPUPlatform().capability("cpu")


def test_capability_is_limited_to_the_processors_of_this_process() -> None:
    capability = CPUPlatform().capability("cpu")
    assert isinstance(capability, Capability)
    assert 1 <= capability.units <= len(host.allowed_processors())
    assert capability.memory_bytes == CPUPlatform().memory("cpu").total_bytes
    assert "float32" in capability.formats
    assert all(feature == feature.lower() for feature in capability.features)


def test_offered_dtypes_have_hardware_arithmetic() -> None:
    platform = CPUPlatform()
    names = [str(dtype).removeprefix("torch.") for dtype in platform.dtypes("cpu")]
    formats = platform.capability("cpu").formats
    assert names[0] == ("bfloat16" if "bfloat16" in formats else "float32")
    assert ("float16" in names) == ("float16" in formats)
    assert "bfloat16" in names or native.why_absent()


@pytest.mark.landing(1)
@pytest.mark.process
@pytest.mark.parametrize("present", [True, False])
def test_bfloat16_needs_native_kernels_where_the_hardware_has_none(present: bool) -> None:
    lowest = sorted(next(iter(native.NEEDS[architecture()].values())))
    done = forks().run("-c", OLD, architecture(), json.dumps([present, lowest]), check=True)
    widened = ["torch.bfloat16"] if present and not native.why_absent() else []
    assert done.stdout.split() == ["torch.float32", *widened]


def test_free_memory_is_at_most_total_memory() -> None:
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


def test_thread_count_numa_nodes_and_backends_are_reported() -> None:
    platform = CPUPlatform()
    assert platform.num_threads() == torch.get_num_threads()
    processors = {p for node in platform.numa_nodes().values() for p in node}
    assert processors >= set(host.allowed_processors())
    assert torch.distributed.is_backend_available(platform.distributed_backend())
    assert platform.compile_backend() in torch.compiler.list_backends()


@pytest.mark.process
@linux
def test_binding_reaches_every_thread_and_a_refusal_none() -> None:
    before = host.allowed_processors()
    denied = [100_000, -1, 1 << 80]
    *refused, bound = bind(*([before[0], number] for number in denied), before[-1:])
    for number, (accepted, reason, affinities, num_threads) in zip(denied, refused, strict=True):
        assert not accepted
        assert str(number) in reason
        assert affinities == [before]
        assert num_threads == 2
    accepted, reason, affinities, num_threads = bound
    assert accepted, reason
    assert affinities == [before[-1:]]
    assert num_threads == 1


def bind_cores(allowed: list[int], *settings: dict[str, object]) -> list[list[object]]:
    """Return the result of each binding: acceptance, reason, and the affinity after it."""
    done = forks().run("-c", BIND_CORES, json.dumps([allowed, settings]), check=True)
    found: list[list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.process
@linux
def test_all_cores_but_the_reserved_ones_are_bound() -> None:
    cores = host.cores()
    firsts = [core[0] for core in cores]
    allowed = host.allowed_processors()
    node, of_node = next((n, own) for n, own in host.numa_nodes().items() if firsts[0] in own)
    plain, near, shared, fewer = bind_cores(
        allowed, {}, {"node": node}, {"siblings": True}, {"reserve": len(firsts) - 1}
    )
    assert plain == [True, f"bound to processors {firsts}", firsts]
    assert near[2] == [p for p in firsts if p in of_node]
    assert shared[2] == allowed
    assert fewer[2] == firsts[-1:]


@pytest.mark.slow
@pytest.mark.process
@linux
def test_threads_are_bound_only_to_allowed_processors() -> None:
    last = host.allowed_processors()[-1]
    bound, (raised, reason, affinity) = bind_cores([last], {}, {"reserve": 1})
    assert bound[::2] == [True, [last]]
    assert raised == "ConfigError"
    assert "this process may use 1 cores" in str(reason)
    assert "Try: reserve=0" in str(reason)
    assert affinity == [last]


@pytest.mark.process
def test_two_processes_reduce_by_the_distributed_backend(tmp_path: Path) -> None:
    both = [
        subprocess.Popen(
            forks().command("-c", REDUCE, str(rank), tmp_path / "store"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=WAIT_SECONDS) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [out.strip() for out, _ in ends] == ["reduced"] * 2, ends


def test_binding_to_nothing_is_refused() -> None:
    assert "no processors" in CPUPlatform().bind_threads([]).reason


def test_a_system_that_cannot_bind_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    verdict = CPUPlatform().bind_threads([0])
    assert isinstance(verdict, Verdict)
    assert "cannot bind" in verdict.reason


@pytest.mark.process
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
