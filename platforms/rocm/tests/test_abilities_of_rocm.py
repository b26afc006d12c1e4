"""Features of a device follow from its architecture and from the driver's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from platforms.rocm.tests.fake_machine import Machine, Node

from interposer import NumericsPolicy
from interposer.errors import ConfigError, PluginError, UnknownNameError
from interposer_rocm._hardware import system
from interposer_rocm._hardware.architectures import KNOWN, GfxVersion, architecture_of
from interposer_rocm._hardware.topology import capability_of
from interposer_rocm._hardware.torch_build import TorchBuild
from interposer_rocm._platform import ROCmPlatform


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (90006, "gfx906"),
        (90008, "gfx908"),
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (110003, "gfx1103"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_numbers_and_names_give_the_same_version(number: int, name: str) -> None:
    version = GfxVersion.of_number(number)
    assert str(version) == name
    assert GfxVersion.of_name(f"{name}:sramecc+:xnack-") == version
    assert name in KNOWN


@pytest.mark.parametrize("name", ["sm_90", "gfx", "gfx9", "gfx9-4-generic", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="does not name an architecture"):
        GfxVersion.of_name(name)


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("gfx908", {"mfma", "wave64", "cdna1", "triton"}, {"wmma", "cdna2"}),
        ("gfx90a", {"mfma", "wave64", "cdna2", "triton"}, {"fp8_fnuz", "fp8_ocp"}),
        ("gfx942", {"mfma", "wave64", "cdna3", "fp8_fnuz", "triton"}, {"fp8_ocp"}),
        ("gfx950", {"mfma", "wave64", "cdna4", "fp8_ocp", "triton"}, {"fp8_fnuz"}),
        ("gfx1030", {"wave32", "rdna2"}, {"wmma", "mfma", "triton"}),
        ("gfx1100", {"wave32", "wmma", "rdna3"}, {"mfma", "fp8_ocp"}),
        ("gfx1151", {"wave32", "wmma", "rdna3"}, {"fp8_ocp"}),
        ("gfx1201", {"wave32", "wmma", "rdna4", "fp8_ocp"}, {"fp8_fnuz"}),
    ],
)
def test_features_of_an_architecture(name: str, has: set[str], lacks: set[str]) -> None:
    features = architecture_of(GfxVersion.of_name(name)).features
    assert has <= features
    assert not lacks & features


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_no_architecture_has_both_kinds_of_8_bit_floats(name: str) -> None:
    known = architecture_of(GfxVersion.of_name(name))
    fnuz = {fmt for fmt in known.formats if fmt.endswith("fnuz")}
    ocp = {fmt for fmt in known.formats if fmt in ("float8_e4m3fn", "float8_e5m2")}
    assert len(fnuz) in (0, 2)
    assert len(ocp) in (0, 2)
    assert not (fnuz and ocp)
    assert ("mfma" in known.features) <= ("wave64" in known.features)
    assert ("wmma" in known.features) <= ("wave32" in known.features)
    assert all(hasattr(torch, dtype) for dtype in known.dtypes)


def test_an_unknown_version_has_common_features_only() -> None:
    unknown = architecture_of(GfxVersion.of_name("gfx1250"))
    assert unknown.features == {"wave32"}
    assert unknown.formats == {"float32", "float16"}


def test_driver_files_complete_the_capability(tmp_path: Path) -> None:
    xgmi, pcie, processor = 11, 2, 0
    machine = Machine(tmp_path).gpus(
        Node(links={processor: pcie, 2: xgmi}), Node(90500, lds_kib=160, links={1: xgmi})
    )
    mi300, mi350 = system.read_system(machine.root).topology.gpus
    assert (mi300.units, mi300.l2_bytes, mi300.peers) == (304, 32 * 2**20, (2,))
    found = capability_of(mi300, frozenset({1, 2}))
    assert found.architecture == "gfx942"
    assert {"bandwidth_4t", "p2p", "xgmi"} <= found.features
    assert "bandwidth_7t" not in found.features  # 5325 GB/s
    assert found.memory_bytes == 192 * 2**30
    assert found.caches_bytes == {"l2": 32 * 2**20, "lds": 65536}
    # A peer that this process does not see is none.
    assert not {"p2p", "xgmi"} & capability_of(mi300, frozenset({1})).features
    assert capability_of(mi350).caches_bytes["lds"] == 163840


def test_system_memory_does_not_count_as_gpu_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path).gpus(Node(110501, heap=0, memory_mhz=8000, memory_bits=256))
    (gpu,) = system.read_system(machine.root).topology.gpus
    assert gpu.memory_bytes == 0
    assert not {name for name in capability_of(gpu).features if name.startswith("bandwidth")}


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ROCmPlatform:
    machine = Machine(tmp_path).gpus(
        Node(links={2: 11}, unique_id=0xABC), Node(100300, simds=120, simds_per_unit=2)
    )
    seen = system.read_system(machine.root)
    monkeypatch.setattr(system, "read_system", lambda: seen)
    build = TorchBuild("2.13.0+rocm7.0", hip="7.0")
    monkeypatch.setattr(TorchBuild, "installed", lambda: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return ROCmPlatform()


def test_the_platform_provides_its_services() -> None:
    provided = {m for m in ROCmPlatform.optional_members() if ROCmPlatform.provides(m)}
    assert provided == {
        *("capture_graph", "compile_backend", "distributed_backend", "facts", "memory_profile"),
        *("peak_memory_bytes", "pin_memory", "start_method", "stream"),
    }


def test_numerics_set_the_library_switches() -> None:
    matmul = torch.backends.cuda.matmul  # its name in torch for HIP too
    with ROCmPlatform().numerics(NumericsPolicy("high")):
        assert torch.get_float32_matmul_precision() == "high"
        assert not matmul.allow_bf16_reduced_precision_reduction
    assert matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("hip", "accepted"), [("", True), ("6.4.43482", False), ("7.0.0", True), ("10.1", True)]
)
def test_graphs_need_a_hip_that_reports_capture_errors(
    hip: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TorchBuild("2.11.0", hip=hip)
    monkeypatch.setattr(TorchBuild, "installed", lambda: build)
    verdict = ROCmPlatform.provides("capture_graph")
    assert verdict.accepted == accepted
    if not accepted:
        assert verdict.reason.endswith("replays what it read then. Graphs need HIP 7.0 or newer")
        with pytest.raises(ConfigError, match="captures a step that waits for the host"):
            ROCmPlatform().capture_graph(lambda: None)


def test_devices_are_in_the_order_of_hip(platform: ROCmPlatform) -> None:
    assert platform.probe()
    devices = platform.devices()
    assert [(d.platform, d.torch_device, d.name) for d in devices] == [
        ("rocm", "cuda:0", "AMD gfx942"),
        ("rocm", "cuda:1", "AMD gfx1030"),
    ]
    assert platform.capability("cuda") == platform.capability("cuda:0") == devices[0].capability
    assert platform.capability("cuda:1").units == 60
    assert platform.dtypes("cuda:0")[0] == torch.bfloat16
    assert platform.dtypes("cuda:1") == [torch.float16, torch.float32]
    with pytest.raises(UnknownNameError, match=r"'cuda:2'.*'cuda:0', 'cuda:1'"):
        platform.dtypes("cuda:2")


def test_facts_describe_the_devices(
    platform: ROCmPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    facts = platform.facts()
    assert facts["torch"] == "2.13.0+rocm7.0, for HIP 7.0"
    assert facts["ROCR_VISIBLE_DEVICES"] == "'0,1'"
    assert facts["cuda:0"] == (
        "AMD gfx942, gfx942 (CDNA 3), 304 compute units, 192.0 GiB at 5325 GB/s, "
        "GPU-0000000000000abc, reaches nodes 2 by xGMI"
    )


def test_hidden_gpus_are_an_error_once_the_platform_is_selected(
    platform: ROCmPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "9")
    with pytest.raises(PluginError, match="there is no GPU 9, the last is 1"):
        platform.devices()


def test_backend_names_equal_torch(platform: ROCmPlatform) -> None:
    assert platform.distributed_backend() == "nccl"
    assert platform.compile_backend() == "inductor"
    assert platform.start_method() == "spawn"
