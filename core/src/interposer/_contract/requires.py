"""Declarative requirements, judged against a request without importing any kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from interposer._contract.errors import RecordError, nearest_first
from interposer._contract.verdict import Verdict

if TYPE_CHECKING:
    from interposer._contract.request import Request

_FLOATS = """
    float64 float32 bfloat16 float16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2 complex128 complex64 complex32
"""
_INTEGERS = "bool int64 int32 int16 int8 uint64 uint32 uint16 uint8"
_SUB_BYTE_INTEGERS = " ".join(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8))
_PACKED = "bits1x8 bits2x4 bits4x2 bits8 bits16 qint8 quint8 qint32 quint4x2 quint2x4"

DTYPES = frozenset(f"{_FLOATS} {_INTEGERS} {_SUB_BYTE_INTEGERS} {_PACKED}".split())
"""The names of torch's dtypes without ``torch.``, listed here so that torch is not imported."""


@dataclass(frozen=True, slots=True)
class Dim:
    """The allowed values of one dimension or option.

    Raises: RecordError: the limits exclude every value.
    """

    at_least: int | None = None
    at_most: int | None = None
    multiple_of: int | None = None
    one_of: tuple[int | float | str | bool, ...] = ()

    def __post_init__(self) -> None:
        # The validation of the record checks the types, so wrong types pass here.
        low, high, step = self.at_least, self.at_most, self.multiple_of
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise RecordError(f"Dim has at_least={low} above at_most={high}, which nothing meets")
        if isinstance(step, int) and step < 1:
            raise RecordError(f"Dim has multiple_of={step}, must be 1 or more")

    def judge(self, name: str, value: int | float | str | bool) -> Verdict:
        """Accept ``value`` for the dimension called ``name``, or refuse with the violated limit."""
        if self.one_of and value not in self.one_of:
            return Verdict.refuse(f"{name} is {value!r}, must be one of {list(self.one_of)}")
        if self.at_least is None and self.at_most is None and self.multiple_of is None:
            return Verdict.accept()
        if isinstance(value, str):
            return Verdict.refuse(f"{name} is {value!r}, must be a number")
        if self.at_least is not None and value < self.at_least:
            return Verdict.refuse(f"{name} is {value}, must be at least {self.at_least}")
        if self.at_most is not None and value > self.at_most:
            return Verdict.refuse(f"{name} is {value}, must be at most {self.at_most}")
        if self.multiple_of is not None and value % self.multiple_of:
            return Verdict.refuse(f"{name} is {value}, must be a multiple of {self.multiple_of}")
        return Verdict.accept()


@dataclass(frozen=True, slots=True)
class Requires:
    """The requirements of a candidate: on the device and on the request.

    Attributes:
        features: capability features that must all be present.
        architectures: accepted architecture strings; empty accepts any.
        dtypes: accepted dtypes by torch name without ``torch.``; empty accepts any.
        dims: constraints by dimension name; a request that does not state the dimension is refused.

    Raises: RecordError: a dtype does not exist in torch.
    """

    features: frozenset[str] = frozenset()
    architectures: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    dims: Mapping[str, Dim] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            if isinstance(dtype, str) and dtype not in DTYPES:
                nearest = ", ".join(nearest_first(dtype[:100], DTYPES)[:3])
                raise RecordError(
                    f"Requires has the dtype {dtype[:100]!a}, which torch does not have; "
                    f"nearest: {nearest}"
                )

    def judge(self, request: Request) -> Verdict:
        """Accept ``request``, or refuse with the first unmet requirement."""
        capability = request.capability
        if self.architectures and capability.architecture not in self.architectures:
            architectures = ", ".join(sorted(self.architectures))
            return Verdict.refuse(f"needs {architectures}, the device is {capability.architecture}")
        missing = sorted(self.features - capability.features)
        if missing:
            return Verdict.refuse(f"needs {', '.join(missing)}, which the device lacks")
        if self.dtypes and request.dtype not in self.dtypes:
            return Verdict.refuse(f"needs dtype {' or '.join(self.dtypes)}, got {request.dtype}")
        for name, dim in self.dims.items():
            if name not in request.dims:
                return Verdict.refuse(f"needs to know {name}, which the request does not state")
            verdict = dim.judge(name, request.dims[name])
            if not verdict:
                return verdict
        return Verdict.accept()
