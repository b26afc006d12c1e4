"""Features of architectures, by the version of their graphics.

A version is packed as 10 bits of architecture, 8 of release and 14 of revision, of which the
first two decide.

Source: the list of versions in Intel's compute runtime, and the extension "device architecture"
of DPC++, whose names are taken without ``intel_gpu_``; oneAPI GPU Optimization Guide, chapter
"Intel Xe GPU architecture" (vector engines, matrix extensions and their formats); the tables of
DPC++'s extension "joint matrix" (lanes and formats by architecture); the SPIR-V extension
SPV_INTEL_2d_block_io.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of all devices of one version of graphics.

    Attributes:
        name: such as ``"bmg_g21"``.
        family: such as ``"Xe2-HPG"``.
        features: instructions and units.
        formats: of numbers with arithmetic in hardware.
        dtypes: by torch name, that models may be run in, the preferred one first.
        shared_bytes: local memory that one work-group may have.
        computes: torch has kernels for it.
    """

    name: str
    family: str
    features: frozenset[str]
    formats: frozenset[str]
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    shared_bytes: int = 128 * 1024
    computes: bool = True


_PLAIN = frozenset({"float32", "float16", "int8"})
# Matrix extensions multiply these; 8-bit floats are converted to 16 bits first on all of them.
_XMX = _PLAIN | {"bfloat16", "int4"}
_XMX_TF32 = _XMX | {"tf32"}
_SYSTOLIC = frozenset({"dpas", "dpas_8"})
_SYSTOLIC_WIDE = frozenset({"dpas", "dpas_16", "block_2d_io", "float64"})

_HPG = ("Xe-HPG", _SYSTOLIC, _XMX)
_LPG = ("Xe-LPG", frozenset[str](), _PLAIN)
_HPC = ("Xe-HPC", _SYSTOLIC_WIDE | {"xe_hpc"}, _XMX_TF32 - {"int4"})
_XE2 = _SYSTOLIC_WIDE | {"xe2"}
_XE3 = _SYSTOLIC_WIDE | {"xe3"}

_OF = {
    (12, 55): ("acm_g10", *_HPG),
    (12, 56): ("acm_g11", *_HPG),
    (12, 57): ("acm_g12", *_HPG),
    (12, 60): ("pvc", *_HPC),
    (12, 61): ("pvc_vg", *_HPC),
    (12, 70): ("mtl_u", *_LPG),
    (12, 71): ("mtl_h", *_LPG),
    (12, 74): ("arl_h", "Xe-LPG+", _SYSTOLIC, _XMX),
    (20, 1): ("bmg_g21", "Xe2-HPG", _XE2, _XMX_TF32),
    (20, 2): ("bmg_g31", "Xe2-HPG", _XE2, _XMX_TF32),
    (20, 4): ("lnl_m", "Xe2-LPG", _XE2, _XMX_TF32),
    (30, 0): ("ptl_h", "Xe3-LPG", _XE3, _XMX_TF32),
    (30, 1): ("ptl_u", "Xe3-LPG", _XE3, _XMX_TF32),
}
_TABLE = {version: Architecture(*row) for version, row in _OF.items()}
_UNSAID = Architecture("unknown", "unknown", frozenset(), _PLAIN, shared_bytes=64 * 1024)
_OLDER = Architecture(
    "older", "before Xe-HPG", frozenset(), _PLAIN, ("float16", "float32"), 64 * 1024, False
)


def packed(architecture: int, release: int, revision: int = 0) -> int:
    """Return a version as drivers tell it."""
    return architecture << 22 | release << 14 | revision


def architecture_of(ip_version: int) -> Architecture:
    """Return what is known of a version.

    Of one that is newer than the table, what those of Xe2 and newer share, without what is tied
    to one of them; of one that lies between, what needs no matrix extensions.
    """
    version = ip_version >> 22, ip_version >> 14 & 0xFF
    if version in _TABLE:
        return _TABLE[version]
    if not ip_version:
        return _UNSAID
    if version < min(_TABLE):
        return _OLDER
    name = f"xe_{version[0]}_{version[1]}"
    if version < (20, 0):
        return Architecture(name, "between Xe-HPG and Xe2", frozenset(), _PLAIN)
    return Architecture(name, "Xe2 or newer", _SYSTOLIC_WIDE, _XMX_TF32)
