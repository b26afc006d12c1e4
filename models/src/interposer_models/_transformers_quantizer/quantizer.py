"""The quantizer that transformers asks, and its registration.

Source: transformers 5.23, ``quantizers/base.py`` (what is called, and when), ``quantizers/auto.py``
(names, which can be registered once).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from interposer import Placement, Resolver, effective_config, place
from interposer.errors import ConfigError, UnknownNameError
from interposer_models._online_quantization import TRANSFORMERS_METHOD, quantization_settings
from interposer_models._transformers_quantizer.config import InterposerConfig
from interposer_models._transformers_quantizer.module_quantization import quantize_modules


class InterposerQuantizer(HfQuantizer):
    """Quantizes a model's projections once transformers has loaded them.

    Attributes:
        resolver: made the choices; ``interposer.explain(model.hf_quantizer)`` tells them.
        quantized: names of the modules that hold quantized weights.
    """

    quantization_config: InterposerConfig
    # A folder that names this method holds plain weights all the same.
    requires_calibration = False

    def __init__(self, quantization_config: InterposerConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        config = effective_config(None)
        self.placement: Placement = place(config)
        self.resolver: Resolver = Resolver.at(self.placement, config)
        self.quantized: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """The place where weights are quantized and used."""
        return torch.device(self.placement.device.torch_device)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Choose the scheme, before a weight is read.

        Raises:
            UnknownNameError: the method is not known.
            ConfigError: it does not take the settings, or the device map names other devices.
        """
        settings = quantization_settings(
            self.quantization_config.settings, None, self.resolver.registry, ""
        )
        assert settings is not None, "a method was asked for"
        self.resolver.choose_scheme(settings)
        wanted = kwargs.get("device_map")
        others = {torch.device(d) for d in (wanted or {}).values() if d != "disk"} - {self.device}
        if others or (isinstance(wanted, dict) and "disk" in wanted.values()):
            raise ConfigError(
                f"device_map is {wanted!r}, but weights are quantized for {self.device}, where the "
                f"platform {self.placement.platform.name!r} runs. "
                f"Try: device_map={{'': '{self.device}'}}"
            )

    def update_device_map(self, device_map: Any) -> Any:
        """Return where the weights go: to the device of the platform."""
        if device_map is None and self.device.type != "cpu":
            return {"": str(self.device)}
        return device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to compute in.

        Raises: UnknownNameError: the platform does not compute in it.
        """
        offered = self.placement.platform.dtypes(self.placement.device.torch_device)
        if dtype not in offered:
            listed = [str(each).removeprefix("torch.") for each in offered]
            where = f"on platform {self.placement.platform.name!r}"
            raise UnknownNameError("dtype", str(dtype).removeprefix("torch."), listed, where=where)
        return dtype

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        with self.placement.platform.numerics(self.resolver.config.numerics), torch.no_grad():
            self.quantized = tuple(quantize_modules(model, self.resolver))
        self.resolver.check_places()
        return model

    def is_serializable(self) -> bool:
        """Raise, as transformers would answer False with a hint at the log.

        Raises: ConfigError: always.
        """
        raise ConfigError(
            f"The plain weights were given up when the model was quantized by "
            f"{self.quantization_config.method!r}, and what is left is packed for this processor, "
            "so that it cannot be saved. Try: `interposer quantize PATH NEW`, which writes "
            "quantized weights that transformers loads, or copy PATH and state "
            "'quantization_config' in its config.json"
        )

    @property
    def is_trainable(self) -> bool:
        """False: no gradients are recorded."""
        return False

    def __deepcopy__(self, memo: object) -> InterposerQuantizer:
        # It holds what was chosen, which nothing changes.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).is_serializable(self), ()


def register() -> None:
    """Make transformers know the method, once.

    Raises: ConfigError: another package has registered something of that name.
    """
    known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(TRANSFORMERS_METHOD)
    quantizer = AUTO_QUANTIZER_MAPPING.get(TRANSFORMERS_METHOD)
    if (known, quantizer) == (InterposerConfig, InterposerQuantizer):
        return
    if known is not None or quantizer is not None:
        raise ConfigError(
            f"transformers knows the quantization method {TRANSFORMERS_METHOD!r} already, as "
            f"{known or quantizer}. Try: import interposer_models.quantizer before that package"
        )
    register_quantization_config(TRANSFORMERS_METHOD)(InterposerConfig)
    register_quantizer(TRANSFORMERS_METHOD)(InterposerQuantizer)
