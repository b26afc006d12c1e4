"""The ``quantization_config`` of torchao checkpoints, as far as it is read.

torchao tells its configuration objects as ``{"_type": name, "_version": number, "_data": fields}``.

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
    """Storage of the weights of a layer, in 8 bits each.

    Attributes:
        inputs_per_scale: the group size; None where one scale holds for a whole output.
        symmetric: every zero point is 0; there are none for floats.
        kind: of the numbers.
        inputs: what is done with inputs: nothing, or they are quantized to numbers of that kind
            with a scale per token and, if asymmetric, a zero point.
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


class Place(SettingsModel):
    """The fields of a granularity."""

    dim: Literal[-1] | None = None
    axis: Literal[0] | None = None
    group_size: PositiveInt | None = None


class Granularity(SettingsModel):
    """The weights that share a scale: those of a row, or of a group in it."""

    type_: Literal["PerRow", "PerAxis", "PerGroup"] = Field(alias="_type")
    version: Literal[1] = Field(1, alias="_version")
    data: Place = Field(alias="_data")

    @model_validator(mode="after")
    def _coherent(self) -> Granularity:
        if (self.type_ == "PerGroup") != (self.data.group_size is not None):
            raise ValueError(f"group_size goes with PerGroup and no other, found {self.type_}")
        return self


class Member(SettingsModel):
    """A member of an enumeration, or a dtype of torch."""

    type_: str = Field(alias="_type")
    data: str = Field(alias="_data")


class Packing(Member):
    """The layout of packed integers."""

    data: Literal["UNPACKED_TO_INT8"] = Field(alias="_data")


class WeightDtype(Member):
    """The dtype of integers; all are stored in 8 bits."""

    data: Literal["int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8"] = Field(
        alias="_data"
    )


class Int8Fields(SettingsModel):
    """The fields of ``Int8WeightOnlyConfig``."""

    granularity: Granularity
    group_size: None = None
    set_inductor_config: bool | None = None


class IntxFields(SettingsModel):
    """The fields of ``IntxWeightOnlyConfig``."""

    granularity: Granularity
    weight_dtype: WeightDtype
    mapping_type: Member
    intx_packing_format: Packing
    # How scales were found, and what they were rounded to, does not change what they mean.
    intx_choose_qparams_algorithm: Member | None = None
    scale_dtype: Member | None = None


class Int8WeightOnly(SettingsModel):
    """Symmetric weights of 8 bits."""

    type_: Literal["Int8WeightOnlyConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Int8Fields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage of weights, with zero points of 0."""
        return Weights(self.data.granularity.data.group_size, symmetric=True)


class IntxWeightOnly(SettingsModel):
    """Weights of 1 to 8 bits, in 8 bits each."""

    type_: Literal["IntxWeightOnlyConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: IntxFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return how weights are stored."""
        symmetric = self.data.mapping_type.data != "ASYMMETRIC"
        return Weights(self.data.granularity.data.group_size, symmetric)


class InputMapping(Member):
    """Return whether inputs have zero points."""

    data: Literal["SYMMETRIC", "ASYMMETRIC"] = Field(alias="_data")


class AsymmetricInputs(Member):
    """Inputs that have zero points."""

    data: Literal["ASYMMETRIC"] = Field(alias="_data")


class Row(Granularity):
    """One scale per row."""

    type_: Literal["PerRow"] = Field(alias="_type")


Rows = Annotated[list[Row], Field(min_length=2, max_length=2)]
"""One scale per row, of inputs and of weights."""


class Int8DynamicFields(SettingsModel):
    """The fields of ``Int8DynamicActivationInt8WeightConfig``."""

    act_mapping_type: InputMapping
    granularity: Row | Rows | None = None
    weight_only_decode: Literal[False] | None = None
    reduce_range: Literal[False] | None = None
    set_inductor_config: bool | None = None


class Int8Dynamic(SettingsModel):
    """Symmetric weights of 8 bits, and inputs that are quantized per token."""

    type_: Literal["Int8DynamicActivationInt8WeightConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Int8DynamicFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return the storage of weights, with zero points of 0."""
        symmetric = self.data.act_mapping_type.data == "SYMMETRIC"
        inputs: Literal["symmetric", "asymmetric"] = "symmetric" if symmetric else "asymmetric"
        return Weights(None, symmetric=True, inputs=inputs)


class IntxDynamicFields(SettingsModel):
    """The fields of ``Int8DynamicActivationIntxWeightConfig``."""

    weight_granularity: Granularity
    weight_dtype: WeightDtype
    weight_mapping_type: Member
    weight_scale_dtype: Member | None = None
    act_mapping_type: AsymmetricInputs
    intx_packing_format: Packing
    intx_choose_qparams_algorithm: Member | None = None


class IntxDynamic(SettingsModel):
    """Weights of 1 to 8 bits, in 8 bits each, and inputs that are quantized per token."""

    type_: Literal["Int8DynamicActivationIntxWeightConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: IntxDynamicFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return how weights are stored."""
        symmetric = self.data.weight_mapping_type.data != "ASYMMETRIC"
        size = self.data.weight_granularity.data.group_size
        return Weights(size, symmetric, inputs="asymmetric")


class Float8Dtype(Member):
    """A dtype of 8-bit floats."""

    data: Literal["float8_e4m3fn"] = Field(alias="_data")


class PlainPacking(Member):
    """Numbers one after the other."""

    data: Literal["PLAIN"] = Field(alias="_data")


class Float8WeightFields(SettingsModel):
    """The fields of ``Float8WeightOnlyConfig``."""

    weight_dtype: Float8Dtype
    granularity: Row | None = None
    set_inductor_config: bool | None = None


class Float8WeightOnly(SettingsModel):
    """Weights of 8-bit floats."""

    type_: Literal["Float8WeightOnlyConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Float8WeightFields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return how weights are stored."""
        return Weights(None, symmetric=True, kind="float8")


class Float8Fields(SettingsModel):
    """The fields of ``Float8DynamicActivationFloat8WeightConfig``."""

    granularity: Rows
    activation_dtype: Float8Dtype
    weight_dtype: Float8Dtype
    packing_format: PlainPacking
    activation_value_lb: None = None
    activation_value_ub: None = None
    # How the library multiplies.
    alg_id: int | None = None
    kernel_preference: Member | None = None
    mm_config: dict[str, Any] | None = None
    set_inductor_config: bool | None = None


class Float8(SettingsModel):
    """Weights of 8-bit floats, and inputs that are quantized per token."""

    type_: Literal["Float8DynamicActivationFloat8WeightConfig"] = Field(alias="_type")
    version: Literal[2] = Field(alias="_version")
    data: Float8Fields = Field(alias="_data")

    @property
    def weights(self) -> Weights:
        """Return how weights are stored."""
        return Weights(None, symmetric=True, kind="float8", inputs="symmetric")


Configuration = Annotated[
    Int8WeightOnly | IntxWeightOnly | Int8Dynamic | IntxDynamic | Float8WeightOnly | Float8,
    Field(discriminator="type_"),
]


class Settings(LayersLeftOut):
    """The whole ``quantization_config``."""

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["torchao"] = "torchao"
    quant_type: dict[Literal["default"], Configuration] = Field(min_length=1)
    include_input_output_embeddings: Literal[False] | None = None
    untie_embedding_weights: Literal[False] | None = None

    def stored(self, name: str) -> Weights | None:
        """Return how the linear layer ``name`` is stored, or None if it is left out."""
        return None if self.leaves_out(name) else self.quant_type["default"].weights
