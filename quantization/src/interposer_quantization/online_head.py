"""What is said of the head, and of the table that it shares, where a model is quantized online."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveInt, model_validator

from interposer import EmbeddingMethod, LinearMethod, Site
from interposer_quantization.fp8_config import LayersLeftOut
from interposer_quantization.online_embedding import OnlineEmbedding
from interposer_quantization.online_integer_linear import OnlineIntegerLinear, largest_group
from interposer_quantization.writing.integer_formats import IntegerFormat

__all__ = ["HeadSettings"]

# Rounding scales to it moves numbers by less than their own rounding does, and kernels read half
# as many bytes of scales.
_SCALES = torch.bfloat16
# Larger groups of 4 bits cost what the head is worth: see docs/quantization.md.
_GROUP_SIZES = (32, 16)


class HeadSettings(LayersLeftOut):
    """How the language model head is held: integers that inputs are multiplied by as they are.

    They are symmetric. Those of 8 bits have a scale for each row of the vocabulary unless
    ``head_group_size`` is stated. Those of 4 bits have groups of that size, by default the
    ``group_size`` of the linear layers if that is stated, else 32, or 16 where that does not divide
    the hidden size.
    """

    head: Literal["int8", "int4", "plain"] = "int8"
    head_group_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_groups(self) -> HeadSettings:
        if self.head_group_size is not None and self.head == "plain":
            raise ValueError(
                f"head 'plain' has no head_group_size {self.head_group_size}; leave one of them out"
            )
        return self

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for a head with a weight of its own, or None to leave it plain."""
        if self.head == "plain" or self.leaves_out(prefix):
            return None
        return OnlineIntegerLinear(self.head_format, _SCALES)

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod | None:
        """Return the method for a table that ``head`` shares, or None to leave it plain.

        A table that is only looked up stays: a step reads few of its rows.
        """
        if head is None or self.head == "plain" or self.leaves_out(head) or self.leaves_out(prefix):
            return None
        return OnlineEmbedding(self.head_format, _SCALES)

    def head_format(self, site: Site, in_features: int) -> IntegerFormat:
        """Return the format of a head.

        Raises: ConfigError: none of the default sizes of groups divides its inputs.
        """
        size = self.head_group_size
        if self.head == "int8":
            return IntegerFormat(8, size, packed=False)
        size = size or getattr(self, "group_size", None)
        return IntegerFormat(
            4, size or largest_group(site, in_features, _GROUP_SIZES), packed=False
        )
