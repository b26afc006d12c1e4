"""The quantization scheme of GGUF files: one block format per linear layer and embedding.

Shapes: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from interposer import EmbeddingMethod, ExpertsMethod, LinearMethod, QuantizationScheme
from interposer.errors import ConfigError, UnknownNameError
from interposer_gguf._block_formats import FORMATS, BlockFormat, format_named
from interposer_gguf._blocks_embedding import BlocksEmbedding
from interposer_gguf._blocks_linear import BlocksLinear
from interposer_gguf._experts import BlocksExperts
from interposer_gguf._microscaling import MXFP4
from interposer_quantization import Mxfp4Experts

_SETTINGS = ("quant_method", "tensors")
_PREFIX = "model.layers.0.self_attn.q_proj"


class GGUF(QuantizationScheme):
    """Scheme of GGUF files: block formats by layer name, experts in MXFP4, other layers floats."""

    method = "gguf"

    def __init__(
        self, formats: Mapping[str, BlockFormat], mxfp4_layers: Collection[str] = ()
    ) -> None:
        self.formats, self.mxfp4_layers = formats, mxfp4_layers

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> GGUF:
        """Return the scheme that ``quantization_config`` describes.

        Raises:
            UnknownNameError: a setting or a block format is not known.
            ConfigError: ``tensors`` does not map names to names.
        """
        for name in settings:
            if name not in _SETTINGS:
                where = "in quantization_config"
                raise UnknownNameError("setting", name, _SETTINGS, where=where)
        tensors = settings.get("tensors")
        if not isinstance(tensors, Mapping) or not all(
            isinstance(n, str) for n in tensors.values()
        ):
            raise ConfigError(
                f"quantization_config.tensors is {tensors!r:.100}, must map names of layers to "
                f"block formats. Try: {{{_PREFIX!r}: 'q8_0'}}"
            )
        # MXFP4 has a separate method, because no kernel of this plugin computes with MXFP4.
        mxfp4_layers = frozenset(n for n, stored_as in tensors.items() if stored_as == MXFP4.name)
        formats = {n: format_named(as_) for n, as_ in tensors.items() if n not in mxfp4_layers}
        return cls(formats, mxfp4_layers)

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None if no part is quantized.

        The parts of a fused layer may have different formats.
        """
        parent = prefix.rpartition(".")[0]
        formats_by_part = {
            part: self.formats.get(f"{parent}.{part}" if parent else part) for part in parts
        }
        return BlocksLinear(formats_by_part) if any(formats_by_part.values()) else None

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``, or None for unquantized experts."""
        if prefix in self.mxfp4_layers:
            return Mxfp4Experts()
        is_quantized = any(name.startswith(f"{prefix}.") for name in self.formats)
        return BlocksExperts(self.formats) if is_quantized else None

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for an untied head, or None if the head is not quantized."""
        return self.linear_method(prefix, (prefix.rpartition(".")[2],))

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for the embedding at ``prefix``, or None if unquantized."""
        layout = self.formats.get(prefix)
        return None if layout is None else BlocksEmbedding(layout)


def examples() -> Mapping[str, Mapping[str, Any]]:
    """Return a ``quantization_config`` for each block format, by name of the format."""
    return {name: {"quant_method": "gguf", "tensors": {_PREFIX: name}} for name in FORMATS}
