"""The settings of a decoder, read from a checkpoint's config.json and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from interposer.errors import (
    CheckpointError,
    ConfigError,
    UnknownNameError,
    UnsupportedModelError,
    nearest_first,
)
from interposer_ops.experts import SWIGLU_ALPHA, SWIGLU_LIMIT
from interposer_ops.rotary import rotary_frequencies

# Far above any model; a product of two still fits a tensor.
Positive = Annotated[int, Field(gt=0, le=2**24)]
_LARGEST_TENSOR = 2**48
# Fields that newer configs call otherwise.
_OLDER_NAMES = {
    "rope_parameters": "rope_scaling",
    "dtype": "torch_dtype",
    "num_local_experts": "num_experts",
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """The routed experts of one architecture: their names in a checkpoint, and their formula.

    Attributes:
        activation: as the op ``fused_experts`` names it.
        renormalize: weights of the chosen experts add up to 1; None asks ``norm_topk_prob``.
        biased: the router and both projections of the experts have biases.
        alternating: outputs of the first projection are stored in turn, each gate before its other.
        inputs_first: plain matrices are stored with the inputs before the outputs.
        block: what checkpoints call the whole of it, in place of the perceptron.
        router: what they call the router.
        projections: what they call the matrices of an expert, where each is stored by itself.
    """

    activation: str
    renormalize: bool | None
    biased: bool = False
    alternating: bool = False
    inputs_first: bool = False
    block: str = "mlp"
    router: str = "router"
    projections: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """The differences of one architecture from the parametric decoder's defaults.

    Attributes:
        qkv_bias: the Q, K and V projections have a bias; None asks the config's attention_bias.
        qk_norm: queries and keys are normalised per head.
        windowed: layers slide unless ``use_sliding_window`` or ``layer_types`` say otherwise.
        window_everywhere: layers that slide do so from the first on, whatever
            ``max_window_layers`` says.
        alternating: every second layer slides, the first one among them, unless ``layer_types``
            says otherwise.
        sinks: a learned score per head joins every softmax.
        mixture: experts in place of the one perceptron.
        defaults: of fields that the config may leave out, unlike those of all architectures.
    """

    qkv_bias: bool | None = None
    qk_norm: bool = False
    windowed: bool = False
    window_everywhere: bool = False
    alternating: bool = False
    sinks: bool = False
    mixture: Mixture | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits(),
    "MistralForCausalLM": Traits(windowed=True),
    "Qwen2ForCausalLM": Traits(qkv_bias=True),
    "Qwen3ForCausalLM": Traits(qk_norm=True, defaults={"head_dim": 128}),
    "MixtralForCausalLM": Traits(
        windowed=True,
        mixture=Mixture(
            "silu",
            True,
            block="block_sparse_moe",
            router="gate",
            projections=("w1", "w3", "w2"),
        ),
        defaults={
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "Qwen3MoeForCausalLM": Traits(
        qk_norm=True,
        window_everywhere=True,
        mixture=Mixture(
            "silu", None, router="gate", projections=("gate_proj", "up_proj", "down_proj")
        ),
        defaults={
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_local_experts": 128,
        },
    ),
    "GptOssForCausalLM": Traits(
        alternating=True,
        sinks=True,
        mixture=Mixture("swiglu_oai", True, biased=True, alternating=True, inputs_first=True),
        defaults={
            "attention_bias": True,
            "dtype": "bfloat16",
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
    ),
}


class DecoderConfig(BaseModel):
    """The fields of config.json that shape a decoder, by their Hugging Face names.

    Properties state what follows from them together with the architecture.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    architecture: str
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Annotated[int, Field(gt=0, le=10_000)]
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    vocab_size: Positive
    max_position_embeddings: Positive
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("rope_parameters", "rope_scaling")
    )
    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    num_local_experts: Positive | None = Field(
        default=None, validation_alias=AliasChoices("num_local_experts", "num_experts")
    )
    num_experts_per_tok: Positive | None = None
    moe_intermediate_size: Positive | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Positive = 1
    mlp_only_layers: tuple[int, ...] = ()
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT
    sliding_window: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int = 0
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    dtype: str = Field(default="float32", validation_alias=AliasChoices("dtype", "torch_dtype"))
    quantization_config: dict[str, Any] | None = None

    @property
    def traits(self) -> Traits:
        """The architecture's differences from the defaults."""
        return ARCHITECTURES[self.architecture]

    @property
    def num_kv_heads(self) -> int:
        """Heads that keys and values have."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        derived = self.hidden_size // self.num_attention_heads
        return self.head_dim or derived

    @property
    def rotary_size(self) -> int:
        """Elements of each head that are rotated."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def qkv_bias(self) -> bool:
        """True if the Q, K and V projections have a bias."""
        fixed = self.traits.qkv_bias
        return self.attention_bias if fixed is None else fixed

    @property
    def expert_size(self) -> int:
        """Intermediate size of an expert."""
        return self.moe_intermediate_size or self.intermediate_size

    def mixture_of(self, index: int) -> Mixture | None:
        """Return the mixture of layer ``index``; None if it has one MLP."""
        is_sparse = (
            index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0
        )
        return self.traits.mixture if is_sparse else None

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """``rope_type`` and its parameters."""
        # A yarn config without it means that max_position_embeddings is the original length.
        original = {"original_max_position_embeddings": self.max_position_embeddings}
        return {**original, **self.rope_parameters}

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer in tokens, None where a layer sees everything."""
        window = self.sliding_window
        if self.layer_types is not None:
            return tuple(window if t == "sliding_attention" else None for t in self.layer_types)
        if self.traits.alternating:
            return tuple(None if i % 2 else window for i in range(self.num_hidden_layers))
        switch = self.use_sliding_window
        if not (self.traits.windowed if switch is None else switch):
            window = None
        whole = switch is None or self.traits.window_everywhere
        first = 0 if whole else self.max_window_layers
        return tuple(window if i >= first else None for i in range(self.num_hidden_layers))

    @model_validator(mode="before")
    @classmethod
    def _flatten_rope(cls, fields: Any) -> Any:
        """Lift the fields inside of rope_parameters of newer configs to their older places."""
        rope = fields.get("rope_parameters", fields.get("rope_scaling"))
        if isinstance(rope, dict):
            inner = {n: rope[n] for n in ("rope_theta", "partial_rotary_factor") if n in rope}
            return {**fields, **inner}
        return fields

    @model_validator(mode="after")
    def _coherent(self) -> DecoderConfig:
        heads, kv_heads, types = self.num_attention_heads, self.num_kv_heads, self.layer_types
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if any(isinstance(value, dict) for value in self.rope_parameters.values()):
            raise ValueError("rope_parameters of single layer types are not supported")
        if heads * self.head_size > 2**24:
            raise ValueError(f"{heads} heads of {self.head_size} are more than a model can have")
        if self.rotary_size <= 0 or self.rotary_size % 2:
            raise ValueError(
                f"the rotated part of a head is {self.rotary_size}, must be positive and even"
            )
        if types is not None and len(types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(types)} of {self.num_hidden_layers} layers")
        if types is not None and "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("layer_types has sliding layers, but sliding_window is missing")
        if self.traits.mixture is not None:
            self._check_mixture()
        return self

    def _check_mixture(self) -> None:
        num_experts, top_k = self.num_local_experts, self.num_experts_per_tok
        if num_experts is None or top_k is None:
            raise ValueError("num_local_experts and num_experts_per_tok must be numbers")
        if top_k > num_experts:
            raise ValueError(f"num_experts_per_tok {top_k} exceeds num_local_experts {num_experts}")
        if num_experts * self.hidden_size * self.expert_size > _LARGEST_TENSOR:
            sizes = f"{self.hidden_size} x {self.expert_size}"
            raise ValueError(f"{num_experts} experts of {sizes} are more than a model can have")
        mixture = self.traits.mixture
        if mixture is not None and mixture.activation == "silu" and self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}, experts compute with 'silu'")
        for name, computed in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if getattr(self, name) != computed:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, experts compute with {computed}"
                )

    @classmethod
    def parse(cls, raw: Mapping[str, Any], path: object) -> DecoderConfig:
        """Return the config that the contents of config.json describe.

        Raises:
            UnsupportedModelError: the architecture is not among ``ARCHITECTURES``.
            CheckpointError: a field is missing, mistyped or contradictory.
        """
        fields = {name: value for name, value in raw.items() if value is not None}
        fields["architecture"] = _architecture(raw, path)
        fields |= {
            name: value
            for name, value in ARCHITECTURES[fields["architecture"]].defaults.items()
            if not raw.keys() & {name, _OLDER_NAMES.get(name)}
        }
        try:
            config = cls.model_validate(fields)
            rotary_frequencies(config.rotary_size, config.rope_theta, config.rope_scaling)
            return config
        except UnknownNameError:
            raise
        except ConfigError as error:
            raise CheckpointError(path, f"rope_parameters: {error}", "mend the field") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            given = f" (got {first['input']!r})" if place and first["type"] != "missing" else ""
            reason = f"{place or 'config'}: {first['msg']}{given}"
            raise CheckpointError(path, reason, "mend the field") from error


def _architecture(raw: Mapping[str, Any], path: object) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(path, "the field 'architectures' is missing, so the model is unknown")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return str(name)
    listed = ", ".join(nearest_first(str(names[0]), ARCHITECTURES))
    raise UnsupportedModelError(
        path, f"architecture {names[0]!r} is not supported; supported are {listed}"
    )
