"""Matrix units, number formats, lanes and local memory of a GPU's architecture.

Architectures go by the names of LLVM: ``gfx942`` is major version 9, minor 4, stepping 2; the
last two are hexadecimal digits.

Source: AMD's instruction set guides for CDNA 1 to 4 and RDNA 1 to 4 (operands of V_MFMA, V_WMMA
and V_DOT, LDS, wavefronts); LLVM's user guide for the AMDGPU backend (which products are which
architecture). Transfers per clock of memory: HBM2 and HBM2E 2, HBM3 and HBM3E 4 and GDDR6 16 of
the clock that amdgpu reports, so that 1300 MHz over 8192 bits are the 5.3 TB/s of an MI300X, and
1249 MHz over 384 bits the 960 GB/s of an RX 7900 XTX.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])")
_KIB = 1024


@dataclass(frozen=True, slots=True, order=True)
class GfxVersion:
    """Major version, minor version and stepping of a graphics core.

    Raises: ValueError: minor version or stepping are no hexadecimal digit.
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
        """Return what ``gfx_target_version`` says: 90010 is gfx90a."""
        return cls(number // 10_000, number // 100 % 100, number % 100)

    @classmethod
    def of_name(cls, name: str) -> GfxVersion:
        """Return the version of a name, without a suffix behind a colon such as ``:xnack-``.

        Raises: ValueError: it is no such name.
        """
        match = _NAME.fullmatch(name.partition(":")[0])
        if match is None:
            raise ValueError(f"{name!r} does not name an architecture such as 'gfx942'")
        return cls(int(match[1]), int(match[2], 16), int(match[3], 16))

    def __str__(self) -> str:
        return f"gfx{self.major}{self.minor:x}{self.stepping:x}"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of all devices of some versions.

    Attributes:
        family: such as ``"CDNA 3"``.
        features: the family and those before it that it extends, its matrix instructions
            (``mfma``, ``wmma``), the lanes of a wave that kernels are compiled for (``wave64``,
            ``wave32``), and ``triton`` where portable kernels are compiled ahead for it in tests.
        formats: of numbers with products in hardware. Those with ``fnuz`` in their names have
            neither infinities nor a negative zero, and other values than those of OCP.
        dtypes: by torch name, that models may be run in, the preferred one first.
        lds_bytes: the local memory that one workgroup may have.
        transfers: of memory per clock; 0 where its kind is not known.
    """

    family: str
    features: frozenset[str]
    formats: frozenset[str]
    dtypes: tuple[str, ...]
    lds_bytes: int = 64 * _KIB
    transfers: int = 0


_OLD = ("float16", "float32")
_WIDE = ("bfloat16", "float16", "float32")
_PLAIN = frozenset({"float32", "float16"})
_DOTS = _PLAIN | {"int8", "int4"}
_CDNA1 = _PLAIN | {"bfloat16", "int8"}
_CDNA3 = _CDNA1 | {"tf32", "float8_e4m3fnuz", "float8_e5m2fnuz"}
# It has no products of tf32, and 8-bit floats of OCP in place of fnuz.
_CDNA4 = _CDNA1 | {"float8_e4m3fn", "float8_e5m2", "mxfp8", "mxfp6", "mxfp4"}
_RDNA3 = _CDNA1 | {"int4"}
_RDNA4 = _RDNA3 | {"float8_e4m3fn", "float8_e5m2"}


def _features(kind: str, generation: int, *others: str) -> frozenset[str]:
    own = {f"{kind}{number}" for number in range(1, generation + 1)}
    return frozenset(own | {*others})


_M64 = ("mfma", "wave64")
_W32 = ("wmma", "wave32", "triton")

_VEGA = Architecture("Vega", frozenset({"wave64"}), _PLAIN, _OLD)
_VEGA20 = Architecture("Vega 20", frozenset({"wave64"}), _DOTS, _OLD, transfers=2)
_MI100 = Architecture("CDNA 1", _features("cdna", 1, *_M64, "triton"), _CDNA1, _WIDE, transfers=2)
_MI200 = Architecture("CDNA 2", _features("cdna", 2, *_M64, "triton"), _CDNA1, _WIDE, transfers=2)
_MI300 = Architecture("CDNA 3", _features("cdna", 3, *_M64, "triton"), _CDNA3, _WIDE, transfers=4)
_MI350 = Architecture("CDNA 4", _features("cdna", 4, *_M64, "triton"), _CDNA4, _WIDE, 160 * _KIB, 4)
_NAVI1 = Architecture("RDNA 1", _features("rdna", 1, "wave32"), _PLAIN, _OLD, transfers=16)
_NAVI2 = Architecture("RDNA 2", _features("rdna", 2, "wave32"), _DOTS, _OLD, transfers=16)
_NAVI3 = Architecture("RDNA 3", _features("rdna", 3, *_W32), _RDNA3, _WIDE, transfers=16)
# Parts of processors, whose memory is that of the system.
_PHOENIX = Architecture("RDNA 3", _features("rdna", 3, *_W32), _RDNA3, _WIDE)
_STRIX = Architecture("RDNA 3.5", _features("rdna", 3, *_W32), _RDNA3, _WIDE)
_NAVI4 = Architecture("RDNA 4", _features("rdna", 4, *_W32), _RDNA4, _WIDE, transfers=16)

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
"""The architectures that something is known of."""


def architecture_of(version: GfxVersion) -> Architecture:
    """Return what is known of a version; of an unknown one, no more than any GPU has.

    Minor versions are no order here: 9.5 has other formats than 9.4, and 12.5 other matrix
    instructions than 12.0. So nothing is concluded from a neighbour.
    """
    known = _TABLE.get(str(version))
    if known is not None:
        return known
    wave = "wave64" if version.major < 10 else "wave32"
    return Architecture("unknown", frozenset({wave}), _PLAIN, _OLD)
