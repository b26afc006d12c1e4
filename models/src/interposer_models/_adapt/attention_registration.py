"""Registration of interposer's attention and masks with transformers, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention import (
    AdaptedAttention,
    Attend,
    assign_attention,
    make_attention,
)
from interposer_models._adapt.attention_name import NAME, AliasedName, attention_name_for
from interposer_models._adapt.configurations import copy_configurations
from interposer_models._adapt.eager_attention import bind_eager, supports_only_eager
from interposer_models._adapt.masks import make_mask_function
from interposer_models._adapt.trial_length import extra_trial_tokens

_SDPA, _EAGER = "sdpa", "eager"
ATTENTION_FIELD = "_attn_implementation_internal"


def bind_attention(adaptation: Adaptation) -> None:
    """Route the attention of a model from sdpa to interposer's attention.

    Models of classes with only eager attention are also routed, if a trial agrees.
    """
    if "transformers" not in sys.modules:
        return
    if not any(_replaceable_configs(adaptation).values()):
        _record_skipped_models(adaptation, {})
        return
    copy_configurations(adaptation)
    # Collected again, as copy_configurations has replaced the objects.
    configs_by_name = _replaceable_configs(adaptation)
    savepoint = adaptation.changes.savepoint()
    assign_attention(AdaptedAttention(adaptation, register_attention()), adaptation)
    for config in configs_by_name[_SDPA]:
        adaptation.changes.set(config, ATTENTION_FIELD, attention_name_for(adaptation.model, _SDPA))
    reasons = {}
    if configs_by_name[_EAGER]:
        results = dict(adaptation.results)
        verdict = bind_eager(
            adaptation,
            configs_by_name[_EAGER],
            ATTENTION_FIELD,
            attention_name_for(adaptation.model, _EAGER),
        )
        if verdict and (note := extra_trial_tokens(adaptation.model)[1]):
            adaptation.notes.append(f"attention: {note}")
        if not verdict:
            adaptation.results = results
            reasons = {id(config): verdict.reason for config in configs_by_name[_EAGER]}
            if not configs_by_name[_SDPA]:
                adaptation.changes.undo(savepoint)
    _record_skipped_models(adaptation, reasons)


def _replaceable_configs(adaptation: Adaptation) -> dict[str, list[Any]]:
    return {name: [*_configs_with_attention(adaptation, name)] for name in (_SDPA, _EAGER)}


def register_attention() -> Attend:
    """Register interposer's attention with transformers, and return transformers' sdpa function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface(), AttentionMaskInterface()
    sdpa: Attend = functions[_SDPA]
    # The registry of transformers is global, so that one registration serves all models.
    if NAME not in functions:
        AttentionMaskInterface.register(NAME, make_mask_function(masks[_SDPA]))
        AttentionInterface.register(NAME, make_attention(sdpa))
    return sdpa


def configs_naming_attention(model: nn.Module) -> tuple[Any, ...]:
    """Return the configurations by which modules of ``model`` choose an attention by name."""
    from transformers import PretrainedConfig, PreTrainedModel

    configs_by_id: dict[int, Any] = {}
    fixed_ids: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and ATTENTION_FIELD in vars(config):
            configs_by_id[id(config)] = config
            if isinstance(module, PreTrainedModel) and not _follows_interface(module):
                fixed_ids.add(id(config))
    return tuple(config for key, config in configs_by_id.items() if key not in fixed_ids)


@contextmanager
def using_adapted_attention(configs: Iterable[Any]) -> Iterator[None]:
    """Let configurations name interposer's attention within a ``with`` block."""
    changed: list[tuple[dict[str, Any], Any]] = []
    try:
        for config in configs:
            attributes = vars(config)
            if str(attributes[ATTENTION_FIELD]) != NAME:
                changed.append((attributes, attributes[ATTENTION_FIELD]))
                attributes[ATTENTION_FIELD] = (
                    AliasedName(attributes[ATTENTION_FIELD])
                    if attributes[ATTENTION_FIELD]
                    else NAME
                )
        yield
    finally:
        for attributes, previous_name in changed:
            attributes[ATTENTION_FIELD] = previous_name


def _configs_with_attention(adaptation: Adaptation, name: str) -> Iterator[Any]:
    """Yield the configurations that name this attention and belong to models that can be routed.

    Args:
        name: an attention; ``eager`` counts only if the classes support no other.
    """
    for config, models in _configs_with_models(adaptation):
        follows = all(_follows_interface(model) for _, model in models)
        fits = name != _EAGER or (models and all(supports_only_eager(model) for _, model in models))
        if follows and fits and getattr(config, ATTENTION_FIELD) == name:
            yield config


def _configs_with_models(adaptation: Adaptation) -> list[tuple[Any, list[tuple[str, nn.Module]]]]:
    """Return each configuration that names an attention, with the models of this configuration."""
    from transformers import PretrainedConfig, PreTrainedModel

    models_by_config: dict[int, tuple[Any, list[tuple[str, nn.Module]]]] = {}
    for name, module in adaptation.model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and hasattr(config, ATTENTION_FIELD):
            _, models = models_by_config.setdefault(id(config), (config, []))
            if isinstance(module, PreTrainedModel):
                models.append((name, module))
    return list(models_by_config.values())


def _record_skipped_models(adaptation: Adaptation, reasons: Mapping[int, str]) -> None:
    """Record the models that keep the attention of the class.

    Args:
        reasons: additional reasons, by the id of the configuration.
    """
    for config, models in _configs_with_models(adaptation):
        attention_name = getattr(config, ATTENTION_FIELD)
        for name, model in models:
            if not _follows_interface(model):
                _skip_model(adaptation, model, name, "its class has an attention of its own")
            elif attention_name != NAME:
                reason = f"its attention is {attention_name!r}, not {_SDPA!r}"
                extra_reason = reasons.get(id(config))
                _skip_model(
                    adaptation, model, name, f"{reason}: {extra_reason}" if extra_reason else reason
                )


def _follows_interface(model: nn.Module) -> bool:
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    return bool(can_set()) if callable(can_set) else True


def _skip_model(adaptation: Adaptation, module: nn.Module, name: str, reason: str) -> None:
    # Only the attention is skipped: other passes may still bind this module.
    was_handled = id(module) in adaptation.handled_ids
    adaptation.mark_skipped(module, name, reason)
    if not was_handled:
        adaptation.handled_ids.discard(id(module))
