"""Supported fields of the ``quantization_config`` of AWQ checkpoints.

Names and defaults follow AutoAWQ 0.2 and transformers 5; GPTQModel and auto-round write the same
names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field

from interposer.errors import ConfigError
from interposer_quantization._settings_model import (
    SEARCH_SETTINGS,
    GroupSize,
    SettingsModel,
)

_SUPPORTED = """\
Supported: bits 4; any group_size that divides the inputs, -1 for all of them; version 'gemm'; \
zero_point either way; modules_to_not_convert; lm_head either way.
Try: quantize the original model that way, with version 'gemm'"""

# Field names of AutoAWQ's quant_config.json and their names in config.json.
_OWN_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}

# Settings for other runtimes. Some writers add ``sym`` although AWQ ignores it: ``zero_point``
# decides.
_RUNTIME = frozenset(
    {
        "do_fuse",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "sym",
    }
)


def _lower(text: object) -> object:
    return text.lower() if isinstance(text, str) else text


def _backend(name: str) -> str:
    # llm-awq has a different packing. Other values only name the target runtime.
    if name == "llm-awq":
        raise ValueError("another writer with another packing")
    return name


# AutoAWQ also writes "GEMM".
Version = Annotated[Literal["gemm"], BeforeValidator(_lower)]


@dataclass(frozen=True, slots=True)
class Weights:
    """Group size and zero points of one layer's stored 4-bit weight.

    Attributes:
        inputs_per_scale: the group size; None if one group covers all inputs.
        symmetric: every zero point is the midpoint.
    """

    inputs_per_scale: int | None
    symmetric: bool

    def __str__(self) -> str:
        size = self.inputs_per_scale
        grouped = "per output" if size is None else f"per group of {size} inputs"
        return f"4 bits {grouped}, {'symmetric' if self.symmetric else 'asymmetric'}"


class Settings(SettingsModel):
    """The fields of ``quantization_config`` that change how tensors are decoded."""

    supported: ClassVar[str] = _SUPPORTED
    without_effect: ClassVar[Collection[str]] = SEARCH_SETTINGS | _RUNTIME
    quant_method: Literal["awq"] = "awq"
    method: Literal["awq"] | None = None
    bits: Literal[4] = 4
    group_size: GroupSize = 128
    zero_point: bool = True
    version: Version | None = None
    format: Version | None = None
    checkpoint_format: Version | None = None
    pack_dtype: Literal["int32"] | None = None
    backend: Annotated[str, AfterValidator(_backend)] | None = None
    data_type: Literal["int"] | None = None
    desc_act: Literal[False] | None = None
    modules_to_not_convert: list[str] | None = None
    modules_in_block_to_quantize: None = None
    lm_head: bool | None = None
    dynamic: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Validate the settings, which may use the field names of AutoAWQ's quant_config.json.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """
        renamed = dict(settings)
        for awq_name, name in _OWN_NAMES.items():
            value = renamed.pop(awq_name, None)
            if value is None:
                continue
            if renamed.get(name, value) != value:
                raise ConfigError(
                    f"quantization_config has {name} {renamed[name]!r} and {awq_name} {value!r}, "
                    "which mean the same and differ. Try: state one of them"
                )
            renamed[name] = value
        return super().parse(renamed)

    def stored(self, name: str) -> Weights | None:
        """Return the storage format of the linear layer ``name``, or None if not quantized.

        As in AutoAWQ, an entry of ``modules_to_not_convert`` excludes every layer with that text
        anywhere in the name.
        """
        if name == "lm_head" and not self.lm_head:
            return None
        if any(part in name for part in self.modules_to_not_convert or ()):
            return None
        size = None if self.group_size == -1 else self.group_size
        return Weights(size, not self.zero_point)
