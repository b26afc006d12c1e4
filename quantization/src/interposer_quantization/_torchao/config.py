"""Supported fields of the ``quantization_config`` of torchao checkpoints.

torchao writes a configuration object as ``{"_type": name, "_version": number, "_data": fields}``.

Source: ``config_to_dict`` of torchao 0.18 and ``TorchAoConfig`` of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from interposer_quantization._fp8.config import LayersLeftOut
from interposer_quantization._settings_model import SettingsModel

_SUPPORTED = """\
Supported: quant_type Int8WeightOnlyConfig, IntxWeightOnlyConfig and \
Int8DynamicActivationIntxWeightConfig with the packing UNPACKED_TO_INT8, \
Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig and \
Float8DynamicActivationFloat8WeightConfig of PerRow, all of version 2 and stored as safetensors; \
layers left out by modules_to_not_convert.
Try: quantize the original model that way"""


@dataclass(frozen=True, slots=True)
class Weights:
    """Number format and groups of a layer's stored weight; every value takes 8 bits.

    Attributes:
        inputs_per_scale: the group size; None for one scale per output.
        symmetric: every zero point is 0; always true for floats.
        kind: number format of the weights.
        inputs: ``"plain"`` if inputs are not quantized; else they are quantized to the same kind
            with one scale per token, and with a zero point if asymmetric.
    """

    inputs_per_scale: int | None
    symmetric: bool
    kind: Literal["int8", "float8"] = "int8"
    inputs: Literal["plain", "symmetric", "asymmetric"] = "plain"

    def __str__(self) -> str:
        size = self.inputs_per_scale
        grouped = "per output" if size is None else f"per group of {size} inputs"
        weights = f"{self.kind} {grouped}, {'symmetric' if self.symmetric else 'asymmetric'}"
        return weights if self.inputs == "plain" else f"{weights}, with {self.inputs} inputs"


class GranularityFields(SettingsModel):
    """Fields of a torchao granularity object."""

    dim: Literal[-1] | None = None
    axis: Literal[0] | None = None
    group_size: PositiveInt | None = None


class Granularity(SettingsModel):
    """Granularity of scales: one per row, or one per group of a row."""

    type_: Literal["PerRow", "PerAxis", "PerGroup"] = Field(alias="_type")
    version: Literal[1] = Field(1, alias="_version")
    data: GranularityFields = Field(alias="_data")

    @model_validator(mode="after")
    def _coherent(self) -> Granularity:
        if (self.type_ == "PerGroup") != (self.data.group_size is not None):
            raise ValueError(f"group_size goes with PerGroup and no other, found {self.type_}")
        return self


class EnumMember(SettingsModel):
    """A serialized member of an enumeration, or a torch dtype."""

    type_: str = Field(alias="_type")
    data: str = Field(alias="_data")


class Packing(EnumMember):
    """Packing format of integers."""

    data: Literal["UNPACKED_TO_INT8"] = Field(alias="_data")


class WeightDtype(EnumMember):
    """Integer dtype of the weight; every value is stored in 8 bits."""

    data: Literal["int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8"] = Field(
        alias="_data"
    )


class Int8Fields(SettingsModel):
    """Fields of ``Int8WeightOnlyConfig``."""

    granularity: Granularity
    group_size: None = None
    set_inductor_config: bool | None = None


class IntxFields(SettingsModel):
    """Fields of ``IntxWeightOnlyConfig``."""

    granularity: Granularity
    weight_dtype: WeightDtype
    mapping_type: EnumMember
    intx_packing_format: Packing
    # The calibration method and the scales' original dtype do not affect decoding.
    intx_choose_qparams_algorithm: EnumMember | None = None
    scale_dtype: EnumMember | None = None


class Int8WeightOnly(SettingsModel):
    """Symmetric int8 weights."""

    type_: Literal["Int8WeightOnlyConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Int8Fields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage format of the weights."""
        return Weights(self.data.granularity.data.group_size, symmetric=True)


