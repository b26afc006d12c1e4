"""Supported fields of the ``quantization_config`` of GPTQ checkpoints.

Names, defaults and the order in which ``dynamic`` patterns match follow transformers 5 and
GPTQModel 5; AutoGPTQ, optimum and auto-round write the same names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from interposer_quantization._settings_model import (
    SEARCH_SETTINGS,
    GroupSize,
    SettingsModel,
    check_regex,
)

_SUPPORTED = """\
Supported: bits 4 or 8; any group_size that divides the inputs, -1 for all of them; sym and \
desc_act either way; checkpoint_format 'gptq' or 'gptq_v2', packed in int32; modules_in_block_to_\
quantize; dynamic with bits, group_size, sym and desc_act; lm_head either way.
Try: quantize the original model that way"""

# Settings for other runtimes; they do not affect decoding.
_RUNTIME = frozenset(
    {
        "backend",
        "disable_exllama",
        "hyb_act",
        "model_file_base_name",
        "model_name_or_path",
        "offload_to_disk",
        "use_cuda_fp16",
        "use_exllama",
    }
)

_SKIPPED, _OVERRIDDEN = "-:", "+:"


def _pattern(text: str) -> str:
    check_regex(text.removeprefix(_SKIPPED).removeprefix(_OVERRIDDEN))
    return text


Bits = Literal[4, 8]
Format = Literal["gptq", "gptq_v2"]
Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression for the start of a layer's name. The prefix ``-:`` leaves matching layers
unquantized; ``+:`` or no prefix overrides their settings."""


class Override(SettingsModel):
    """Settings that override the defaults for the layers that a pattern matches."""

    bits: Bits | None = None
    group_size: GroupSize | None = None
    sym: bool | None = None
    desc_act: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_search(cls, settings: object) -> object:
        """Remove calibration settings, which GPTQModel repeats for the lm_head."""
        if not isinstance(settings, Mapping):
            return settings
        return {name: value for name, value in settings.items() if name not in SEARCH_SETTINGS}


@dataclass(frozen=True, slots=True)
class Weights:
    """Bits, group size, zero points and order of groups of one layer's stored weight.

    Attributes:
        inputs_per_scale: the group size; None if one group covers all inputs.
        symmetric: every zero point is the midpoint.
        ordered: groups are consecutive; None if the tensor ``g_idx`` decides.
        zeros_minus_one: the checkpoint stores each zero point minus one.
    """

    bits: int
    inputs_per_scale: int | None
    symmetric: bool
    ordered: bool | None
    zeros_minus_one: bool

    def __str__(self) -> str:
        size = self.inputs_per_scale
        grouped = "per output" if size is None else f"per group of {size} inputs"
        kind = "symmetric" if self.symmetric else "asymmetric"
        order = {True: "desc_act false", False: "desc_act true", None: "desc_act not stated"}
        return f"{self.bits} bits {grouped}, {kind}, {order[self.ordered]}"


class Settings(SettingsModel):
    """The fields of ``quantization_config`` that change how tensors are decoded."""

    supported: ClassVar[str] = _SUPPORTED
    without_effect: ClassVar[Collection[str]] = SEARCH_SETTINGS | _RUNTIME
    quant_method: Literal["gptq"] = "gptq"
    method: Literal["gptq"] | None = None
    bits: Bits
    group_size: GroupSize = 128
    sym: bool = True
    desc_act: bool | None = None
    checkpoint_format: Format | None = None
    format: Format | None = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: Literal[False] | None = None
    data_type: Literal["int"] | None = None
    lm_head: bool | None = None
    modules_in_block_to_quantize: list[list[str]] | list[str] | None = None
    dynamic: dict[Pattern, Override] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        formats = {name for name in (self.format, self.checkpoint_format) if name is not None}
        if len(formats) > 1:
            raise ValueError(
                f"format {self.format!r} contradicts checkpoint_format {self.checkpoint_format!r}"
            )
        return self

    def stored(self, name: str) -> Weights | None:
        """Return the storage format of the linear layer ``name``, or None if not quantized."""
        if not self._is_listed(name):
            return None
        override = Override()
        for pattern, pattern_override in (self.dynamic or {}).items():
            # The first pattern that matches decides, also if it excludes the layer.
            expression = pattern.removeprefix(_SKIPPED).removeprefix(_OVERRIDDEN)
            if re.match(expression, name):
                if pattern.startswith(_SKIPPED):
                    return None
                override = pattern_override
                break
        merged = self.model_copy(update=override.model_dump(exclude_none=True))
        # Older releases know only the first format and do not write its name.
        form = self.checkpoint_format or self.format or "gptq"
        return Weights(
            bits=merged.bits,
            inputs_per_scale=None if merged.group_size == -1 else merged.group_size,
            symmetric=merged.sym,
            ordered=None if merged.desc_act is None else not merged.desc_act,
            zeros_minus_one=form == "gptq",
        )

    def _is_listed(self, name: str) -> bool:
        """Return whether ``modules_in_block_to_quantize`` lists the layer."""
        if name == "lm_head":
            return bool(self.lm_head)  # the lm_head is part of no block
        listed = self.modules_in_block_to_quantize
        if listed is None:
            return True
        # Entries are names or lists of names, one list per step of the calibration.
        modules = [m for entry in listed for m in ([entry] if isinstance(entry, str) else entry)]
        return any(name == module or name.endswith(f".{module}") for module in modules)
