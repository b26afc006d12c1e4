"""Tiny random models, and the inputs that they run on."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiny_models.configurations import tiny
from tiny_models.exceptions import CHANGES
from tiny_models.inputs import Inputs, Maker
from tiny_models.numerics import run

# More weights than this are no tiny model: one thread has to run it in a second.
MOST_WEIGHTS = 65_000_000
# Tried in this order: the smallest model first. Whether widths and images shrink.
SHRUNK = {
    "widths and images": (True, True),
    "widths": (True, False),
    "images": (False, True),
}


@dataclass(frozen=True, slots=True)
class Built:
    """A model with inputs that it runs on.

    Attributes:
        shrunk: what of it shrank besides its depth and vocabulary.
        call: the inputs in words.
        outputs: what comes of the inputs.
    """

    model: nn.Module
    inputs: Inputs
    class_name: str
    shrunk: str
    call: str
    outputs: dict[str, Tensor]


class NotBuiltError(Exception):
    """No model of a type could be built, or none ran; the text has each attempt."""


def model_classes() -> dict[str, str]:
    """Return a class for every model type: the base model, or else the first with a head.

    A type that no automatic class makes a model of describes a part of another's configuration.
    """
    mappings = [
        value
        for name, value in vars(modeling_auto).items()
        if re.fullmatch("MODEL_.*MAPPING_NAMES", name)
    ]
    mappings.sort(key=lambda mapping: mapping is not modeling_auto.MODEL_MAPPING_NAMES)
    found: dict[str, str] = {}
    for mapping in mappings:
        for model_type, names in mapping.items():
            if model_type in CONFIG_MAPPING:
                found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return found


def build(model_type: str, class_name: str, dtype: torch.dtype = torch.float32) -> Built:
    """Return a tiny model of a type with random weights, the same ones every time.

    Raises: NotBuiltError.
    """
    failures = []
    for shrunk, (widths, images) in SHRUNK.items():
        try:
            model = make(model_type, class_name, widths, images).to(dtype)
        except ImportError as error:  # no size helps
            failures.append(f"building: {where(error)}")
            break
        except Exception as error:  # noqa: BLE001  whatever it raises is the row's reason
            failures.append(f"building: {where(error)}")
            continue
        for call, make_inputs in Maker(model).candidates():
            try:
                inputs = {
                    name: value.to(dtype) if getattr(value, "is_floating_point", bool)() else value
                    for name, value in make_inputs().items()
                }
                outputs = run(model, inputs)
            except Exception as error:  # noqa: BLE001
                failures.append(f"{call}: {where(error)}")
                continue
            if not any(value.is_floating_point() for value in outputs.values()):
                failures.append(f"{call}: no float tensor comes out")
                continue
            return Built(model, inputs, class_name, shrunk, call, outputs)
    raise NotBuiltError("\n".join(dict.fromkeys(failures)))


def make(model_type: str, class_name: str, widths: bool = True, images: bool = True) -> nn.Module:
    """Return a tiny model of a type in evaluation mode."""
    cls: Any = getattr(transformers, class_name)

    def config() -> PreTrainedConfig:
        whole = tiny(model_type, widths, images, **CHANGES.get(model_type, {}))
        # The base model of some is that of a configuration within.
        inner = [each for each in vars(whole).values() if type(each) is cls.config_class]
        return whole if type(whole) is cls.config_class or not inner else inner[0]

    with torch.device("meta"):
        sketch = cls(config())
    if (size := sum(weight.numel() for weight in sketch.parameters())) > MOST_WEIGHTS:
        raise ValueError(f"{size / 1e6:.0f} million weights are not tiny")
    del sketch
    torch.manual_seed(0)
    model: nn.Module = cls(config()).eval()
    randomize(model)
    return model


def randomize(model: nn.Module) -> None:
    """Give every parameter numbers that matter: biases that are not 0, norms that are not 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if (
                not parameter.isfinite().all() or parameter.abs().max() > 1e6
            ):  # nobody initialised it
                parameter.copy_(0.02 * noise)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif parameter.numel() > 1 and parameter.std() == 0:
                parameter.add_(0.02 * noise)


def where(error: BaseException) -> str:
    """Return an error with the line that raised it, short."""
    frames = list(_frames(error))
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({frames[-1] if frames else ''})"


def _frames(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
