"""The quantization contract: a scheme per checkpoint, a method per linear layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from interposer.layer import Site

__all__ = ["LinearMethod", "QuantizationScheme"]


class LinearMethod(ABC):
    """How one linear layer stores and applies its weights."""

    @abstractmethod
    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the parameters under the names that checkpoints use.

        Rows of a fused layer lie along dimension 0 of each parameter; ``shard_dim`` of a
        parameter overrides that. A parameter whose ``per_part`` is true holds the same share
        for each of the layers that are fused there, such as one number. Where not any number may
        stand, ``sample`` of a parameter returns some that may, drawn from a generator.
        """

    @abstractmethod
    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return ``(kernel, operands)`` so that the layer computes ``kernel(x, *operands)``.

        Called once, after all weights were loaded; parameters that the operands replace are
        freed here.
        """

    def dequantized(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the float64 weight ``[O, I]`` that the loaded parameters stand for.

        It defines what the layer computes, so that the conformance suite can compare with it:
        the product with it, plus the parameter ``bias``. None, unless overridden, leaves the
        values unchecked. Called before ``finalize``.
        """
        return None

    def dequantized_input(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 input ``[..., I]`` that is multiplied by the weight for ``x``.

        ``x`` itself, unless overridden by a method that quantizes activations. Called before
        ``finalize``.
        """
        return x.double()


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
