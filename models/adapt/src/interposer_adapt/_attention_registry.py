"""Routes the attention of transformers models to interposer's attention, by the attention's name.

interposer's attention and masks are registered with transformers under a name, which the
configurations of a model then state. Models made from one configuration share the object, so that
an adapted model gets private copies.

Some classes support only eager attention, because of softcaps or sinks that sdpa lacks. A trial
compares such a model's own attention with the kernels' attention, so that no class must be known by
name.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_adapt._adaptation import Adaptation
from interposer_adapt._agreement import (
    distance,
    error_bound,
    logits_of,
    perturbed_logits,
    plain_logits,
)
from interposer_adapt._attention import (
    AdaptedAttention,
    Attend,
    allow_softcap_and_sinks,
    assign_attention,
    make_attention,
)
from interposer_adapt._cache_argument import cache_argument
from interposer_adapt._masks import make_mask_function
from interposer_adapt._trial_length import extra_trial_tokens

# Tokens of each step: a prompt, a second chunk, and one decode step. The first chunk is extended
# beyond the largest attention window.
_STEPS = (6, 3, 1)
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

NAME = "interposer"
_COMPARISON = re.compile(r"attn_impl\w*\s*(?:==|!=|(?:not\s+)?in\b)|[=!]=\s*[\w.]*attn_impl")
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


def configs_naming_attention(model: nn.Module, layers: Iterable[str] = ("",)) -> tuple[Any, ...]:
    """Return the configurations from which modules of ``model`` select an attention by name.

    Args:
        layers: names of modules; only the configurations of these, of modules in them, and of
            modules that contain them are returned. Other modules, such as an encoder of images, may
            run in another thread.
    """
    from transformers import PretrainedConfig, PreTrainedModel

    configs_by_id: dict[int, Any] = {}
    fixed_ids: set[int] = set()
    paths = [f"{layer}." if layer else "" for layer in layers]
    for name, module in model.named_modules():
        path = f"{name}." if name else ""
        if not any(each.startswith(path) or path.startswith(each) for each in paths):
            continue
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and ATTENTION_FIELD in vars(config):
            configs_by_id[id(config)] = config
            if isinstance(module, PreTrainedModel) and not _follows_interface(module):
                fixed_ids.add(id(config))
    return tuple(config for key, config in configs_by_id.items() if key not in fixed_ids)


@contextmanager
def using_adapted_attention(configs: Iterable[Any]) -> Iterator[None]:
    """Select interposer's attention in the given configurations within a ``with`` block."""
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


def supports_only_eager(model: nn.Module) -> bool:
    """Return True if the class of a transformers model refuses sdpa."""
    return getattr(type(model), "_supports_sdpa", True) is False


def bind_eager(
    adaptation: Adaptation, configs: list[Any], attention_field: str, name: str
) -> Verdict:
    """Select interposer's attention in configurations, if its logits agree with eager attention's.

    Args:
        attention_field: the attribute of a configuration that names the attention.
    """
    model = adaptation.model
    savepoint = adaptation.changes.savepoint()
    try:
        with torch.inference_mode():
            expected, perturbed = (
                _logits_in_steps(model),
                perturbed_logits(model, _prompt(model), adaptation.device.type),
            )
            logits = plain_logits(model, _prompt(model), adaptation.device.type)
            for config in configs:
                adaptation.changes.set(config, attention_field, name)
                allow_softcap_and_sinks(adaptation, config)
            actual = _logits_in_steps(model)
    except _FAILURES as error:
        adaptation.changes.undo(savepoint)
        return Verdict.refuse(f"a trial of it failed: {type(error).__name__}: {error}")
    excess = distance(actual, expected) / error_bound(model, logits, perturbed, 1)
    if excess <= 1:
        return Verdict.accept()
    adaptation.changes.undo(savepoint)
    return Verdict.refuse(
        f"in a trial its error was {excess:.1f} times as large as rounding explains"
    )


def _prompt(model: Any) -> list[int]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Any fixed, varied token ids serve; both runs get the same prompt.
    return [(7 * index + 3) % vocabulary for index in range(sum(_step_tokens(model)))]


