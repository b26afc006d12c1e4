"""The quantization contract: a scheme per checkpoint, a method per layer with weights.

Dimensions: E experts, H hidden size, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interposer._contract.layer import Site
from interposer._contract.verdict import Verdict

Call = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A kernel, and its operands, which follow the first argument of the call."""


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The form in which a checkpoint requires keys and values to be cached.

    Attributes:
        dtype: of the stored values, which are divided by a scale and rounded.
        head_scales: one scale per kv head instead of one for all.
        scale_names: names of the tensors with the scales of keys and of values, ``[1]`` or ``[K]``
            float32, below the module that holds the projections.
    """

    dtype: torch.dtype
    head_scales: bool = False
    scale_names: tuple[str, str] = ("k_scale", "v_scale")


class LinearMethod(ABC):
    """Stores and applies the weights of one linear layer.

    Attributes:
        input_codes: dtype to which the previous layer can quantize inputs with one scale, known
            after ``create_weights``; None if impossible.
        takes_codes: inputs arrive quantized with the scale that is the first operand. The previous
            layer sets this flag, before weights are loaded.
        parts_agree: ``finalize`` requires equal numbers, such as input scales, in all fused layers.
        quantizes_plain_weights: ``create_weights`` registers ``weight`` ``[O, I]`` in the dtype of
            the model, and ``finalize`` quantizes it.
    """

    input_codes: torch.dtype | None = None
    takes_codes: bool = False
    parts_agree: bool = False
    quantizes_plain_weights: bool = False

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the parameters under the names that checkpoints use.

        These attributes of a parameter control loading:

        - ``shard_dim``: dimension along which the rows of fused layers are concatenated; 0 by
          default.
        - ``parts``: the fused layers that have the parameter, if not all do.
        - ``per_part``: if true, each of the layers fused there has an equal part of the parameter,
          such as one number.
        - ``stored_as``: full name of the checkpoint's tensor, if different from the layer's name
          with the parameter's name. With ``any_form`` also true, the tensor keeps its stored shape
          and dtype.
        - ``passing``: if true, ``finalize`` may receive the checkpoint's own memory as the
          parameter, and must neither write to nor keep that memory.
        - ``sample``: draws valid values from a generator, if not every number is valid.
        - ``default``: number, or function without arguments that returns a tensor of the
          parameter's shape, for a parameter that a checkpoint may leave out. The default also
          applies to single fused layers.
        - ``num_groups``: if ranks hold shards of the layer, the number of input groups, for a
          parameter whose entries are indices of groups.
        - ``states_sizes``: if true, the parameter holds sizes of the layer, which ``sample``
          returns.
        """

    @abstractmethod
    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return ``(kernel, operands)`` of the layer, whose output is ``kernel(x, *operands)``.

        Called as soon as all weights of the layer are loaded; frees parameters that the operands
        replace. To update weights, ``finalize`` is called again on a copy of the layer with the
        new weights: data that depends on weights must be stored in ``layer`` or in the operands,
        never in the method. Operands of the same form are then written in place.

        Raises: CheckpointError: a parameter has values from which no weight can be computed.
        """

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 weight ``[O, I]`` that the loaded parameters represent.

        The conformance suite compares the layer with the matmul with this weight, plus the
        parameter ``bias``. The default, None, leaves the values unchecked. Called before
        ``finalize``.
        """
        return None

    def dequantized_input(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the float64 input ``[..., I]`` that the layer multiplies for ``x``.

        Methods that quantize activations override this; the default is ``x`` in float64. Called
        before ``finalize``.
        """
        return x.double()

    def dequantizable(self) -> Verdict:
        """Tell whether the op ``linear`` with the weight of ``dequantized`` may replace the method.

        The replacement happens if the chosen kernel of this method is only the op's reference. The
        weight is then dequantized once, on the host, rounded to the model's dtype, and replaces the
        parameters that ``finalize`` has checked. The default accepts a method that overrides
        ``dequantized`` and leaves inputs unchanged. Called after ``create_weights``.
        """
        if type(self).dequantized_input is not LinearMethod.dequantized_input:
            return Verdict.refuse("the method changes inputs before it multiplies them")
        return _states_weight(type(self).dequantized is not LinearMethod.dequantized)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The static facts of one layer's routed experts, each a gated MLP.

    Attributes:
        top_k: experts per token.
        activation: as the op ``fused_experts`` names it.
        biased: both projections have a bias.
        alternating: gate and up outputs of the first projection alternate; otherwise all gates come
            first.
        inputs_first: unquantized matrices are stored as ``[E, inputs, outputs]``.
        projections: names of the gate, up and down projections, if checkpoints store the
            unquantized matrices one by one: ``0.gate_proj.weight`` and so on.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: str
    biased: bool = False
    alternating: bool = False
    inputs_first: bool = False
    projections: tuple[str, str, str] | None = None

    def dims(self) -> dict[str, int | float | str | bool]:
        """Return the dims that requests for experts' ops state, by the same names."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "activation": self.activation,
            "biased": self.biased,
        }


