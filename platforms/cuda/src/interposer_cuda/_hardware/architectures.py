"""Features and number formats of architectures, by compute capability.

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
        generation: of the tensor cores; 0 without.
        features: instructions and units.
        formats: of numbers with arithmetic in hardware.
        dtypes: by torch name, that models may be run in, the preferred one first.
        shared_optin_bytes: the shared memory that one block may have.
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
# From Hopper on there are no products of 4-bit integers.
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
_NONE = Architecture("older", 0, frozenset(), frozenset({"float32"}), ("float32",), 48 * _KIB)


def architecture_of(major: int, minor: int) -> Architecture:
    """Return what is known of a compute capability.

    Of one that is newer than the table, what the newest below it of the same major version can
    do, which it keeps; of an unknown major version, what all before it share: whatever was tied
    to one of them (``wgmma``, ``tcgen05``) is left out.
    """
    below = [version for version in _TABLE if version <= (major, minor)]
    if not below:
        return _NONE
    nearest = _TABLE[max(below)]
    if max(below)[0] == major:
        return nearest
    return Architecture(
        f"newer than {nearest.name}",
        nearest.generation,
        nearest.features - {"wgmma", "tcgen05"},
        nearest.formats,
        nearest.dtypes,
        nearest.shared_optin_bytes,
    )
