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
"""A kernel, and what it is called with behind its first argument."""


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The form in which a checkpoint wants keys and values to be cached.

    Attributes:
        dtype: of what is stored: the nearest multiples of a scale.
        head_scales: there is a scale for each kv head, not one for all.
        scale_names: names of the tensors with the scales of keys and of values, ``[1]`` or
            ``[K]`` float32, below the module that holds the projections.
    """

    dtype: torch.dtype
    head_scales: bool = False
    scale_names: tuple[str, str] = ("k_scale", "v_scale")


class LinearMethod(ABC):
    """Stores and applies the weights of one linear layer.

    Attributes:
        input_codes: dtype that inputs can be quantized to by one scale before they come, known
            after ``create_weights``; None where they cannot.
        takes_codes: they come quantized, by the scale that is the first operand. The layer before
            sets it, before weights are loaded.
        parts_agree: ``finalize`` wants numbers of fused layers to be equal, such as input scales.
    """

    input_codes: torch.dtype | None = None
    takes_codes: bool = False
    parts_agree: bool = False

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the parameters under the names that checkpoints use.

        Rows of a fused layer lie along dimension 0 of each parameter; ``shard_dim`` of a
        parameter overrides that. Where its ``parts`` names some of the fused layers, it is of
        these alone. A parameter whose ``per_part`` is true holds the same share for each of the
        layers that are fused there, such as one number. ``stored_as`` of a parameter is the full
        name of the one tensor that it holds, if that is not the layer's with the parameter's; where
        ``any_form`` is true besides, it is held in whatever shape and dtype it is stored. One whose
        ``passing`` is true may be the checkpoint's own memory while ``finalize`` reads it, which
        neither writes to it nor keeps any of it. Where not
        any number may stand, ``sample`` of a parameter returns some that may, drawn from a
        generator. A parameter that a checkpoint may leave out has a ``default``: a number, or a
        function without arguments that returns a tensor of the parameter's shape. It stands where
        nothing is stored, also for single layers of those that are fused. Where ranks hold shares
        of a layer, ``num_groups`` is of one whose entries number groups of inputs, and
        ``states_sizes`` is true of one that holds sizes of the layer, which ``sample`` returns.
        """

    @abstractmethod
    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return ``(kernel, operands)`` so that the layer computes ``kernel(x, *operands)``.

        Called as soon as all weights of the layer were loaded; parameters that the operands
        replace are freed here. It is called again, for a copy of the layer with other weights,
        whenever these are exchanged: what depends on them belongs to ``layer`` or to the
        operands, never to the method. Operands of the same form are then written in place.

        Raises: CheckpointError: a parameter holds what no weight can be computed with.
        """

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 weight ``[O, I]`` that the loaded parameters stand for.

        It defines what the layer computes, so that the conformance suite can compare with it:
        the product with it, plus the parameter ``bias``. None, unless overridden, leaves the
        values unchecked. Called before ``finalize``.
        """
        return None

    def dequantized_input(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the float64 input ``[..., I]`` that is multiplied by the weight for ``x``.

        ``x`` itself, unless overridden by a method that quantizes activations. Called before
        ``finalize``.
        """
        return x.double()

    def dequantizable(self) -> Verdict:
        """Say whether the op ``linear`` with the weight of ``dequantized`` may take over.

        It does where the kernel of this method is but the reference of its op: the weight is then
        dequantized once, on the host, rounded to the model's dtype and held instead of the
        parameters, which ``finalize`` has checked. Accepted, unless overridden, by a method that
        has ``dequantized`` and leaves inputs as they are. Called after ``create_weights``.
        """
        if type(self).dequantized_input is not LinearMethod.dequantized_input:
            return Verdict.refuse("the method changes inputs before it multiplies them")
        return _states_weight(type(self).dequantized is not LinearMethod.dequantized)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The static facts of the routed experts of one layer, each a gated perceptron.

    Attributes:
        top_k: experts that a token is sent to.
        activation: as the op ``fused_experts`` names it.
        biased: both projections have a bias.
        alternating: outputs of the first projection are stored in turn: a gate, then what it acts
            on. Without it all gates come first.
        inputs_first: plain matrices are stored ``[E, inputs, outputs]``.
        projections: names of the gates, of what they act on and of the second projection, where
            checkpoints store plain matrices one by one: ``0.gate_proj.weight`` and so on.
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
        """Return what ops of experts state of themselves, by the same names."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "activation": self.activation,
            "biased": self.biased,
        }


