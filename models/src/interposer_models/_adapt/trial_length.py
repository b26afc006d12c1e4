"""The length of a trial's text, which must exceed what a model's attention sees at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_REACH = re.compile(r"(?:^|_)(?:window|window_size|chunk_size|index_topk|block_size)$")
# A trial takes a few passes over its text, and two operations for each weight and token.
_MOST_WEIGHT_TOKENS = 500_000_000_000
_LEAST_TOKENS = 160


def further_tokens(model: nn.Module) -> tuple[int, str]:
    """Return by how many tokens a trial's text must be longer, and a note if it cannot be.

    They are as many as the largest window, chunk or top-k of the configuration. A text that would
    take a large model minutes is cut; the note says which field is larger than that.
    """
    reaches = dict(_reaches(getattr(model, "config", None)))
    if not reaches:
        return 0, ""
    field = max(reaches, key=reaches.__getitem__)
    weights = sum(parameter.numel() for parameter in model.parameters())
    max_tokens = max(_LEAST_TOKENS, _MOST_WEIGHT_TOKENS // max(weights, 1))
    if reaches[field] <= max_tokens:
        return reaches[field], ""
    return max_tokens, f"its trial had {max_tokens} tokens, fewer than {field} = {reaches[field]}"


def _reaches(config: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the fields of a configuration and its nested ones that limit the attended tokens."""
    fields = dict(vars(config)) if hasattr(config, "model_type") else {}
    for name, value in fields.items():
        if hasattr(value, "model_type") and depth < 2:
            yield from _reaches(value, depth + 1)
        elif type(value) is int and value > 0 and _REACH.search(name):
            yield name, value
    size, count = fields.get("index_block_size"), fields.get("index_topk_blocks")
    if type(size) is int and type(count) is int:
        yield "index_block_size * index_topk_blocks", size * count
