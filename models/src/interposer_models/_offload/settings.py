"""The settings of offload: how much of a model's weights stays in the memory that computes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from interposer.errors import ConfigError

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True, slots=True)
class Offload:
    """The share of the weights that stays resident; the rest lies in host memory or on the disk.

    Attributes:
        resident_bytes: that resident weights and the buffers of others may take; None leaves that
            to the fraction.
        resident_fraction: the same as a share of all weights, at least 0 and at most 1; None takes
            a share of the memory that is free, 0.8 of an accelerator's and 0.6 of a host's.
    Raises: ConfigError: a number is none of these.
    """

    resident_bytes: int | None = None
    resident_fraction: float | None = None

    def __post_init__(self) -> None:
        size, share = self.resident_bytes, self.resident_fraction
        if size is not None and size < 0:
            raise ConfigError(f"offload is {size} bytes, must be at least 0")
        if share is not None and share > 1:
            raise ConfigError(f"offload is {share:.0%}, must be at most 100% of the weights")

    @classmethod
    def of(cls, asked: bool | int | str | None) -> Offload | None:
        """Return settings of what ``load`` was asked for; None where nothing, or False, was.

        Args:
            asked: bytes, or a text such as ``"8GiB"`` or ``"50%"``, of the weights; True takes the
                defaults.
        Raises: ConfigError: it says no size.
        """
        if asked is None or asked is False:
            return None
        if asked is True:
            return cls()
        if isinstance(asked, int):
            return cls(resident_bytes=asked)
        if isinstance(asked, str) and (found := _TEXT.fullmatch(asked)):
            number, unit = float(found[1]), found[2].upper()
            if unit == "%":
                return cls(resident_fraction=number / 100)
            if unit in _UNITS:
                return cls(resident_bytes=int(number * _UNITS[unit]))
        raise ConfigError(
            f"offload is {asked!r}, must be True, False, a number of bytes, or a size such as "
            "'8GiB' or '50%'"
        )

    def budget(self, weight_bytes: int, room_bytes: int) -> int:
        """Return the bytes that may be resident, of so many of weights.

        Args:
            room_bytes: taken where nothing is said.
        """
        if self.resident_bytes is not None:
            return self.resident_bytes
        if self.resident_fraction is not None:
            return int(self.resident_fraction * weight_bytes)
        return room_bytes
