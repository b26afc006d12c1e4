"""Settings of the lm_head, and of a tied embedding, of a model that is quantized online."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveInt, model_validator

from interposer import EmbeddingMethod, ExpertsMethod, LinearMethod, Site
from interposer.errors import ConfigError
from interposer_quantization._fp8.config import LayersLeftOut
from interposer_quantization._online.embedding import OnlineEmbedding
from interposer_quantization._online.experts import OnlineExperts
from interposer_quantization._online.integer_linear import OnlineIntegerLinear, largest_group
from interposer_quantization._scheme import StoredScheme
from interposer_quantization.writing._integer_formats import IntegerFormat

# Rounding scales to it moves numbers by less than their own rounding does, and kernels read half
# as many bytes of scales.
_SCALES = torch.bfloat16
# Larger groups of 4 bits cost what the head is worth: see docs/quantization.md.
_GROUP_SIZES = (32, 16)


class HeadSettings(LayersLeftOut):
    """Settings of the lm_head: symmetric integers.

    Those of 8 bits have a scale for each row of the vocabulary unless ``head_group_size`` is
    stated. Those of 4 bits have groups of that size, by default the ``group_size`` of the linear
    layers if that is stated, else 32, or 16 where that does not divide the hidden size. Inputs are
    multiplied as they are unless ``head_activations`` is ``"int8"``, which rounds those of every
    token.
    """

    head: Literal["int8", "int4", "plain"] = "int8"
    head_group_size: PositiveInt | None = None
    head_activations: Literal["int8", "none"] = "none"

    @model_validator(mode="after")
    def _goes_together(self) -> HeadSettings:
        size, rounded = self.head_group_size, self.head_activations == "int8"
        if size is not None and self.head == "plain":
            raise ValueError(f"head 'plain' has no head_group_size {size}; leave one of them out")
        if rounded and self.head == "plain":
            raise ValueError("head 'plain' has no head_activations 'int8'; leave one of them out")
        if rounded and self.head == "int8" and size is not None:
            raise ValueError(
                "head 'int8' with head_activations 'int8' has one scale for each row, no "
                f"head_group_size {size}; leave one of them out, or try head 'int4'"
            )
        return self

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for a head with a weight of its own, or None to leave it plain.

        Raises: ConfigError: it is left out, although settings say how it is held.
        """
        if self._stays_plain(prefix):
            return None
        return OnlineIntegerLinear(self.head_format, _SCALES)

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for an embedding tied to ``head``, or None to leave it plain.

        An embedding without a tied lm_head stays plain: a step reads few of its rows.

        Raises: ConfigError: it is left out, although settings say how the head is held.
        """
        if head is None or self._stays_plain(head) or self._stays_plain(prefix):
            return None
        return OnlineEmbedding(self.head_format, _SCALES)

    def head_format(self, site: Site, in_features: int) -> IntegerFormat:
        """Return the format of a head.

        Raises: ConfigError: none of the default sizes of groups divides its inputs.
        """
        bits, size = 8, self.head_group_size
        if self.head == "int4":
            size = size or getattr(self, "group_size", None)
            bits, size = 4, size or largest_group(site, in_features, _GROUP_SIZES)
        rounded = self.head_activations == "int8"
        return IntegerFormat(bits, size, packed=False, dynamic_inputs=rounded)

    def _stays_plain(self, name: str) -> bool:
        """Say whether nothing is to be quantized at the place ``name``."""
        if self.head == "plain":
            return True
        if not self.leaves_out(name):
            return False
        stated = sorted(field for field in self.model_fields_set if field.startswith("head"))
        if stated:
            raise ConfigError(
                f"'modules_to_not_convert' leaves {name} out, but settings say how the head is "
                f"held: {', '.join(map(repr, stated))}. Try: leave these or that out"
            )
        return True


class OnlineScheme(StoredScheme):
    """A scheme that quantizes linear layers, experts, the lm_head and a tied embedding on loading.

    All of it is done when a layer is finalized.
    """

    settings: HeadSettings

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``, or for plain ones if left out."""
        return OnlineExperts(self.settings.stored, self._experts_at_once)

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for a head with a weight of its own, or None to leave it plain."""
        return self.settings.head_method(prefix)

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for an embedding tied to ``head``, or None to leave it plain."""
        return self.settings.embedding_method(prefix, head)