class IntxWeightOnly(SettingsModel):
    """Integer weights of 1 to 8 bits, each stored in 8 bits."""

    type_: Literal["IntxWeightOnlyConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: IntxFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage format of the weights."""
        symmetric = self.data.mapping_type.data != "ASYMMETRIC"
        return Weights(self.data.granularity.data.group_size, symmetric)


class InputMapping(EnumMember):
    """Quantization of inputs, without or with zero points."""

    data: Literal["SYMMETRIC", "ASYMMETRIC"] = Field(alias="_data")


class AsymmetricInputs(EnumMember):
    """Quantization of inputs with zero points."""

    data: Literal["ASYMMETRIC"] = Field(alias="_data")


class Row(Granularity):
    """One scale per row."""

    type_: Literal["PerRow"] = Field(alias="_type")


Rows = Annotated[list[Row], Field(min_length=2, max_length=2)]
"""Granularity of inputs and of weights: one scale per row."""


class Int8DynamicFields(SettingsModel):
    """Fields of ``Int8DynamicActivationInt8WeightConfig``."""

    act_mapping_type: InputMapping
    granularity: Row | Rows | None = None
    weight_only_decode: Literal[False] | None = None
    reduce_range: Literal[False] | None = None
    set_inductor_config: bool | None = None


class Int8Dynamic(SettingsModel):
    """Symmetric int8 weights, and inputs quantized per token."""

    type_: Literal["Int8DynamicActivationInt8WeightConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Int8DynamicFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage format of the weights, with the quantization of inputs."""
        symmetric = self.data.act_mapping_type.data == "SYMMETRIC"
        inputs: Literal["symmetric", "asymmetric"] = "symmetric" if symmetric else "asymmetric"
        return Weights(None, symmetric=True, inputs=inputs)


class IntxDynamicFields(SettingsModel):
    """Fields of ``Int8DynamicActivationIntxWeightConfig``."""

    weight_granularity: Granularity
    weight_dtype: WeightDtype
    weight_mapping_type: EnumMember
    weight_scale_dtype: EnumMember | None = None
    act_mapping_type: AsymmetricInputs
    intx_packing_format: Packing
    intx_choose_qparams_algorithm: EnumMember | None = None


class IntxDynamic(SettingsModel):
    """Integer weights of 1 to 8 bits, each stored in 8 bits, and inputs quantized per token."""

    type_: Literal["Int8DynamicActivationIntxWeightConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: IntxDynamicFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage format of the weights, with the quantization of inputs."""
        symmetric = self.data.weight_mapping_type.data != "ASYMMETRIC"
        size = self.data.weight_granularity.data.group_size
        return Weights(size, symmetric, inputs="asymmetric")


class Float8Dtype(EnumMember):
    """FP8 dtype."""

    data: Literal["float8_e4m3fn"] = Field(alias="_data")


class PlainPacking(EnumMember):
    """Unpacked layout."""

    data: Literal["PLAIN"] = Field(alias="_data")


class Float8WeightFields(SettingsModel):
    """Fields of ``Float8WeightOnlyConfig``."""

    weight_dtype: Float8Dtype
    granularity: Row | None = None
    set_inductor_config: bool | None = None


class Float8WeightOnly(SettingsModel):
    """FP8 weights; inputs are not quantized."""

    type_: Literal["Float8WeightOnlyConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Float8WeightFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage format of the weights."""
        return Weights(None, symmetric=True, kind="float8")


class Float8Fields(SettingsModel):
    """Fields of ``Float8DynamicActivationFloat8WeightConfig``."""

    granularity: Rows
    activation_dtype: Float8Dtype
    weight_dtype: Float8Dtype
    packing_format: PlainPacking
    activation_value_lb: None = None
    activation_value_ub: None = None
    # Kernel choices of torchao; they do not affect decoding.
    alg_id: int | None = None
    kernel_preference: EnumMember | None = None
    mm_config: dict[str, Any] | None = None
    set_inductor_config: bool | None = None


class Float8(SettingsModel):
    """FP8 weights, and inputs quantized per token."""

    type_: Literal["Float8DynamicActivationFloat8WeightConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Float8Fields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage format of the weights, with the quantization of inputs."""
        return Weights(None, symmetric=True, kind="float8", inputs="symmetric")


Configuration = Annotated[
    Int8WeightOnly | IntxWeightOnly | Int8Dynamic | IntxDynamic | Float8WeightOnly | Float8,
    Field(discriminator="type_"),
]


class Settings(LayersLeftOut):
    """All fields of ``quantization_config``."""

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["torchao"] = "torchao"
    quant_type: dict[Literal["default"], Configuration] = Field(min_length=1)
    include_input_output_embeddings: Literal[False] | None = None
    untie_embedding_weights: Literal[False] | None = None

    def stored(self, name: str) -> Weights | None:
        """Return the storage format of the linear layer ``name``, or None if excluded."""
        return None if self.leaves_out(name) else self.quant_type["default"].weights
