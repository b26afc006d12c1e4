"""Scheme of gpt-oss checkpoints with MXFP4 experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from interposer import ExpertsMethod, LinearMethod
from interposer_quantization._fp8.config import LayersLeftOut
from interposer_quantization._mxfp4.experts import Mxfp4Experts
from interposer_quantization._scheme import ParsedScheme

_SUPPORTED = """\
Supported: 'modules_to_not_convert', names or expressions for experts that stay plain.
Try: quantize the original model that way"""


class Settings(LayersLeftOut):
    """All fields of ``quantization_config``, named as in ``Mxfp4Config`` of transformers 5.23."""

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["mxfp4"] = "mxfp4"
    # Accepted only with the value that has no effect.
    dequantize: Literal[False] | None = None


class Mxfp4(ParsedScheme):
    """Scheme with MXFP4 routed experts; all other layers are unquantized."""

    method = "mxfp4"
    settings_class = Settings
    settings: Settings

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return None: linear layers are not quantized."""
        return None

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``, or None if excluded."""
        return None if self.settings.leaves_out(prefix) else Mxfp4Experts()


def mxfp4_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of published checkpoints, and the minimal settings, by label."""
    # The exclusions of the released gpt-oss checkpoints.
    plain = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    return {
        "experts": {"quant_method": "mxfp4", "modules_to_not_convert": plain},
        "nothing else said": {"quant_method": "mxfp4"},
    }
