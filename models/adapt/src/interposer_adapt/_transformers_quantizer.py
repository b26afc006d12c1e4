"""The quantization method ``"interposer"`` of transformers: config, quantizer, and registration.

Source: transformers 5.23, ``quantizers/base.py`` (the methods and the order of their calls),
    ``quantizers/auto.py`` (names can be registered once).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from interposer import Placement, Resolver, current_registry, effective_config, place
from interposer.errors import ConfigError, UnknownNameError
from interposer_adapt._quantized_modules import quantize_modules
from interposer_engine.parts import TRANSFORMERS_METHOD, quantization_settings


class InterposerConfig(QuantizationConfigMixin):
    """The ``quantization_config`` that makes ``from_pretrained`` quantize plain weights.

    Attributes:
        method: a method of ``load(..., quantization=...)``: ``"int8"``, ``"int4"``, ``"w4a8"``,
            ``"fp8"``, or one of a plugin. Settings of the method are attributes, too.
    """

    def __init__(self, method: str | Mapping[str, Any], **settings: Any) -> None:
        """Check the name of the method; its settings are checked when a model is loaded.

        Args:
            method: a name, or settings with the name as ``quant_method``, as for ``load``.
            settings: settings of the method, such as ``group_size`` or ``modules_to_not_convert``.
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
        """The quantization settings in the form of ``load(..., quantization=...)``."""
        fields = self.to_dict()
        del fields["quant_method"]
        return {"quant_method": fields.pop("method"), **fields}


class InterposerQuantizer(HfQuantizer):
    """Quantizes linear layers after transformers has loaded the plain weights.

    Attributes:
        resolver: chose the kernels; ``interposer.explain(model.hf_quantizer)`` lists them.
        quantized: names of the modules with quantized weights.
    """

    quantization_config: InterposerConfig
    # A checkpoint that names this method still stores plain weights.
    requires_calibration = False

    def __init__(self, quantization_config: InterposerConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        config = effective_config(None)
        self.placement: Placement = place(config)
        self.resolver: Resolver = Resolver.at(self.placement, config)
        self.quantized: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device on which weights are quantized and used."""
        return torch.device(self.placement.device.torch_device)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Choose the quantization scheme, before any weight is read.

        Raises:
            UnknownNameError: no installed plugin quantizes by this method.
            ConfigError: a setting is invalid, or the device map names another device.
        """
        settings = quantization_settings(
            self.quantization_config.settings, None, self.resolver.registry, ""
        )
        assert settings is not None, "a method was asked for"
        self.resolver.choose_scheme(settings)
        device_map = kwargs.get("device_map")
        named_devices = {torch.device(d) for d in (device_map or {}).values() if d != "disk"}
        other_devices = named_devices - {self.device}
        if other_devices or (isinstance(device_map, dict) and "disk" in device_map.values()):
            raise ConfigError(
                f"device_map is {device_map!r}, but weights are quantized for {self.device}, where "
                f"the platform {self.placement.platform.name!r} runs. "
                f"Try: device_map={{'': '{self.device}'}}"
            )

    def update_device_map(self, device_map: Any) -> Any:
        """Return the device map of the user, or by default the platform's device."""
        if device_map is None and self.device.type != "cpu":
            return {"": str(self.device)}
        return device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to compute in.

        Raises: UnknownNameError: the platform does not support the dtype.
        """
        supported_dtypes = self.placement.platform.dtypes(self.placement.device.torch_device)
        if dtype not in supported_dtypes:
            listed = [str(supported).removeprefix("torch.") for supported in supported_dtypes]
            where = f"on platform {self.placement.platform.name!r}"
            raise UnknownNameError("dtype", str(dtype).removeprefix("torch."), listed, where=where)
        return dtype

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        with self.placement.platform.numerics(self.resolver.config.numerics), torch.no_grad():
            self.quantized = tuple(quantize_modules(model, self.resolver))
        # Refuses rules of the config that name no module of this model.
        self.resolver.check_places()
        return model

    def is_serializable(self) -> bool:
        """Refuse to save the model, because packed weights are specific to this processor.

        transformers would only log a hint if this method returned False.

        Raises: ConfigError: always.
        """
        raise ConfigError(
            "The plain weights were given up when the model was quantized by "
            f"{self.quantization_config.method!r}, and the quantized ones are packed for this "
            "processor, so the model cannot be saved. Try: `interposer quantize PATH NEW`, "
            "which writes quantized weights that transformers loads, or copy PATH and state "
            "'quantization_config' in its config.json"
        )

    @property
    def is_trainable(self) -> bool:
        """Always False, because kernels record no gradients."""
        return False

    def __deepcopy__(self, memo: object) -> InterposerQuantizer:
        # The choices are final, so that copies can share them.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).is_serializable(self), ()


def register() -> None:
    """Register the method with transformers; repeated calls do nothing.

    Raises: ConfigError: another package registered a method of this name.
    """
    registered_config = AUTO_QUANTIZATION_CONFIG_MAPPING.get(TRANSFORMERS_METHOD)
    registered_quantizer = AUTO_QUANTIZER_MAPPING.get(TRANSFORMERS_METHOD)
    if (registered_config, registered_quantizer) == (InterposerConfig, InterposerQuantizer):
        return
    if registered_config is not None or registered_quantizer is not None:
        raise ConfigError(
            f"transformers knows the quantization method {TRANSFORMERS_METHOD!r} already, as "
            f"{registered_config or registered_quantizer}. "
            "Try: import interposer_adapt.quantizer before that package"
        )
    register_quantization_config(TRANSFORMERS_METHOD)(InterposerConfig)
    register_quantizer(TRANSFORMERS_METHOD)(InterposerQuantizer)
