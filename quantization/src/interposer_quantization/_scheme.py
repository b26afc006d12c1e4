"""Bases of the schemes: what they have of settings, of linear layers and of an lm_head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, QuantizationScheme, Site
from interposer_quantization._experts.stored import StoredExperts
from interposer_quantization._settings_model import SettingsModel
from interposer_quantization._weights.fused_layers import stored_alike


class ParsedScheme(QuantizationScheme):
    """A scheme that holds its settings.

    Attributes:
        settings_class: of the ``quantization_config``.
    """

    settings_class: ClassVar[type[SettingsModel]]

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """Return the scheme that ``quantization_config`` describes.

        Raises: ConfigError: a setting is unknown, contradictory or not supported; the text says
            what is.
        """
        return cls(cls.settings_class.parse(settings))


class StoredScheme(ParsedScheme):
    """A scheme that assigns methods by the storage of layers.

    ``stored`` of its settings returns that of the linear layer with a name, None for a plain one.

    Attributes:
        mend: what to do where fused layers are stored in different ways.
    """

    mend: ClassVar[str]

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None to leave it plain.

        Raises: ConfigError: layers that are fused there are stored in different ways.
        """
        stored = stored_alike(prefix, parts, self.settings.stored, self.mend)
        return None if stored is None else self._method(stored)

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``; it finds the storage of each."""
        return StoredExperts(self.settings.stored, self._experts_at_once)

    @abstractmethod
    def _method(self, stored: Any) -> LinearMethod:
        """Return the method for linear layers that are stored so."""

    def _experts_at_once(self, stored: Any, site: Site, spec: ExpertsSpec) -> ExpertsMethod | None:
        """Return the method of an op for all experts that are stored so; None: there is none."""
        return None


class HeadScheme(StoredScheme):
    """A scheme of checkpoints that store an lm_head as they store linear layers."""

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for a head with a weight of its own, or None to leave it plain."""
        return self.linear_method(prefix, (prefix.rpartition(".")[2],))
