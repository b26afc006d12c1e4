"""Matrix units, number formats, wavefront size and local memory of AMD architectures.

Architectures are named as in LLVM: ``gfx942`` is major version 9, minor version 4, stepping 2;
minor version and stepping are hexadecimal digits.

Source: AMD's instruction set guides for CDNA 1 to 4 and RDNA 1 to 4 (operands of V_MFMA, V_WMMA
and V_DOT, LDS, wavefronts); LLVM's user guide for the AMDGPU backend (GPUs of each architecture).
Memory transfers per clock that amdgpu reports: 2 for HBM2 and HBM2E, 4 for HBM3 and HBM3E, 16 for
GDDR6. Thus 1300 MHz and 8192 bits give the 5.3 TB/s of an MI300X, and 1249 MHz and 384 bits the
960 GB/s of an RX 7900 XTX.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from interposer_ops.devices import architecture

_NAME = re.compile(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])")
_KIB = 1024


@dataclass(frozen=True, slots=True, order=True)
class GfxVersion:
    """Major version, minor version and stepping of a graphics core.

    Raises: ValueError: the minor version or the stepping is not a hexadecimal digit.
    """

    major: int
    minor: int
    stepping: int

    def __post_init__(self) -> None:
        if not (self.major >= 0 and 0 <= self.minor < 16 and 0 <= self.stepping < 16):
            numbers = f"{self.major}.{self.minor}.{self.stepping}"
            raise ValueError(f"{numbers} is no version of a graphics core")

    @classmethod
    def of_number(cls, number: int) -> GfxVersion:
        """Parse the driver's ``gfx_target_version``: 90010 is gfx90a."""
        return cls(number // 10_000, number // 100 % 100, number % 100)

    @classmethod
    def of_name(cls, name: str) -> GfxVersion:
        """Parse a name such as ``gfx942`` or ``gfx90a:xnack-``; the suffix is ignored.

        Raises: ValueError: ``name`` is not the name of an architecture.
        """
        match = _NAME.fullmatch(name.partition(":")[0])
        if match is None:
            raise ValueError(f"{name!r} does not name an architecture such as 'gfx942'")
        return cls(int(match[1]), int(match[2], 16), int(match[3], 16))

    def __str__(self) -> str:
        return f"gfx{self.major}{self.minor:x}{self.stepping:x}"


@dataclass(frozen=True, slots=True)
class Architecture(architecture.Architecture):
    """Properties of all GPUs of one or more graphics core versions.

    Features are the family and the older families that the family extends, matrix instructions
    (``mfma``, ``wmma``), the 8-bit float format that these multiply (``fp8_ocp``, ``fp8_fnuz``),
    wavefront size (``wave64``, ``wave32``), and ``triton`` if tests compile the Triton kernels
    ahead of time for this architecture. The fnuz formats have neither infinities nor a negative
    zero, and half the value of the same OCP bits.

    Attributes:
        transfers: memory transfers per clock; 0 if the memory type is unknown.
    """

    shared_bytes: int = 64 * _KIB
    transfers: int = 0


_OLD = ("float16", "float32")
_WIDE = ("bfloat16", "float16", "float32")
_PLAIN = frozenset({"float32", "float16"})
_DOTS = _PLAIN | {"int8", "int4"}
_CDNA1 = _PLAIN | {"bfloat16", "int8"}
_CDNA3 = _CDNA1 | {"tf32", "float8_e4m3fnuz", "float8_e5m2fnuz"}
# CDNA 4 dropped tf32 matmul, and has OCP 8-bit floats instead of fnuz.
_CDNA4 = _CDNA1 | {"float8_e4m3fn", "float8_e5m2", "mxfp8", "mxfp6", "mxfp4"}
_RDNA3 = _CDNA1 | {"int4"}
_RDNA4 = _RDNA3 | {"float8_e4m3fn", "float8_e5m2"}


def _features(kind: str, generation: int, *other_features: str) -> frozenset[str]:
    generations = {f"{kind}{number}" for number in range(1, generation + 1)}
    return frozenset(generations | {*other_features})


_M64 = ("mfma", "wave64", "triton")
_W32 = ("wmma", "wave32", "triton")

_VEGA = Architecture("Vega", frozenset({"wave64"}), _PLAIN, _OLD)
_VEGA20 = Architecture("Vega 20", frozenset({"wave64"}), _DOTS, _OLD, transfers=2)
_MI100 = Architecture("CDNA 1", _features("cdna", 1, *_M64), _CDNA1, _WIDE, transfers=2)
_MI200 = Architecture("CDNA 2", _features("cdna", 2, *_M64), _CDNA1, _WIDE, transfers=2)
_MI300 = Architecture("CDNA 3", _features("cdna", 3, *_M64, "fp8_fnuz"), _CDNA3, _WIDE, transfers=4)
_MI350 = Architecture(
    "CDNA 4", _features("cdna", 4, *_M64, "fp8_ocp"), _CDNA4, _WIDE, 160 * _KIB, 4
)
_NAVI1 = Architecture("RDNA 1", _features("rdna", 1, "wave32"), _PLAIN, _OLD, transfers=16)
_NAVI2 = Architecture("RDNA 2", _features("rdna", 2, "wave32"), _DOTS, _OLD, transfers=16)
_NAVI3 = Architecture("RDNA 3", _features("rdna", 3, *_W32), _RDNA3, _WIDE, transfers=16)
# Integrated GPUs: the bandwidth of system memory is unknown here.
_PHOENIX = Architecture("RDNA 3", _features("rdna", 3, *_W32), _RDNA3, _WIDE)
_STRIX = Architecture("RDNA 3.5", _features("rdna", 3, *_W32), _RDNA3, _WIDE)
_NAVI4 = Architecture("RDNA 4", _features("rdna", 4, *_W32, "fp8_ocp"), _RDNA4, _WIDE, transfers=16)

_TABLE = {
    **dict.fromkeys(("gfx900", "gfx902", "gfx904", "gfx909", "gfx90c"), _VEGA),
    "gfx906": _VEGA20,
    "gfx908": _MI100,
    "gfx90a": _MI200,
    "gfx942": _MI300,
    "gfx950": _MI350,
    **dict.fromkeys(("gfx1010", "gfx1011", "gfx1012", "gfx1013"), _NAVI1),
    **dict.fromkeys(("gfx1030", "gfx1031", "gfx1032", "gfx1034"), _NAVI2),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102"), _NAVI3),
    "gfx1103": _PHOENIX,
    **dict.fromkeys(("gfx1150", "gfx1151", "gfx1152", "gfx1153"), _STRIX),
    **dict.fromkeys(("gfx1200", "gfx1201"), _NAVI4),
}
KNOWN = frozenset(_TABLE)
"""Names of the architectures in the table."""


def architecture_of(version: GfxVersion) -> Architecture:
    """Return the properties of a version; if unknown, only the properties of every GPU.

    Nothing is inferred from neighbouring versions, which may differ: 9.5 has other formats than
    9.4, and 12.5 has other matrix instructions than 12.0.
    """
    if str(version) in _TABLE:
        return _TABLE[str(version)]
    wave_feature = "wave64" if version.major < 10 else "wave32"
    return Architecture("unknown", frozenset({wave_feature}), _PLAIN, _OLD)
