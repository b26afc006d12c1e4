"""Routing of models that support only eager attention, because of softcaps or sinks.

sdpa supports neither, so these classes refuse it. A trial compares the model's own attention with
the kernels' attention, so that no class must be known by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention import allow_softcap_and_sinks
from interposer_models._adapt.noise import (
    distance,
    error_bound,
    logits_of,
    perturbed_logits,
    plain_logits,
)
from interposer_models._adapt.trial_length import extra_trial_tokens

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


def supports_only_eager(model: nn.Module) -> bool:
    """Return True if the class of a transformers model refuses sdpa."""
    return getattr(type(model), "_supports_sdpa", True) is False


def bind_eager(
    adaptation: Adaptation, configs: list[Any], attention_field: str, name: str
) -> Verdict:
    """Let configurations name interposer's attention, if a trial agrees with the eager attention.

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
        f"in a trial its results were {excess:.1f} times as far away as rounding explains"
    )


def _prompt(model: Any) -> list[int]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Any fixed, varied token ids serve; both runs get the same prompt.
    return [(7 * index + 3) % vocabulary for index in range(sum(_step_tokens(model)))]


def _step_tokens(model: Any) -> tuple[int, ...]:
    """Return the number of tokens of each step."""
    first, *later_steps = _STEPS
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    extra_tokens, _ = extra_trial_tokens(model)
    if isinstance(context, int):
        extra_tokens = max(0, min(extra_tokens, context - sum(_STEPS)))
    return (first + extra_tokens, *later_steps)


def _logits_in_steps(model: Any) -> Tensor:
    """Return the logits of a prompt that is computed in steps over a cache."""
    ids = torch.tensor([_prompt(model)], device=model.device)
    cache, step_logits, first = None, [], 0
    for count in _step_tokens(model):
        end = first + count
        out = model(
            input_ids=ids[:, first:end], past_key_values=cache, use_cache=True, return_dict=True
        )
        cache, first = out.past_key_values, end
        step_logits.append(logits_of(out))
    return torch.cat(step_logits)
