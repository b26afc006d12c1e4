"""Base classes of the schemes: parsed settings, linear layers, routed experts and the lm_head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, QuantizationScheme, Site
from interposer_quantization._experts.stored import StoredExperts
from interposer_quantization._settings_model import SettingsModel
from interposer_quantization._weights.fused_layers import stored_alike


class ParsedScheme(QuantizationScheme):
    """A quantization scheme that holds its parsed settings.

    Attributes:
        settings_class: model that validates the ``quantization_config``.
    """

    settings_class: ClassVar[type[SettingsModel]]

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Create the scheme from a ``quantization_config``.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the message lists
            the supported settings.
        """
        return cls(cls.settings_class.parse(settings))


class StoredScheme(ParsedScheme):
    """A scheme that chooses a layer's method by the layer's storage format in the checkpoint.

    ``settings.stored(name)`` returns the storage of the linear layer ``name``, or None if the layer
    is not quantized.

    Attributes:
        mend: advice in the error for fused layers that are stored in different ways.
    """

    mend: ClassVar[str]

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None if not quantized.

        Raises: ConfigError: layers fused at ``prefix`` are stored in different ways.
        """
        stored = stored_alike(prefix, parts, self.settings.stored, self.mend)
        return None if stored is None else self._method(stored)

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for experts, which chooses by the storage format of each matrix."""
        return StoredExperts(self.settings.stored, self._fused_experts_method)

    @abstractmethod
    def _method(self, stored: Any) -> LinearMethod:
        """Return the method for linear layers in this storage format."""

    def _fused_experts_method(
        self, stored: Any, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        """Return a fused-op method for experts in this storage format, or None."""
        return None


class HeadScheme(StoredScheme):
    """A scheme of checkpoints that store the lm_head in the format of linear layers."""

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for an untied lm_head, or None to leave it unquantized."""
        # An lm_head fuses nothing: the list of parts is the name of the head.
        return self.linear_method(prefix, (prefix.rpartition(".")[2],))
