"""The names by which transformers finds this attention and its masks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention import AdaptedAttention, attention_by, own
from interposer_models._adapt.masks import mask_by

NAME = "interposer"
_SDPA = "sdpa"
_HELD = "_attn_implementation_internal"


def bind_attention(adaptation: Adaptation) -> None:
    """Let the attention of a model of transformers come here, where it is sdpa's now."""
    if "transformers" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    configs = list(_configs(adaptation))
    if not configs:
        return
    functions, masks = AttentionInterface(), AttentionMaskInterface()
    sdpa = functions[_SDPA]
    if NAME not in functions:
        AttentionMaskInterface.register(NAME, mask_by(masks[_SDPA]))
        AttentionInterface.register(NAME, attention_by(sdpa))
    own(AdaptedAttention(adaptation, sdpa), adaptation)
    for config in configs:
        adaptation.changes.set(config, _HELD, NAME)


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
