"""Checkpoints of gpt-oss, whose experts are MXFP4."""

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
    """The whole ``quantization_config``, by the names of transformers 5.23 (``Mxfp4Config``)."""

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["mxfp4"] = "mxfp4"
    # It may be written, but only as saying nothing.
    dequantize: Literal[False] | None = None


class Mxfp4(ParsedScheme):
    """Routed experts in MXFP4; everything else is plain, as nothing else has such a form."""

    method = "mxfp4"
    settings_class = Settings
    settings: Settings

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return None: linear layers stay plain."""
        return None

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``, or None if they are left out."""
        return None if self.settings.leaves_out(prefix) else Mxfp4Experts()


def mxfp4_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of published checkpoints, and those that say least, by label."""
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
