"""``InterposerConfig``: the configuration by which transformers quantizes with interposer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers.utils.quantization_config import QuantizationConfigMixin

from interposer import current_registry
from interposer.errors import ConfigError
from interposer_models._online_quantization import TRANSFORMERS_METHOD, quantization_settings


class InterposerConfig(QuantizationConfigMixin):
    """The ``quantization_config`` that makes ``from_pretrained`` quantize plain weights.

    Attributes:
        method: a method of ``load(..., quantization=...)``: ``"int8"``, ``"int4"``, ``"w4a8"``,
            ``"fp8"``, or one of a plugin. Settings of the method are attributes, too.
    """

    def __init__(self, method: str | Mapping[str, Any], **settings: Any) -> None:
        """Check the method; its settings are checked when a model is loaded.

        Args:
            method: a name, or settings with the name as ``quant_method``, as for ``load``.
            settings: of the method, such as ``group_size`` or ``modules_to_not_convert``.
        Raises:
            UnknownNameError: no installed plugin quantizes by this method.
            ConfigError: no method is given.
        """
        settings.pop("quant_method", None)  # in a config.json, the name of this class's method
        if isinstance(method, Mapping):
            settings = {**method, **settings}
            method = settings.pop("quant_method", None)
        if reserved := settings.keys() & {"method"}:
            raise ConfigError(f"{sorted(reserved)} is set twice")
        method_and_settings = {"quant_method": method, **settings}
        quantization_settings(method_and_settings, None, current_registry(), "")
        # transformers has an enum of its own methods here, but also accepts a string.
        self.quant_method = cast("Any", TRANSFORMERS_METHOD)
        self.method = str(method)
        self.__dict__.update(settings)

    @property
    def settings(self) -> dict[str, Any]:
        """The method and its settings, as an argument for ``load(..., quantization=...)``."""
        fields = self.to_dict()
        del fields["quant_method"]
        return {"quant_method": fields.pop("method"), **fields}
