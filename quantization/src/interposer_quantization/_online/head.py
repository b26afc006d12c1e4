"""Online quantization of the lm_head and of a tied embedding."""

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

# bfloat16 scales halve the scale bytes that kernels read; their error is smaller than the weight's
# own rounding error.
_SCALES = torch.bfloat16
# Larger 4-bit groups cost too much accuracy in the lm_head: benchmarks/results/quantization.txt.
_GROUP_SIZES = (32, 16)


class HeadSettings(LayersLeftOut):
    """Settings of the lm_head, which is quantized to symmetric integers.

    An int8 head has one scale per row of the vocabulary unless ``head_group_size`` is set. An int4
    head has groups of ``head_group_size``; the default is the ``group_size`` of the linear layers,
    else 32, or 16 if 32 does not divide the hidden size. Inputs stay in the model's dtype unless
    ``head_activations`` is ``"int8"``, which quantizes each token.
    """

    head: Literal["int8", "int4", "plain"] = "int8"
    head_group_size: PositiveInt | None = None
    head_activations: Literal["int8", "none"] = "none"

    @model_validator(mode="after")
    def _consistent(self) -> HeadSettings:
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
        """Return the method for an untied lm_head, or None to leave it unquantized.

        Raises: ConfigError: the head is excluded although ``head`` settings are stated.
        """
        if self._stays_plain(prefix):
            return None
        return OnlineIntegerLinear(self.head_format, _SCALES)

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for an embedding tied to ``head``, or None to leave it unquantized.

        An embedding without a tied lm_head stays plain: a step reads few rows.

        Raises: ConfigError: the head is excluded although ``head`` settings are stated.
        """
        if head is None or self._stays_plain(head) or self._stays_plain(prefix):
            return None
        return OnlineEmbedding(self.head_format, _SCALES)

    def head_format(self, site: Site, in_features: int) -> IntegerFormat:
        """Return the integer format of the lm_head.

        Raises: ConfigError: no default group size divides the number of inputs.
        """
        bits, size = 8, self.head_group_size
        if self.head == "int4":
            # Only the integer schemes have a group_size.
            size = size or getattr(self, "group_size", None)
            bits, size = 4, size or largest_group(site, in_features, _GROUP_SIZES)
        rounded = self.head_activations == "int8"
        return IntegerFormat(bits, size, packed=False, dynamic_inputs=rounded)

    def _stays_plain(self, name: str) -> bool:
        """Return whether the layer ``name`` stays unquantized."""
        if self.head == "plain":
            return True
        if not self.leaves_out(name):
            return False
        # Excluding the head and configuring it contradict each other.
        stated_fields = sorted(field for field in self.model_fields_set if field.startswith("head"))
        if stated_fields:
            raise ConfigError(
                f"'modules_to_not_convert' excludes {name}, but these settings quantize the head: "
                f"{', '.join(map(repr, stated_fields))}. Try: remove the settings or the exclusion"
            )
        return True


class OnlineScheme(StoredScheme):
    """Scheme that quantizes linear layers, experts, the lm_head and a tied embedding while loading.

    ``finalize`` of each layer quantizes the weight.
    """

    settings: HeadSettings

    def experts_method(self, prefix: str) -> ExpertsMethod | None:
        """Return the method for the experts at ``prefix``; excluded experts stay unquantized."""
        return OnlineExperts(self.settings.stored, self._fused_experts_method)

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for an untied lm_head, or None to leave it unquantized."""
        return self.settings.head_method(prefix)

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for an embedding tied to ``head``, or None to leave it unquantized."""
        return self.settings.embedding_method(prefix, head)
