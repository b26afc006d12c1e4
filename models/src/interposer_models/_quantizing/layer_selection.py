"""Selection of the linear layers of a model to quantize."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from interposer.errors import ConfigError, UnknownNameError, nearest_first
from interposer_models._decoder.latent_attention import LatentProjection
from interposer_ops.layers.experts import Experts, Router
from interposer_ops.layers.linear import Linear
from interposer_quantization.writing import WeightFormat

_REGEX = "re:"
_MAX_SUGGESTIONS = 8


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of the checkpoint.

    Attributes:
        product: prefix of the model's layer that runs it, alone or merged with others as one
            matmul.
    """

    name: str
    in_features: int
    out_features: int
    product: str


def layers_of(model: nn.Module) -> list[Layer]:
    """List the linear layers of a model in order, by the names that checkpoints use.

    Raises: ConfigError: a weight is stored as ``[I, O]``.
    """
    layers = []
    for module in model.modules():
        if isinstance(module, Linear):
            # GPT-2 stores weights transposed.
            if getattr(module._parameters.get("weight"), "stored_transposed", False):
                raise ConfigError(
                    f"the weight of {module.prefix} is stored as [inputs, outputs], which no "
                    "format of quantized weights has. Try: quantize while it loads, "
                    'load(path, quantization="fp8")'
                )
            parent = module.prefix.rpartition(".")[0]
            layers += [
                Layer(f"{parent}.{part}", module.in_features, size, module.prefix)
                for part, size in module.parts.items()
            ]
    return layers


def plain_patterns(model: nn.Module) -> list[str]:
    """Return patterns for layers that stay unquantized: routers, experts, latent projections.

    Other programs treat the matrices of such layers as linear layers.
    """
    patterns = []
    for module in model.modules():
        if isinstance(module, Experts | Router | LatentProjection):
            name = re.escape(module.prefix.rpartition(".")[2])
            # Experts have submodules in checkpoints; routers and projections are layers themselves.
            end = r"\." if isinstance(module, Experts) else "$"
            patterns.append(rf"{_REGEX}.*\.{name}{end}")
    return list(dict.fromkeys(patterns))


def unignored_layers(layers: Sequence[Layer], ignore: Sequence[str]) -> list[Layer]:
    """Return the layers that no pattern matches, by full name or by ``re:`` and a pattern.

    A pattern after ``re:`` matches at the start of the name, as in the compressed-tensors library.

    Raises:
        UnknownNameError: no layer has the name.
        ConfigError: a pattern matches no layer or is invalid, no layer remains, or layers that run
            as one matmul would be stored in different ways.
    """
    ignored: set[str] = set()
    for pattern in ignore:
        matched = {layer.name for layer in layers if _matches(pattern, layer.name)}
        # A model with tied embeddings has no lm_head, but users may always name it.
        if not matched and pattern != "lm_head":
            _raise_unmatched(pattern, layers)
        ignored |= matched
    remaining = [layer for layer in layers if layer.name not in ignored]
    if not remaining:
        raise ConfigError("--ignore names every linear layer, so nothing is left to quantize")
    # A merged layer can be quantized only as a whole.
    for product in dict.fromkeys(layer.product for layer in remaining):
        parts = [layer.name for layer in layers if layer.product == product]
        ignored_parts = [name for name in parts if name in ignored]
        if ignored_parts:
            raise ConfigError(
                f"--ignore names {', '.join(ignored_parts)}, but not all layers of the same "
                f"matmul: {', '.join(parts)}. Try: name all of them, or none"
            )
    return remaining


def check_groups(layers: Sequence[Layer], chosen: WeightFormat, adjustable: bool) -> None:
    """Raise ConfigError unless the group size divides the inputs of every layer.

    Args:
        adjustable: the scheme supports other group sizes.
    """
    size = chosen.inputs_per_scale
    if size is None:
        return
    undivided = [layer for layer in layers if layer.in_features % size]
    if not undivided:
        return
    endings = sorted({layer.name.rpartition(".")[2] for layer in undivided})
    patterns = " ".join(f"--ignore 're:.*{ending}'" for ending in endings)
    # The largest group size that divides the inputs of all layers.
    common = math.gcd(*(layer.in_features for layer in layers))
    largest = max(n for n in range(1, min(size, common) + 1) if common % n == 0)
    size_hint = f", or --group-size {largest}, which divides all inputs" if adjustable else ""
    more_layers = f" and {len(undivided) - 1} more layers" if len(undivided) > 1 else ""
    raise ConfigError(
        f"{undivided[0].name}{more_layers}: groups of {size} do not divide the "
        f"{undivided[0].in_features} inputs. Try: {patterns}, which leaves them plain{size_hint}"
    )


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith(_REGEX):
        return pattern == name
    try:
        return re.match(pattern.removeprefix(_REGEX), name) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"--ignore {pattern!r} is no regular expression: {error}") from None


def _raise_unmatched(pattern: str, layers: Sequence[Layer]) -> None:
    names = [layer.name for layer in layers]
    if pattern.startswith(_REGEX):
        raise ConfigError(
            f"--ignore {pattern!r} matches no linear layer, such as {names[0]}. "
            "Try: begin the pattern with re:.* to match the end of a name"
        )
    is_part_of_name = any(pattern in name for name in names)
    hint = f"Try: --ignore 're:.*{re.escape(pattern)}'" if is_part_of_name else ""
    suggestions = nearest_first(pattern, names)[:_MAX_SUGGESTIONS]
    raise UnknownNameError("layer", pattern, suggestions, hint, "in --ignore")
