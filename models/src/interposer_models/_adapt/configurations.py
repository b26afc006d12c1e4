"""Configurations of an adapted model's own.

Models that were made from one configuration share the object, and what names the attention in it
would speak for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from interposer_models._adapt.adaptation import Adaptation


def own_configurations(adaptation: Adaptation) -> None:
    """Let the modules hold copies of the configurations of transformers that they hold.

    What is assigned to a copy meanwhile is assigned to the original when all is taken back.
    """
    from transformers import PretrainedConfig

    holders = [
        (module, name, value)
        for module in adaptation.model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PretrainedConfig)
    ]
    originals = list({id(value): value for _, _, value in holders}.values())
    # One call, so that a configuration within another stays the one that other modules hold.
    copies = deepcopy(originals)
    for original, copy in zip(originals, copies, strict=True):
        _return_later(adaptation, original, copy, dict(vars(copy)))
    copy_of = {id(original): copy for original, copy in zip(originals, copies, strict=True)}
    for module, name, value in holders:
        adaptation.changes.set(module, name, copy_of[id(value)])


def _return_later(
    adaptation: Adaptation, original: Any, copy: Any, before: Mapping[str, Any]
) -> None:
    def undo() -> None:
        for name, value in vars(copy).items():
            if name not in before or before[name] is not value:
                vars(original)[name] = value

    adaptation.changes.on_undo(undo)