def _step_tokens(model: Any) -> tuple[int, ...]:
    """Return the number of prompt tokens that each step of the trial computes."""
    first, *later_steps = _STEPS
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    extra_tokens, _ = extra_trial_tokens(model)
    if isinstance(context, int):
        extra_tokens = max(0, min(extra_tokens, context - sum(_STEPS)))
    return (first + extra_tokens, *later_steps)


def _logits_in_steps(model: Any) -> Tensor:
    """Return the logits of the trial's prompt, computed in steps over a KV cache."""
    ids = torch.tensor([_prompt(model)], device=model.device)
    name = cache_argument(model.forward)
    cache, step_logits, first = None, [], 0
    for count in _step_tokens(model):
        end = first + count
        out = model(input_ids=ids[:, first:end], use_cache=True, return_dict=True, **{name: cache})
        cache, first = getattr(out, name), end
        step_logits.append(logits_of(out))
    return torch.cat(step_logits)


def copy_configurations(adaptation: Adaptation) -> None:
    """Replace the transformers configurations of the model's modules by copies.

    When the changes are undone, values assigned to a copy are assigned to the original.
    """
    from transformers import PretrainedConfig

    holders = [
        (module, name, value)
        for module in adaptation.model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PretrainedConfig)
    ]
    originals = list({id(value): value for _, _, value in holders}.values())
    # One deepcopy call keeps a nested configuration identical to the one that other modules hold.
    copies = deepcopy(originals)
    for original, copy in zip(originals, copies, strict=True):
        _copy_back_on_undo(adaptation, original, copy, dict(vars(copy)))
    copy_of = {id(original): copy for original, copy in zip(originals, copies, strict=True)}
    for module, name, value in holders:
        adaptation.changes.set(module, name, copy_of[id(value)])


def _copy_back_on_undo(
    adaptation: Adaptation, original: Any, copy: Any, copied_values: Mapping[str, Any]
) -> None:
    def undo() -> None:
        for name, value in vars(copy).items():
            if name not in copied_values or copied_values[name] is not value:
                vars(original)[name] = value

    adaptation.changes.on_undo(undo)


class AliasedName(str):
    """String that names interposer's attention, but also compares equal to the replaced name.

    transformers looks up the attention by hash. Some modules, such as those with a sparse indexer,
    build a mask only if the name equals "sdpa". With an ``AliasedName`` such a module builds the
    mask, and interposer's attention receives the same mask as sdpa. A kernel that does not support
    the mask's pattern delegates the call to sdpa.
    """

    _names: tuple[str, ...]

    def __new__(cls, replaced_name: str) -> AliasedName:
        name = super().__new__(cls, NAME)
        name._names = (NAME, replaced_name)
        return name

    def __eq__(self, value: object) -> bool:
        return value in self._names

    def __ne__(self, value: object) -> bool:
        return value not in self._names

    def __hash__(self) -> int:  # in Python, so that torch.compile can follow it
        return hash(NAME)

    def __reduce__(self) -> tuple[type[AliasedName], tuple[str]]:
        return AliasedName, (self._names[1],)


def attention_name_for(model: nn.Module, replaced_name: str) -> str:
    """Return the name under which the configurations of ``model`` select interposer's attention.

    Args:
        replaced_name: the previous name in the configurations.
    """
    modules = {parent.__module__ for module in model.modules() for parent in type(module).__mro__}
    return AliasedName(replaced_name) if any(map(_compares_names, modules)) else NAME


@cache
def _compares_names(module: str) -> bool:
    """Return whether the source of a Python module compares names of attention functions."""
    package = module.partition(".")[0]
    if package in ("torch", "builtins", "interposer_adapt") or module not in sys.modules:
        return False
    if package == "transformers" and not module.startswith("transformers.models."):
        return False  # code shared by all models
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return True  # without source, assume a comparison
    return bool(_COMPARISON.search(source))


_SDPA, _EAGER = "sdpa", "eager"


def _configs_with_attention(adaptation: Adaptation, name: str) -> Iterator[Any]:
    """Yield the configurations that select this attention and whose models can be routed.

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
    """Record the models that keep the attention of their class, with the reason.

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
