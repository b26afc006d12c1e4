"""Details of a model for the entries of ``/v1/models``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer_adapt import Encoder
from interposer_engine import LanguageModel


def model_details(model: LanguageModel | Encoder) -> dict[str, Any]:
    """Return the dtype and the quantization method of a model; None where there is none."""
    if isinstance(model, Encoder):
        config, dtype = model.adapted.model.config, model.adapted.model.dtype
        quantization = model.adapted.quantization
    else:
        config, quantization = model.engine.model.config, model.quantization
        dtype = getattr(model, "_dtype", None)  # a model of another library may have no dtype
    stored_settings = getattr(config, "quantization_config", None)
    return {
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "quantization": _method(quantization) or _method(stored_settings),
    }


def _method(settings: Any) -> str | None:
    """Return the name of the method that quantization settings name, if any."""
    if settings is None or isinstance(settings, str):
        return settings
    if not isinstance(settings, Mapping):
        settings = settings.to_dict()  # transformers has an object
    method = settings.get("quant_method")
    return None if method is None else str(getattr(method, "value", method))