class ExpertsMethod(ABC):
    """Stores and applies the weights of one layer's routed experts."""

    @abstractmethod
    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register the parameters under the names that checkpoints use.

        Attributes of parameters are as in ``LinearMethod.create_weights``, without the ones for
        fused layers. If checkpoints store every matrix separately, ``expert_parts`` of a parameter
        ``[E, rows, ...]`` lists the names of an expert's matrices in the parameter, in order, with
        the rows of each, and ``expert_tensor`` the name of the tensor, if not ``weight``.
        Submodules that are added to ``layer`` instead are loaded and finalized separately.

        Raises: ConfigError: the method does not support experts of such sizes.
        """

    @abstractmethod
    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return ``(kernel, operands)`` of the experts; each call of the kernel adds a routing.

        The call is ``kernel(x, *operands, weights, expert_ids, activation)``, as for the op
        ``fused_experts``. Everything else is as in ``LinearMethod.finalize``.

        Raises: CheckpointError: a parameter has values from which no weight can be computed.
        """

    def dequantized(self, layer: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``.

        With the parameters ``gate_up_proj_bias`` and ``down_proj_bias``, if present, as stored,
        these matrices define the layer's result. The default, None, leaves the values unchecked.
        Called before ``finalize``.
        """
        return None


class EmbeddingMethod(ABC):
    """Stores a table of token embeddings for lookups and, for a tied head, for matmuls.

    A head that shares the table has no other weight: lookup and matmul read the same stored form.
    """

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register the parameters under the names that checkpoints use.

        Attributes of parameters are as in ``LinearMethod.create_weights``, without the ones for
        fused layers.

        Args:
            head: the site of the head that shares the table, None without one.
        Raises: ConfigError: the method does not support tables of such sizes.
        """

    @abstractmethod
    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return ``(kernel, operands)`` of the lookup, and of the matmul for a head.

        ``kernel(token_ids, *operands)`` returns rows ``[T, H]``, the stored values rounded to the
        model's dtype; ``kernel(hidden, *operands)`` returns the logits ``[T, V]``. Everything else
        is as in ``LinearMethod.finalize``.

        Raises: CheckpointError: a parameter has values from which no weight can be computed.
        """

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 table ``[V, H]`` that the loaded parameters represent, if known.

        Called before ``finalize``.
        """
        return None

    def dequantizable(self) -> Verdict:
        """Tell whether the table of ``dequantized`` may replace the parameters, for a tied head.

        As in ``LinearMethod.dequantizable``.
        """
        return _states_weight(type(self).dequantized is not EmbeddingMethod.dequantized)


class QuantizationScheme(ABC):
    """Parses a checkpoint's ``quantization_config`` and assigns methods to layers."""

    method: ClassVar[str]

    @classmethod
    @abstractmethod
    def parse(cls, settings: Mapping[str, Any]) -> QuantizationScheme:
        """Parse the content of ``quantization_config``.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """

    @abstractmethod
    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the linear layer at ``prefix``, or None for no quantization.

        Args:
            parts: names of the checkpoint's layers that are fused there, such as ``("q_proj",
                "k_proj", "v_proj")``; one name if nothing is fused.
        """

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the routed experts at ``prefix``; None if unquantized."""
        return None

    def restored(
        self, tensors: Iterator[tuple[str, Tensor]], places: Container[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a checkpoint's tensors; dequantize tensors with scales that no method can store.

        Args:
            tensors: the checkpoint's tensors by name.
            places: names of the parameters that the methods registered.
        """
        return tensors

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for an untied head at ``prefix``; None if unquantized.

        For a head that shares the embedding's table, ``embedding_method`` is called instead.
        """
        return None

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for the embedding table at ``prefix``; None if unquantized.

        Args:
            head: prefix of the head that shares the table, None without one.
        """
        return None

    def cache_format(self, prefix: str) -> CacheFormat | None:
        """Return the cache format of the attention at ``prefix``; None if unquantized."""
        return None


def _states_weight(has_dequantized: bool) -> Verdict:
    return (
        Verdict.accept() if has_dequantized else Verdict.refuse("the method has no 'dequantized'")
    )
