"""Features and number formats of NVIDIA architectures, by compute capability.

Source: NVIDIA's CUDA C++ Programming Guide, chapter "compute capabilities" (formats of tensor
cores, shared memory, clusters, tensor maps), and the PTX ISA, the target notes of ``mma``,
``wgmma``, ``tcgen05``, ``cp.async`` and ``griddepcontrol``.
"""

from __future__ import annotations

from dataclasses import replace

from interposer_ops.devices.architecture import Architecture

_KIB = 1024
_FLOATS = frozenset({"float32", "float16"})
_TURING = _FLOATS | {"int8", "int4"}
_AMPERE = _TURING | {"bfloat16", "tf32"}
_ADA = _AMPERE | {"float8_e4m3fn", "float8_e5m2"}
# Hopper and newer have no 4-bit integer matmul.
_HOPPER = _ADA - {"int4"}
_BLACKWELL = _HOPPER | {"mxfp8", "mxfp4", "nvfp4"}
_OLD = ("float16", "float32")
_WIDE = ("bfloat16", "float16", "float32")


def _features(tensor_cores: int, *others: str) -> frozenset[str]:
    """Return the features of GPUs with the given generation of tensor cores.

    A device with third-generation tensor cores has ``tensor_cores_1`` to ``tensor_cores_3``, so a
    kernel requires the oldest generation with its instructions.
    """
    return frozenset({*(f"tensor_cores_{n}" for n in range(1, tensor_cores + 1)), *others})


# Triton's compiler supports Turing and newer.
_VOLTA = _features(1)
_ASYNC = ("triton", "cp_async")
_CLUSTERS = (*_ASYNC, "clusters", "dependent_launch", "tma")
_TENSOR3, _TENSOR4 = _features(3, *_ASYNC), _features(4, *_ASYNC)
_WGMMA = _features(4, *_CLUSTERS, "wgmma")
_TENSOR5, _TCGEN05 = _features(5, *_CLUSTERS), _features(5, *_CLUSTERS, "tcgen05")

_TABLE = {
    (7, 0): Architecture("Volta", _VOLTA, _FLOATS, _OLD, 96 * _KIB),
    (7, 2): Architecture("Volta", _VOLTA, _FLOATS | {"int8"}, _OLD, 96 * _KIB),
    (7, 5): Architecture("Turing", _features(2, "triton"), _TURING, _OLD, 64 * _KIB),
    (8, 0): Architecture("Ampere", _TENSOR3, _AMPERE, _WIDE, 163 * _KIB),
    (8, 6): Architecture("Ampere", _TENSOR3, _AMPERE, _WIDE, 99 * _KIB),
    (8, 7): Architecture("Ampere", _TENSOR3, _AMPERE, _WIDE, 163 * _KIB),
    (8, 9): Architecture("Ada", _TENSOR4, _ADA, _WIDE, 99 * _KIB),
    (9, 0): Architecture("Hopper", _WGMMA, _HOPPER, _WIDE, 227 * _KIB),
    (10, 0): Architecture("Blackwell", _TCGEN05, _BLACKWELL, _WIDE, 227 * _KIB),
    (10, 3): Architecture("Blackwell", _TCGEN05, _BLACKWELL, _WIDE, 227 * _KIB),
    (11, 0): Architecture("Blackwell", _TCGEN05, _BLACKWELL, _WIDE, 227 * _KIB),
    (12, 0): Architecture("Blackwell", _TENSOR5, _BLACKWELL, _WIDE, 99 * _KIB),
    (12, 1): Architecture("Blackwell", _TENSOR5, _BLACKWELL, _WIDE, 99 * _KIB),
}
_OLDER = Architecture("older", frozenset(), frozenset({"float32"}), ("float32",), 48 * _KIB)


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
    features = nearest.features - {"wgmma", "tcgen05"}
    return replace(nearest, name=f"newer than {nearest.name}", features=features)
