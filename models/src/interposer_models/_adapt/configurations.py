"""Private copies of the configurations of an adapted model.

Models made from one configuration share the object. Without copies, the attention's name written to
the configuration would apply to all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from interposer_models._adapt.adaptation import Adaptation


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
