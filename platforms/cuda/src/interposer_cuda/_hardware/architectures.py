"""Features and number formats of NVIDIA architectures, by compute capability.

Source: NVIDIA's CUDA C++ Programming Guide, chapter "compute capabilities" (formats of tensor
cores, shared memory, clusters, tensor maps), and the PTX ISA, the target notes of ``mma``,
``wgmma``, ``tcgen05``, ``cp.async`` and ``griddepcontrol``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of all devices of one compute capability.

    Attributes:
        generation: tensor core generation; 0 without tensor cores.
        features: instructions and units.
        formats: number formats with arithmetic in hardware.
        dtypes: torch names of the dtypes that models may run in, the preferred one first.
        shared_optin_bytes: largest shared memory of one block, with opt-in.
    """

    name: str
    generation: int
    features: frozenset[str]
    formats: frozenset[str]
    dtypes: tuple[str, ...]
    shared_optin_bytes: int


_KIB = 1024
_FLOATS = frozenset({"float32", "float16"})
_TURING = _FLOATS | {"int8", "int4"}
_AMPERE = _TURING | {"bfloat16", "tf32"}
_ADA = _AMPERE | {"float8_e4m3fn", "float8_e5m2"}
# Hopper and newer have no 4-bit integer matmul.
_HOPPER = _ADA - {"int4"}
_BLACKWELL = _HOPPER | {"mxfp8", "mxfp4", "nvfp4"}
_ASYNC = frozenset({"cp_async"})
_CLUSTERS = _ASYNC | {"clusters", "dependent_launch", "tma"}
_OLD = ("float16", "float32")
_WIDE = ("bfloat16", "float16", "float32")

_TABLE = {
    (7, 0): Architecture("Volta", 1, frozenset(), _FLOATS, _OLD, 96 * _KIB),
    (7, 2): Architecture("Volta", 1, frozenset(), _FLOATS | {"int8"}, _OLD, 96 * _KIB),
    (7, 5): Architecture("Turing", 2, frozenset(), _TURING, _OLD, 64 * _KIB),
    (8, 0): Architecture("Ampere", 3, _ASYNC, _AMPERE, _WIDE, 163 * _KIB),
    (8, 6): Architecture("Ampere", 3, _ASYNC, _AMPERE, _WIDE, 99 * _KIB),
    (8, 7): Architecture("Ampere", 3, _ASYNC, _AMPERE, _WIDE, 163 * _KIB),
    (8, 9): Architecture("Ada", 4, _ASYNC, _ADA, _WIDE, 99 * _KIB),
    (9, 0): Architecture("Hopper", 4, _CLUSTERS | {"wgmma"}, _HOPPER, _WIDE, 227 * _KIB),
    (10, 0): Architecture("Blackwell", 5, _CLUSTERS | {"tcgen05"}, _BLACKWELL, _WIDE, 227 * _KIB),
    (10, 3): Architecture("Blackwell", 5, _CLUSTERS | {"tcgen05"}, _BLACKWELL, _WIDE, 227 * _KIB),
    (11, 0): Architecture("Blackwell", 5, _CLUSTERS | {"tcgen05"}, _BLACKWELL, _WIDE, 227 * _KIB),
    (12, 0): Architecture("Blackwell", 5, _CLUSTERS, _BLACKWELL, _WIDE, 99 * _KIB),
    (12, 1): Architecture("Blackwell", 5, _CLUSTERS, _BLACKWELL, _WIDE, 99 * _KIB),
}
_OLDER = Architecture("older", 0, frozenset(), frozenset({"float32"}), ("float32",), 48 * _KIB)


def architecture_of(major: int, minor: int) -> Architecture:
    """Return the properties of a compute capability, estimated if the table lacks the version.

    A newer minor version gets the properties of the newest known version with the same major
    number. A newer major version gets the properties of the newest known device, without the
    instructions that exist on one major version only (``wgmma``, ``tcgen05``).
    """
    older_versions = [version for version in _TABLE if version <= (major, minor)]
    if not older_versions:
        return _OLDER
    nearest = _TABLE[max(older_versions)]
    if max(older_versions)[0] == major:
        return nearest
    return Architecture(
        f"newer than {nearest.name}",
        nearest.generation,
        nearest.features - {"wgmma", "tcgen05"},
        nearest.formats,
        nearest.dtypes,
        nearest.shared_optin_bytes,
    )
