"""Settings of weight offload: how much of a model's weights stays resident."""

from __future__ import annotations

import re
from dataclasses import dataclass

from interposer.errors import ConfigError

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True, slots=True)
class Offload:
    """The part of the weights that stays resident; other weights lie in host memory or on the disk.

    Attributes:
        resident_bytes: limit for resident weights and for the buffers of the others; None applies
            the fraction.
        resident_fraction: the same limit as a fraction of all weights, from 0 to 1; None takes a
            fraction of the free memory, 0.8 of an accelerator's and 0.6 of a host's.
    Raises: ConfigError: a number is out of range.
    """

    resident_bytes: int | None = None
    resident_fraction: float | None = None

    def __post_init__(self) -> None:
        size, fraction = self.resident_bytes, self.resident_fraction
        if size is not None and size < 0:
            raise ConfigError(f"offload is {size} bytes, must be at least 0")
        if fraction is not None and fraction > 1:
            raise ConfigError(f"offload is {fraction:.0%}, must be at most 100% of the weights")

    @classmethod
    def of(cls, option: bool | int | str | None) -> Offload | None:
        """Parse the option ``offload`` of ``load``; return None for None and False.

        Args:
            option: bytes, or a text such as ``"8GiB"`` or ``"50%"`` of the weights; True takes the
                defaults.
        Raises: ConfigError: the option states no size.
        """
        if option is None or option is False:
            return None
        if option is True:
            return cls()
        if isinstance(option, int):  # bool is handled above
            return cls(resident_bytes=option)
        if isinstance(option, str) and (match := _TEXT.fullmatch(option)):
            number, unit = float(match[1]), match[2].upper()
            if unit == "%":
                return cls(resident_fraction=number / 100)
            if unit in _UNITS:
                return cls(resident_bytes=int(number * _UNITS[unit]))
        raise ConfigError(
            f"offload is {option!r}, must be True, False, a number of bytes, or a size such as "
            "'8GiB' or '50%'"
        )

    def budget(self, weight_bytes: int, default_bytes: int) -> int:
        """Return the limit for resident bytes.

        Args:
            weight_bytes: size of all weights.
            default_bytes: limit if the settings state none.
        """
        if self.resident_bytes is not None:
            return self.resident_bytes
        if self.resident_fraction is not None:
            return int(self.resident_fraction * weight_bytes)
        return default_bytes
