"""The scheme of GGUF files: every linear layer and embedding has a block format of its own.

Dimensions: I input features, O output features.
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
    """Block formats by the names of layers, and experts in MXFP4; what is not named is plain."""

    method = "gguf"

    def __init__(
        self, formats: Mapping[str, BlockFormat], microscaled: Collection[str] = ()
    ) -> None:
        self.formats, self.microscaled = formats, microscaled

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> GGUF:
        """Return the scheme that ``quantization_config`` describes.

        Raises:
            UnknownNameError: a setting or a block format is not known.
            ConfigError: ``tensors`` is no mapping of names.
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
        microscaled = frozenset(n for n, stored_as in tensors.items() if stored_as == MXFP4.name)
        formats = {n: format_named(as_) for n, as_ in tensors.items() if n not in microscaled}
        return cls(formats, microscaled)

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod | None:
        """Return the method for the layer at ``prefix``, or None where all of it is plain.

        Layers that are fused there may be stored in different ways.
        """
        parent = prefix.rpartition(".")[0]
        found = {part: self.formats.get(f"{parent}.{part}" if parent else part) for part in parts}
        return BlocksLinear(found) if any(found.values()) else None

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``, or None where all of them are plain."""
        if prefix in self.microscaled:
            return Mxfp4Experts()
        quantized = any(name.startswith(f"{prefix}.") for name in self.formats)
        return BlocksExperts(self.formats) if quantized else None

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for a head with a weight of its own, or None where that is plain."""
        return self.linear_method(prefix, (prefix.rpartition(".")[2],))

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for the embedding at ``prefix``, or None where it is plain."""
        layout = self.formats.get(prefix)
        return None if layout is None else BlocksEmbedding(layout)


def examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings of every block format, by label."""
    return {name: {"quant_method": "gguf", "tensors": {_PREFIX: name}} for name in FORMATS}
