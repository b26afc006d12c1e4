"""Supported fields of the ``quantization_config`` of auto-round checkpoints.

Names, defaults and the order in which ``extra_config`` applies follow auto-round 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from interposer_quantization._awq import config as awq_config
from interposer_quantization._gptq import config as gptq_config
from interposer_quantization._settings_model import (
    SEARCH_SETTINGS,
    GroupSize,
    SettingsModel,
    check_regex,
)

_SUPPORTED = """\
Supported: bits 4 or 8, by layer in 'extra_config', of data_type 'int'; any group_size that \
divides the inputs, -1 for all of them; sym either way; packing_format 'auto_round:auto_gptq', \
'auto_round:gptqmodel', 'auto_round', and for 4 bits 'auto_round:auto_awq'; inputs and caches \
that are not quantized.
Try: quantize the original model that way"""

# Calibration settings, and input-quantization details: ``act_bits`` must say that inputs are not
# quantized.
_WITHOUT_EFFECT = (SEARCH_SETTINGS - {"block_name_to_quantize", "quant_block_list"}) | {
    "act_data_type",
    "act_dynamic",
    "act_group_size",
    "act_sym",
    "backend",
    "static_attention_granularity",
    "static_kv_granularity",
}
# 16 or 32 bits in an override mean that the layer is not quantized.
_PLAIN_BITS = 16

Stored = gptq_config.Weights | awq_config.Weights
"""Storage of one layer's weight, as described by the format that packs it."""


Pattern = Annotated[str, AfterValidator(check_regex)]
"""The full name of a layer, or a regular expression that is searched in the name."""
Unquantized = Literal[16, 32] | None
Packing = Literal[
    "auto",
    "auto_gptq",
    "auto_awq",
    "auto_round",
    "auto_round:auto_awq",
    "auto_round:auto_gptq",
    "auto_round:awq",
    "auto_round:gptq",
    "auto_round:gptqmodel",
]


class Override(SettingsModel):
    """Settings of some layers that override the defaults; a null field keeps the default."""

    bits: Literal[4, 8, 16, 32] | None = None
    group_size: GroupSize | None = None
    sym: bool | None = None
    data_type: str | None = None
    act_bits: Unquantized = None
    act_data_type: str | None = None
    act_dynamic: bool | None = None
    act_group_size: int | None = None
    act_sym: bool | None = None
    super_bits: None = None
    super_group_size: None = None
    rotation_config: None = None

    @model_validator(mode="after")
    def _is_integer(self) -> Override:
        if self.data_type not in ("int", None) and (self.bits or 0) < _PLAIN_BITS:
            raise ValueError(f"data_type {self.data_type!r} is not read, only 'int'")
        return self


class Settings(SettingsModel):
    """The fields of ``quantization_config`` that change how tensors are decoded."""

    supported: ClassVar[str] = _SUPPORTED
    without_effect: ClassVar[Collection[str]] = _WITHOUT_EFFECT
    quant_method: Literal["auto-round", "inc"] = "auto-round"
    bits: Literal[4, 8]
    group_size: GroupSize = 128
    sym: bool = True
    data_type: Literal["int"] = "int"
    packing_format: Packing
    act_bits: Unquantized = None
    extra_config: dict[Pattern, Override] | None = None
    block_name_to_quantize: str | list[str] | list[list[str]] | None = None
    to_quant_block_names: str | list[str] | list[list[str]] | None = None
    quant_block_list: list[str] | list[list[str]] | None = None
    modules_to_not_convert: list[Pattern] | None = None
    desc_act: Literal[False] | None = None
    static_attention_dtype: None = None
    static_kv_dtype: None = None
    super_bits: None = None
    super_group_size: None = None
    rotation_config: None = None

    @property
    def is_awq(self) -> bool:
        """Return whether weights are packed along the outputs, as in AWQ."""
        return self.packing_format.endswith("awq")

    @property
    def has_order(self) -> bool:
        """Return whether the checkpoint stores ``g_idx``, although groups are consecutive."""
        return self.packing_format == "auto_round:gptqmodel"

    @model_validator(mode="after")
    def _packable(self) -> Settings:
        bits_by_layer = {
            "": self.bits,
            **{name: o.bits for name, o in (self.extra_config or {}).items()},
        }
        for name, bits in bits_by_layer.items():
            if self.is_awq and bits == 8:
                suffix = f" of {name!r}" if name else ""
                raise ValueError(
                    f"packing_format {self.packing_format!r} has 4 bits, not 8{suffix}"
                )
        return self

    def stored(self, name: str) -> Stored | None:
        """Return the storage format of the linear layer ``name``, or None if not quantized."""
        override = self._override(name)
        if override is None:
            return None
        merged = self.model_copy(update=override.model_dump(exclude_none=True))
        if merged.bits >= _PLAIN_BITS:
            return None
        # From here on, the storage is described as the packing format (GPTQ or AWQ) does.
        size = None if merged.group_size == -1 else merged.group_size
        if self.is_awq:
            return awq_config.Weights(size, merged.sym)
        zeros_minus_one = self.packing_format not in ("auto_round", "auto_round:gptqmodel")
        return gptq_config.Weights(
            merged.bits, size, merged.sym, ordered=True, zeros_minus_one=zeros_minus_one
        )

    def has_override(self, name: str) -> bool:
        """Return whether ``extra_config`` lists the layer, as an lm_head must be listed."""
        return name in (self.extra_config or {})

    def _override(self, name: str) -> Override | None:
        """Return the override of the layer ``name``, or None if the layer is not quantized."""
        if any(re.search(pattern, name) for pattern in self.modules_to_not_convert or ()):
            return None
        overrides = self.extra_config or {}
        if name in overrides:
            return overrides[name]
        blocks = self._blocks()
        if blocks is not None and not name.startswith(blocks):
            # A layer outside the blocks is quantized only if exporters list its full name.
            return None
        for pattern, override in overrides.items():
            # A plain layer name must match exactly; its dots are not regex wildcards.
            if not re.fullmatch(r"[\w.-]+", pattern) and re.search(pattern, name):
                return override
        return Override()

    def _blocks(self) -> tuple[str, ...] | None:
        """Return the name prefixes of quantized blocks, or None if all layers are quantized."""
        listed = self.quant_block_list or self.block_name_to_quantize or self.to_quant_block_names
        if not listed:
            return None
        entries = listed.split(",") if isinstance(listed, str) else listed
        flat = [n for entry in entries for n in ([entry] if isinstance(entry, str) else entry)]
        return tuple(name.strip() for name in flat)
