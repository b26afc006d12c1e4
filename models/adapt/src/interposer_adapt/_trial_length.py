"""The prompt length of a trial, which must exceed the attention window of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_WINDOW_FIELD = re.compile(r"(?:^|_)(?:window|window_size|chunk_size|index_topk|block_size)$")
# A trial takes a few passes over its prompt, with two operations for each weight and token.
_MOST_WEIGHT_TOKENS = 500_000_000_000
_MIN_LIMIT_TOKENS = 160


def extra_trial_tokens(model: nn.Module) -> tuple[int, str]:
    """Return how many tokens a trial's prompt needs beyond the attention window, and a note.

    The number is the largest window, chunk or top-k in the configuration. For a large model it is
    limited, because the trial would take minutes; the note then names the configuration's field.
    """
    windows = dict(_window_fields(getattr(model, "config", None)))
    if not windows:
        return 0, ""
    field = max(windows, key=windows.__getitem__)
    weights = sum(parameter.numel() for parameter in model.parameters())
    max_tokens = max(_MIN_LIMIT_TOKENS, _MOST_WEIGHT_TOKENS // max(weights, 1))
    if windows[field] <= max_tokens:
        return windows[field], ""
    return max_tokens, f"its trial had {max_tokens} tokens, fewer than {field} = {windows[field]}"


def _window_fields(config: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the fields of a configuration, and of nested ones, that limit the attended tokens."""
    fields = dict(vars(config)) if hasattr(config, "model_type") else {}
    for name, value in fields.items():
        if hasattr(value, "model_type") and depth < 2:
            yield from _window_fields(value, depth + 1)
        elif type(value) is int and value > 0 and _WINDOW_FIELD.search(name):
            yield name, value
    size, count = fields.get("index_block_size"), fields.get("index_topk_blocks")
    if type(size) is int and type(count) is int:
        yield "index_block_size * index_topk_blocks", size * count
