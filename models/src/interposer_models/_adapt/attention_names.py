"""Registration of this attention and its masks with transformers, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention import AdaptedAttention, Attend, attention_by, own
from interposer_models._adapt.attention_name import NAME, StandIn, name_for
from interposer_models._adapt.configurations import own_configurations
from interposer_models._adapt.eager_attention import bind_eager, has_no_other
from interposer_models._adapt.masks import mask_by
from interposer_models._adapt.trial_length import further_tokens

_SDPA, _EAGER = "sdpa", "eager"
HELD = "_attn_implementation_internal"


def bind_attention(adaptation: Adaptation) -> None:
    """Route the attention of a model that uses sdpa to this attention.

    It comes here as well where its class has none but its own, and a trial agrees.
    """
    if "transformers" not in sys.modules:
        return
    if not any(_served(adaptation).values()):
        _note_others(adaptation, {})
        return
    own_configurations(adaptation)
    found = _served(adaptation)
    mark = adaptation.changes.mark()
    own(AdaptedAttention(adaptation, register_attention()), adaptation)
    for config in found[_SDPA]:
        adaptation.changes.set(config, HELD, name_for(adaptation.model, _SDPA))
    reasons = {}
    if found[_EAGER]:
        places = dict(adaptation.places)
        verdict = bind_eager(adaptation, found[_EAGER], HELD, name_for(adaptation.model, _EAGER))
        if verdict and (note := further_tokens(adaptation.model)[1]):
            adaptation.remarks.append(f"attention: {note}")
        if not verdict:
            adaptation.places = places
            reasons = {id(config): verdict.reason for config in found[_EAGER]}
            if not found[_SDPA]:
                adaptation.changes.undo(mark)
    _note_others(adaptation, reasons)


def _served(adaptation: Adaptation) -> dict[str, list[Any]]:
    return {name: [*_configs(adaptation, name)] for name in (_SDPA, _EAGER)}


def register_attention() -> Attend:
    """Register this attention with transformers, and return the sdpa one."""
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
        if isinstance(config, PretrainedConfig) and HELD in vars(config):
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
            if str(held[HELD]) != NAME:
                changed.append((held, held[HELD]))
                held[HELD] = StandIn(held[HELD]) if held[HELD] else NAME
        yield
    finally:
        for held, before in changed:
            held[HELD] = before


def _configs(adaptation: Adaptation, name: str) -> Iterator[Any]:
    """Yield the configurations by which modules choose an attention that can come here.

    Args:
        name: of the attention; ``eager`` counts where no class with it has another.
    """
    for config, models in _choosing(adaptation):
        follows = all(_follows_interface(model) for _, model in models)
        fits = name != _EAGER or (models and all(has_no_other(model) for _, model in models))
        if follows and fits and getattr(config, HELD) == name:
            yield config


def _choosing(adaptation: Adaptation) -> list[tuple[Any, list[tuple[str, nn.Module]]]]:
    """Return each configuration that names an attention, with the models that have it."""
    from transformers import PretrainedConfig, PreTrainedModel

    known: dict[int, tuple[Any, list[tuple[str, nn.Module]]]] = {}
    for name, module in adaptation.model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and hasattr(config, HELD):
            _, models = known.setdefault(id(config), (config, []))
            if isinstance(module, PreTrainedModel):
                models.append((name, module))
    return list(known.values())


def _note_others(adaptation: Adaptation, reasons: Mapping[int, str]) -> None:
    """Note the models that keep their own attention.

    Args:
        reasons: what is to be said besides, by the id of the configuration.
    """
    for config, models in _choosing(adaptation):
        chosen = getattr(config, HELD)
        for name, model in models:
            if not _follows_interface(model):
                _leave(adaptation, model, name, "its class has an attention of its own")
            elif chosen != NAME:
                reason = f"its attention is {chosen!r}, not {_SDPA!r}"
                more = reasons.get(id(config))
                _leave(adaptation, model, name, f"{reason}: {more}" if more else reason)


def _follows_interface(model: nn.Module) -> bool:
    judge = getattr(type(model), "_can_set_attn_implementation", None)
    return bool(judge()) if callable(judge) else True


def _leave(adaptation: Adaptation, module: nn.Module, name: str, reason: str) -> None:
    done = id(module) in adaptation.done
    adaptation.leave(module, name, reason)
    if not done:
        adaptation.done.discard(id(module))
