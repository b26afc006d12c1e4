"""Attention of models whose classes have none but their own: with caps on scores, or with sinks.

sdpa has neither, so that these classes refuse it. A trial says whether the kernels' attention is
theirs: no class is known by its name, and what else an eager attention does is not asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention import serve_caps
from interposer_models._adapt.noise import alone, bound_of, distance, logits_of, rounded
from interposer_models._adapt.trial_length import further_tokens

# Tokens of each step: a prompt, the rest of it, and one. The first is longer by what layers see.
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


def has_no_other(model: nn.Module) -> bool:
    """Say whether the class of a model of transformers says that sdpa is not for it."""
    return getattr(type(model), "_supports_sdpa", True) is False


def bind_eager(adaptation: Adaptation, configs: list[Any], held_as: str, name: str) -> Verdict:
    """Let configurations name this attention, if a trial of the model agrees with what they named.

    Args:
        held_as: the attribute of a configuration that names an attention.
    """
    model = adaptation.model
    mark = adaptation.changes.mark()
    try:
        with torch.inference_mode():
            expected, noisy = _steps(model), rounded(model, _prompt(model), adaptation.device.type)
            whole = alone(model, _prompt(model), adaptation.device.type)
            for config in configs:
                adaptation.changes.set(config, held_as, name)
                serve_caps(adaptation, config)
            found = _steps(model)
    except _FAILURES as error:
        adaptation.changes.undo(mark)
        return Verdict.refuse(f"a trial of it failed: {type(error).__name__}: {error}")
    apart = distance(found, expected) / bound_of(model, whole, noisy, 1)
    if apart <= 1:
        return Verdict.accept()
    adaptation.changes.undo(mark)
    return Verdict.refuse(
        f"in a trial its results were {apart:.1f} times as far away as rounding explains"
    )


def _prompt(model: Any) -> list[int]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [(7 * index + 3) % vocabulary for index in range(sum(_counts(model)))]


def _counts(model: Any) -> tuple[int, ...]:
    """Return the tokens of each step."""
    first, *others = _STEPS
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    further, _ = further_tokens(model)
    if isinstance(context, int):
        further = max(0, min(further, context - sum(_STEPS)))
    return (first + further, *others)


def _steps(model: Any) -> Tensor:
    """Return the logits of a prompt that is computed in steps over a cache."""
    ids = torch.tensor([_prompt(model)], device=model.device)
    cache, found, first = None, [], 0
    for count in _counts(model):
        upto = first + count
        out = model(
            input_ids=ids[:, first:upto], past_key_values=cache, use_cache=True, return_dict=True
        )
        cache, first = out.past_key_values, upto
        found.append(logits_of(out))
    return torch.cat(found)
