"""Instruction-set features of the processor, under one name whether Linux or torch reports them.

The names are those of Linux, except for historic ones (``pni`` is called ``sse3``).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_OTHER_NAMES = {
    # x86, names in Linux
    "pni": "sse3",
    "abm": "lzcnt",
    "sha_ni": "sha",
    # x86, names in torch
    "fma3": "fma",
    "bmi": "bmi1",
    "avx512_f": "avx512f",
    "avx512_bw": "avx512bw",
    "avx512_cd": "avx512cd",
    "avx512_dq": "avx512dq",
    "avx512_vl": "avx512vl",
    "avx512_ifma": "avx512ifma",
    "avx512_vbmi": "avx512vbmi",
    # ARM, names in Linux
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fp16",
    "asimdfhm": "fhm",
    "asimdrdm": "rdm",
    "svebf16": "sve_bf16",
    "svei8mm": "sve_i8mm",
    # ARM, names in torch
    "dot": "dotprod",
    "fp16_arith": "fp16",
}
_X86 = ("aes", "bmi1", "bmi2", "f16c", "fma", "gfni", "lzcnt", "popcnt", "sha", "ssse3", "vaes")
_ARM = (
    "bf16",
    "dotprod",
    "fhm",
    "fp16",
    "i8mm",
    "neon",
    "rdm",
    "sme",
    "sme2",
    "sve",
    "sve2",
    "sve_bf16",
    "sve_i8mm",
)
_Z = ("nnpa", "vx", "vxd", "vxe", "vxe2", "vxe3", "vxp", "vxp2")
_EXACT = frozenset({*_X86, *_ARM, *_Z})
_FAMILIES = ("amx_", "avx", "sse")
# Torch reports AVX10 versions as features, Linux does not. Dropped: the instruction sets in a
# version are also reported one by one.
_VERSIONS = ("avx10_",)
_FORMATS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "fp16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "dotprod", "i8mm"},
}


def architecture() -> str:
    """Name the architecture as Linux does, such as ``"x86_64"`` or ``"s390x"``."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


def features(root: Path = Path("/")) -> frozenset[str]:
    """List all features that the system or torch reports; ``root`` contains ``proc``."""
    return reported_by_os(root) | reported_by_torch(torch.cpu.get_capabilities())


def reported_by_os(root: Path = Path("/")) -> frozenset[str]:
    """List the features in ``/proc/cpuinfo``; empty without that file."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, names = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return _standardize(names.lower().split())
    return frozenset()


def reported_by_torch(capabilities: Mapping[str, object]) -> frozenset[str]:
    """List the features in the result of ``torch.cpu.get_capabilities()``."""
    return _standardize([name.lower() for name, value in capabilities.items() if value is True])


def formats(features: frozenset[str]) -> frozenset[str]:
    """List the number formats that ``features`` have arithmetic instructions for."""
    return frozenset({"float32"} | {name for name, any_of in _FORMATS.items() if any_of & features})


def _standardize(names: list[str]) -> frozenset[str]:
    standard = (_OTHER_NAMES.get(n, n) for n in names if not n.startswith(_VERSIONS))
    return frozenset(n for n in standard if n in _EXACT or n.startswith(_FAMILIES))
