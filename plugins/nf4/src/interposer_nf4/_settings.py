"""Supported fields of the ``quantization_config`` of bitsandbytes checkpoints.

Names, defaults and the matching of skipped modules follow transformers 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from interposer.errors import ConfigError
from interposer_nf4._codebooks import QuantType
from interposer_quantization import SettingsModel

_SUPPORTED = """\
Supported: load_in_4bit with bnb_4bit_quant_type 'nf4' or 'fp4', with bnb_4bit_use_double_quant or \
without, any bnb_4bit_compute_dtype and bnb_4bit_quant_storage; load_in_8bit; \
llm_int8_skip_modules; lm_head not quantized.
Try: quantize the original model that way"""

_WIDTHS = ("load_in_4bit", "load_in_8bit")
# transformers writes both fields a second time with an underscore.
_REPEATED = frozenset(f"_{name}" for name in _WIDTHS)
# A pattern that matches the start of a name must end at a dot or at the end of the name.
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def _pattern(text: str) -> str:
    try:
        re.compile(f"(?:{text}){_BOUNDARY}")
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression for the start of a layer's name, or the end of a name."""


@dataclass(frozen=True, slots=True)
class FourBit:
    """Storage of a 4-bit layer; ``double`` means that the scales are quantized too."""

    quant_type: QuantType
    double: bool

    def __str__(self) -> str:
        return f"{self.quant_type}{', double quantization' if self.double else ''}"


@dataclass(frozen=True, slots=True)
class EightBit:
    """Storage of an int8 layer with one scale per output."""

    def __str__(self) -> str:
        return "int8 per output"


class Settings(SettingsModel):
    """Fields of the ``quantization_config`` that bitsandbytes checkpoints state.

    The compute dtype, the outlier threshold and the storage dtype of the packed bytes do not affect
    decoding; only their values are validated.
    """

    quant_method: Literal["bitsandbytes"] = "bitsandbytes"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: QuantType = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    bnb_4bit_quant_storage: (
        Literal["uint8", "int8", "float16", "bfloat16", "float32", "float64"] | None
    ) = None
    llm_int8_skip_modules: list[Pattern] | None = None
    llm_int8_threshold: float = 6.0
    llm_int8_enable_fp32_cpu_offload: bool = False
    llm_int8_has_fp16_weight: Literal[False] = False

    @model_validator(mode="after")
    def _coherent(self) -> Settings:
        if self.load_in_4bit == self.load_in_8bit:
            quantity = "both" if self.load_in_4bit else "neither"
            raise ValueError(f"{quantity} of load_in_4bit and load_in_8bit is true, must be one")
        return self

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Settings:
        """Validate the raw settings and return the parsed settings.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        parsed = cls.parsed(settings, _REPEATED, _SUPPORTED)
        for name in _WIDTHS:
            value = getattr(parsed, name)
            if settings.get(f"_{name}", value) != value:
                raise ConfigError(
                    f"quantization_config says that {name} is {value} and that _{name} is "
                    f"{settings[f'_{name}']!r}. Try: remove the one that does not hold"
                )
        return parsed

    def weights(self, name: str) -> FourBit | EightBit | None:
        """Return the storage format of the linear layer ``name``, or None if not quantized."""
        if self.llm_int8_skip_modules is None:
            is_skipped = name == "lm_head"
        else:
            is_skipped = any(
                re.match(f"(?:{key}){_BOUNDARY}", name) or name.endswith(key)
                for key in self.llm_int8_skip_modules
            )
        if is_skipped:
            return None
        if self.load_in_8bit:
            return EightBit()
        return FourBit(self.bnb_4bit_quant_type, self.bnb_4bit_use_double_quant)
