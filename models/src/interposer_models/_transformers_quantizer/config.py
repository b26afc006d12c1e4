"""``InterposerConfig``: quantization by a method of interposer, as transformers configures it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers.utils.quantization_config import QuantizationConfigMixin

from interposer import current_registry
from interposer.errors import ConfigError
from interposer_models._online_quantization import TRANSFORMERS_METHOD, quantization_settings


class InterposerConfig(QuantizationConfigMixin):
    """The ``quantization_config`` by which ``from_pretrained`` quantizes plain weights.

    Attributes:
        method: what ``load(..., quantization=...)`` takes as a name: ``"int8"``, ``"int4"``,
            ``"w4a8"``, ``"fp8"``, and what plugins add. Settings of the method are attributes too.
    """

    def __init__(self, method: str | Mapping[str, Any], **settings: Any) -> None:
        """Check the method; its settings are checked when a model is loaded.

        Args:
            method: a name, or settings with the name as ``quant_method``, as ``load`` takes them.
            settings: of the method, such as ``group_size`` or ``modules_to_not_convert``.
        Raises:
            UnknownNameError: nothing that is installed quantizes by that method.
            ConfigError: no method is named.
        """
        settings.pop("quant_method", None)  # how a file names this class
        if isinstance(method, Mapping):
            settings = {**method, **settings}
            method = settings.pop("quant_method", None)
        if reserved := settings.keys() & {"method"}:
            raise ConfigError(f"{sorted(reserved)} is set twice")
        wanted = {"quant_method": method, **settings}
        quantization_settings(wanted, None, current_registry(), "")
        # A string where transformers has an enumeration of its own methods, as it takes both.
        self.quant_method = cast("Any", TRANSFORMERS_METHOD)
        self.method = str(method)
        self.__dict__.update(settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The method and its settings, as ``load(..., quantization=...)`` takes them."""
        stated = self.to_dict()
        del stated["quant_method"]
        return {"quant_method": stated.pop("method"), **stated}
