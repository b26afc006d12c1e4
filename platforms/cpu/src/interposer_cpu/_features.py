"""Names of instruction sets, one per feature whichever source reports it.

The names are those of Linux, except where Linux keeps a historic one (``pni`` is ``sse3``).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import torch

_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_OTHER_NAMES = {
    # x86, as Linux says it
    "pni": "sse3",
    "abm": "lzcnt",
    "sha_ni": "sha",
    # x86, as torch says it
    "fma3": "fma",
    "bmi": "bmi1",
    "avx512_f": "avx512f",
    "avx512_bw": "avx512bw",
    "avx512_cd": "avx512cd",
    "avx512_dq": "avx512dq",
    "avx512_vl": "avx512vl",
    "avx512_ifma": "avx512ifma",
    "avx512_vbmi": "avx512vbmi",
    # ARM, as Linux says it
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fp16",
    "asimdfhm": "fhm",
    "asimdrdm": "rdm",
    "svebf16": "sve_bf16",
    "svei8mm": "sve_i8mm",
    # ARM, as torch says it
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
# Versions, which torch counts as features and Linux does not; what they hold is told by itself.
_VERSIONS = ("avx10_",)
_FORMATS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "fp16"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "dotprod", "i8mm"},
}


def architecture() -> str:
    """Return the architecture by its Linux name, such as ``"x86_64"`` or ``"s390x"``."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


def features(root: Path = Path("/")) -> frozenset[str]:
    """Return what the system or torch reports; ``root`` is where ``proc`` lies."""
    return reported_by_os(root) | reported_by_torch(torch.cpu.get_capabilities())


def reported_by_os(root: Path = Path("/")) -> frozenset[str]:
    """Return the features of ``/proc/cpuinfo``; none where there is no such file."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, words = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return _known(words.lower().split())
    return frozenset()


def reported_by_torch(capabilities: Mapping[str, object]) -> frozenset[str]:
    """Return the features of ``torch.cpu.get_capabilities()``."""
    return _known([name.lower() for name, value in capabilities.items() if value is True])


def formats(found: frozenset[str]) -> frozenset[str]:
    """Return the number formats in which the features ``found`` compute."""
    return frozenset({"float32"} | {name for name, any_of in _FORMATS.items() if any_of & found})


def _known(names: list[str]) -> frozenset[str]:
    standard = (_OTHER_NAMES.get(n, n) for n in names if not n.startswith(_VERSIONS))
    return frozenset(n for n in standard if n in _EXACT or n.startswith(_FAMILIES))
