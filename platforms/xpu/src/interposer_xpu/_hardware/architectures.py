"""Features and number formats of Intel architectures, by graphics IP version.

An IP version packs 10 bits of architecture, 8 of release and 14 of revision. Architecture and
release determine the features.

Source: the list of versions in Intel's compute runtime, and DPC++'s extension "device architecture"
(names without the prefix ``intel_gpu_``); oneAPI GPU Optimization Guide, chapter
"Intel Xe GPU architecture" (vector engines, matrix extensions and their formats); the tables of
DPC++'s extension "joint matrix" (lanes and formats by architecture); the SPIR-V extension
SPV_INTEL_2d_block_io.
"""

from __future__ import annotations

from dataclasses import dataclass

from interposer_ops.devices import architecture


@dataclass(frozen=True, slots=True)
class Architecture(architecture.Architecture):
    """Properties of all devices of one graphics version, with a name such as ``"bmg_g21"``.

    Attributes:
        family: such as ``"Xe2-HPG"``.
        computes: torch has kernels for the architecture.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    shared_bytes: int = 128 * 1024
    family: str = "unknown"
    computes: bool = True


_PLAIN = frozenset({"float32", "float16", "int8"})
# Formats of the matrix extensions (XMX). No XMX multiplies 8-bit floats without conversion.
_XMX = _PLAIN | {"bfloat16", "int4"}
_XMX_TF32 = _XMX | {"tf32"}
_SYSTOLIC = frozenset({"dpas", "dpas_8"})
_SYSTOLIC_WIDE = frozenset({"dpas", "dpas_16", "block_2d_io", "float64"})

_HPG = ("Xe-HPG", _SYSTOLIC, _XMX)
_LPG = ("Xe-LPG", frozenset[str](), _PLAIN)
_HPC = ("Xe-HPC", _SYSTOLIC_WIDE | {"xe_hpc"}, _XMX_TF32 - {"int4"})
_XE2 = _SYSTOLIC_WIDE | {"xe2"}
_XE3 = _SYSTOLIC_WIDE | {"xe3"}

_ROWS = {
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
_TABLE = {
    version: Architecture(name, features, formats, family=family)
    for version, (name, family, features, formats) in _ROWS.items()
}
_UNKNOWN = Architecture("unknown", frozenset(), _PLAIN, shared_bytes=64 * 1024)
_OLDER = Architecture(
    *("older", frozenset(), _PLAIN, ("float16", "float32"), 64 * 1024, "before Xe-HPG", False)
)


def packed(architecture: int, release: int, revision: int = 0) -> int:
    """Pack an IP version into the integer that drivers report."""
    return architecture << 22 | release << 14 | revision


def architecture_of(ip_version: int) -> Architecture:
    """Return the properties of an IP version, estimated if the table lacks the version.

    A version newer than Xe2 gets the features that Xe2 and Xe3 share. An unknown version between
    Xe-HPG and Xe2 gets no matrix extensions.
    """
    version = ip_version >> 22, ip_version >> 14 & 0xFF
    if version in _TABLE:
        return _TABLE[version]
    if not ip_version:  # an old driver does not report the version
        return _UNKNOWN
    if version < min(_TABLE):
        return _OLDER
    name = f"xe_{version[0]}_{version[1]}"
    if version < (20, 0):
        return Architecture(name, frozenset(), _PLAIN, family="between Xe-HPG and Xe2")
    return Architecture(name, _SYSTOLIC_WIDE, _XMX_TF32, family="Xe2 or newer")
