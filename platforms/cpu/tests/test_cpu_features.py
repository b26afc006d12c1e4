import platform
from pathlib import Path

import pytest
import torch

from interposer_cpu._features import (
    architecture,
    features,
    formats,
    reported_by_os,
    reported_by_torch,
)

CPUINFO = Path("/proc/cpuinfo")
ARM = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd aes atomics fphp asimdhp asimdrdm asimddp sve svei8mm svebf16 i8mm bf16
CPU part\t: 0xd4f
"""
Z = """vendor_id       : IBM/S390
features\t: esan3 zarch stfle msa ldisp eimm dfp highgprs te vx vxd vxe gs vxe2 vxp sort nnpa sie
processor 0: version = 00,  identification = 0133E8,  machine = 3931
"""


def cpuinfo(folder: Path, text: str) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(text)
    return folder


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.exists(), reason="x86 Linux")
def test_features_agree_with_cpuinfo() -> None:
    line = next(line for line in CPUINFO.read_text().splitlines() if line.startswith("flags"))
    flags = set(line.partition(":")[2].split())
    shared = {"avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
    shared |= {"avx512_vnni", "amx_bf16", "amx_int8", "sse4_2", "popcnt", "bmi1", "bmi2"}
    assert features() & shared == flags & shared
    assert ("sse3" in features()) == ("pni" in flags)


@pytest.mark.skipif(not CPUINFO.exists(), reason="needs /proc/cpuinfo")
def test_linux_and_torch_features_have_the_same_names() -> None:
    by_torch = reported_by_torch(torch.cpu.get_capabilities())
    assert by_torch <= reported_by_os()


def test_torch_names_become_standard_names() -> None:
    reported = {"avx512_f": True, "fma3": True, "avx2": False, "l2_cache_size": 1, "neon": True}
    reported["avx10_1"] = True
    assert reported_by_torch(reported) == {"avx512f", "fma", "neon"}


def test_arm_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    names = reported_by_os(cpuinfo(tmp_path, ARM))
    assert {"neon", "bf16", "i8mm", "dotprod", "fp16", "sve", "sve_bf16", "sve_i8mm"} <= names
    assert formats(names) == {"float32", "bfloat16", "float16", "int8"}


def test_s390x_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    names = reported_by_os(cpuinfo(tmp_path, Z))
    assert names == {"vx", "vxd", "vxe", "vxe2", "vxp", "nnpa"}
    assert formats(names) == {"float32"}


def test_a_system_without_cpuinfo_reports_the_features_of_torch(tmp_path: Path) -> None:
    assert reported_by_os(tmp_path) == frozenset()
    assert features(tmp_path) == reported_by_torch(torch.cpu.get_capabilities())


@pytest.mark.parametrize(("machine", "expected"), [("AMD64", "x86_64"), ("arm64", "aarch64")])
def test_architecture_has_one_name_on_all_systems(
    monkeypatch: pytest.MonkeyPatch, machine: str, expected: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert architecture() == expected