class ExpertsMethod(ABC):
    """Stores and applies the weights of the routed experts of one layer."""

    @abstractmethod
    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register the parameters under the names that checkpoints use.

        Attributes of parameters mean what ``LinearMethod.create_weights`` says, but for those of
        layers that are fused. Where checkpoints store every matrix by itself, ``expert_parts`` of a
        parameter ``[E, rows, ...]`` states the names of an expert's matrices that it holds, in
        order, with the rows of each, and ``expert_tensor`` which of their tensors, if that is not
        ``weight``. Layers that are added to ``layer`` instead are loaded and finalized apart.

        Raises: ConfigError: experts of these sizes cannot be stored that way.
        """

    @abstractmethod
    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return ``(kernel, operands)``, of which and of a routing the layer makes one call.

        ``kernel(x, *operands, weights, expert_ids, activation)``, in the manner of the op
        ``fused_experts``. Everything else is as in ``LinearMethod.finalize``.

        Raises: CheckpointError: a parameter holds what no weight can be computed with.
        """

    def dequantized(self, layer: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Return the float64 matrices ``[E, 2 I, H]``, gates first, and ``[E, H, I]``.

        They define what the layer computes together with the parameters ``gate_up_proj_bias`` and
        ``down_proj_bias``, if it has them, as they are stored. None, unless overridden, leaves the
        values unchecked. Called before ``finalize``.
        """
        return None


class EmbeddingMethod(ABC):
    """Stores a table of token embeddings, looks it up and, if it is tied, multiplies by it.

    A head that shares the table has no weight of its own: what is multiplied by is what is looked
    up, in whatever form it is held.
    """

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register the parameters under the names that checkpoints use.

        Attributes of parameters mean what ``LinearMethod.create_weights`` says, but for those of
        layers that are fused.

        Args:
            head: the site of the head that shares the table, None where there is none.
        Raises: ConfigError: a table of these sizes cannot be stored that way.
        """

    @abstractmethod
    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return ``(kernel, operands)`` of the lookup, and those of the product for a head.

        ``kernel(token_ids, *operands)`` returns rows ``[T, H]`` in the model's dtype, each the
        nearest to what is stored; ``kernel(hidden, *operands)`` the logits ``[T, V]``. Everything
        else is as in ``LinearMethod.finalize``.

        Raises: CheckpointError: a parameter holds what no weight can be computed with.
        """

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 table ``[V, H]`` that the loaded parameters stand for, if known.

        Called before ``finalize``.
        """
        return None

    def dequantizable(self) -> Verdict:
        """Say whether the table of ``dequantized`` may be held instead, for a head that shares it.

        As in ``LinearMethod.dequantizable``.
        """
        return _states_weight(type(self).dequantized is not EmbeddingMethod.dequantized)


class QuantizationScheme(ABC):
    """Reads a checkpoint's ``quantization_config`` and assigns methods to layers."""

    method: ClassVar[str]

    @classmethod
    @abstractmethod
    def parse(cls, settings: Mapping[str, Any]) -> QuantizationScheme:
        """Return the scheme that ``quantization_config`` describes.

        Raises: ConfigError: a setting is unknown, contradictory or not supported.
        """

    @abstractmethod
    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the linear layer at ``prefix``, or None to leave it plain.

        Args:
            parts: names of the checkpoint's layers that are fused there, such as
                ``("q_proj", "k_proj", "v_proj")``; one name where nothing is fused.
        """

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the routed experts at ``prefix``; None: they are plain."""
        return None

    def restored(
        self, tensors: Iterator[tuple[str, Tensor]], places: Container[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a checkpoint's tensors, weights for codes whose scales no method has places for."""
        return tensors

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for the head at ``prefix``, whose weight is its own; None: plain.

        A head that shares the table of the embedding is asked for by ``embedding_method``.
        """
        return None

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for the table of embeddings at ``prefix``; None: it is plain.

        Args:
            head: prefix of the head that shares the table, None where there is none.
        """
        return None

    def cache_format(self, prefix: str) -> CacheFormat | None:
        """Return how the attention at ``prefix`` stores keys and values; None: as they are."""
        return None


def _states_weight(stated: bool) -> Verdict:
    return Verdict.accept() if stated else Verdict.refuse("the method has no 'dequantized'")
