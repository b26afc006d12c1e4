"""Supported fields of the ``quantization_config`` of FP8 checkpoints.

Field names, defaults and the matching of excluded layers follow transformers 5.23
(``FineGrainedFP8Config``, ``FbgemmFp8Config``); ``fmt`` is DeepSeek's.
"""

from __future__ import annotations

import re
from reprlib import repr as shortened
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from interposer_quantization._settings_model import SettingsModel, check_regex

_SUPPORTED = """\
Supported: weights of float8_e4m3fn; 'weight_block_size' of two sizes with 'activation_scheme' \
'dynamic', or none with 'dynamic' or 'static'; layers left out by 'modules_to_not_convert'.
Try: quantize the original model that way"""
_FBGEMM_SUPPORTED = """\
Supported: 'activation_scale_ub', a positive number, and 'modules_to_not_convert'.
Try: quantize the original model that way"""
# A pattern that matches the start of a name must end at a dot or at the end of the name.
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


Pattern = Annotated[str, Field(min_length=1), AfterValidator(check_regex)]
"""The end of a layer's name, or a regular expression for its first parts."""


class LayersLeftOut(SettingsModel):
    """Settings that exclude layers from quantization, by name pattern."""

    modules_to_not_convert: list[Pattern] | None = None

    @property
    def left_out(self) -> list[str]:
        """Return the patterns of layers that are not quantized."""
        return self.modules_to_not_convert or []

    def leaves_out(self, name: str) -> bool:
        """Return whether the layer ``name`` is excluded from quantization."""
        return any(
            name.endswith(pattern) or re.match(f"(?:{pattern}){_BOUNDARY}", name)
            for pattern in self.left_out
        )

    def stored(self, name: str) -> Any:
        """Return the weight format of the linear layer ``name``, or None if excluded."""
        return None if self.leaves_out(name) else "float8_e4m3fn"


class Fp8Settings(LayersLeftOut):
    """All fields of ``quantization_config`` of the method ``fp8``."""

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["fp8"] = "fp8"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    scale_fmt: Literal["float", "ue8m0"] | None = None
    fmt: Literal["e4m3"] | None = None
    ignored_layers: list[Pattern] | None = None
    # Each of these fields is accepted only with the value that has no effect.
    modules_to_convert: Annotated[list[str], Field(max_length=0)] | None = None
    dequantize: Literal[False] | None = None
    expert_dtype: Literal["fp8"] | None = None
    kv_cache_scheme: None = None

    @model_validator(mode="after")
    def _coherent(self) -> Fp8Settings:
        if self.weight_block_size is not None and self.activation_scheme == "static":
            raise ValueError(
                "activation_scheme 'static' does not go with weight_block_size "
                f"{self.weight_block_size}; blocks take 'dynamic'"
            )
        if self.weight_block_size is None and self.scale_fmt == "ue8m0":
            raise ValueError(
                "scale_fmt 'ue8m0' goes with a weight_block_size only; without one take 'float'"
            )
        # Some writers use the older name ignored_layers, and some write both.
        exclusions = (self.modules_to_not_convert, self.ignored_layers)
        if None not in exclusions and sorted(exclusions[0] or ()) != sorted(exclusions[1] or ()):
            raise ValueError(
                f"modules_to_not_convert {shortened(exclusions[0])} and ignored_layers "
                f"{shortened(exclusions[1])} mean the same and differ; state one of them"
            )
        return self

    @property
    def left_out(self) -> list[str]:
        """Return the patterns of layers that are not quantized."""
        return self.modules_to_not_convert or self.ignored_layers or []

    @property
    def scale_names(self) -> tuple[str, str]:
        """Return the tensor names of the weight scale and of the input scale.

        transformers always writes ``weight_block_size``, even if it is null. A checkpoint without
        that field comes from AutoFP8, which uses other names.
        """
        if "weight_block_size" in self.model_fields_set:
            return "weight_scale_inv", "activation_scale"
        return "weight_scale", "input_scale"


class FbgemmSettings(LayersLeftOut):
    """All fields of ``quantization_config`` of the method ``fbgemm_fp8``."""

    supported: ClassVar[str] = _FBGEMM_SUPPORTED
    quant_method: Literal["fbgemm_fp8"] = "fbgemm_fp8"
    activation_scale_ub: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1200.0
