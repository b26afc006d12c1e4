"""The names by which transformers finds this attention and its masks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention import AdaptedAttention, Attend, attention_by, own
from interposer_models._adapt.masks import mask_by

NAME = "interposer"
_SDPA = "sdpa"
_HELD = "_attn_implementation_internal"


def bind_attention(adaptation: Adaptation) -> None:
    """Let the attention of a model of transformers come here, where it is sdpa's now."""
    if "transformers" not in sys.modules:
        return
    configs = list(_configs(adaptation))
    if not configs:
        return
    own(AdaptedAttention(adaptation, register_attention()), adaptation)
    for config in configs:
        adaptation.changes.set(config, _HELD, NAME)


def register_attention() -> Attend:
    """Let transformers know this attention by its name, and return sdpa's."""
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface(), AttentionMaskInterface()
    sdpa: Attend = functions[_SDPA]
    if NAME not in functions:
        AttentionMaskInterface.register(NAME, mask_by(masks[_SDPA]))
        AttentionInterface.register(NAME, attention_by(sdpa))
    return sdpa


def following(model: nn.Module) -> tuple[Any, ...]:
    """Return the configurations by which modules of ``model`` choose an attention by name."""
    from transformers import PretrainedConfig, PreTrainedModel

    known: dict[int, Any] = {}
    fixed: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and _HELD in vars(config):
            known[id(config)] = config
            if isinstance(module, PreTrainedModel) and not _follows_interface(module):
                fixed.add(id(config))
    return tuple(config for key, config in known.items() if key not in fixed)


@contextmanager
def named_attention(configs: Iterable[Any]) -> Iterator[None]:
    """Let these configurations name this attention within a ``with`` block."""
    changed: list[tuple[dict[str, Any], Any]] = []
    try:
        for config in configs:
            held = vars(config)
            if held[_HELD] != NAME:
                changed.append((held, held[_HELD]))
                held[_HELD] = NAME
        yield
    finally:
        for held, before in changed:
            held[_HELD] = before


def _configs(adaptation: Adaptation) -> Iterator[Any]:
    """Yield the configurations by which modules choose sdpa, and note the others."""
    from transformers import PretrainedConfig, PreTrainedModel

    known: dict[int, Any] = {}
    fixed: set[int] = set()
    for name, module in adaptation.model.named_modules():
        config = getattr(module, "config", None)
        if not isinstance(config, PretrainedConfig) or not hasattr(config, _HELD):
            continue
        known.setdefault(id(config), config)
        if isinstance(module, PreTrainedModel) and not _follows_interface(module):
            fixed.add(id(config))
            _leave(adaptation, module, name, "its class has an attention of its own")
        elif isinstance(module, PreTrainedModel) and getattr(config, _HELD) != _SDPA:
            reason = f"its attention is {getattr(config, _HELD)!r}, not {_SDPA!r}"
            _leave(adaptation, module, name, reason)
    for key, config in known.items():
        if key not in fixed and getattr(config, _HELD) == _SDPA:
            yield config


def _follows_interface(model: nn.Module) -> bool:
    judge = getattr(type(model), "_can_set_attn_implementation", None)
    return bool(judge()) if callable(judge) else True


def _leave(adaptation: Adaptation, module: nn.Module, name: str, reason: str) -> None:
    done = id(module) in adaptation.done
    adaptation.leave(module, name, reason)
    if not done:
        adaptation.done.discard(id(module))
