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
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of the checkpoint.

    Attributes:
        product: prefix of the layer of the model in which it runs, alone or with others.
    """

    name: str
    in_features: int
    out_features: int
    product: str


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the linear layers of a model, in its order, by the names that checkpoints use.

    Raises: ConfigError: a weight is stored as ``[I, O]``.
    """
    found = []
    for module in model.modules():
        if isinstance(module, Linear):
            if getattr(module._parameters.get("weight"), "stored_transposed", False):
                raise ConfigError(
                    f"the weight of {module.prefix} is stored as [inputs, outputs], which no "
                    "format of quantized weights has. Try: quantize while it loads, "
                    'load(path, quantization="fp8")'
                )
            parent = module.prefix.rpartition(".")[0]
            found += [
                Layer(f"{parent}.{part}", module.in_features, size, module.prefix)
                for part, size in module.parts.items()
            ]
    return found


def plain_patterns(model: nn.Module) -> list[str]:
    """Return patterns for what stays plain: routers, experts, projections from latent vectors.

    To others they are linear layers too, one for each matrix.
    """
    found = []
    for module in model.modules():
        if isinstance(module, Experts | Router | LatentProjection):
            name = re.escape(module.prefix.rpartition(".")[2])
            end = r"\." if isinstance(module, Experts) else "$"
            found.append(rf"{_REGEX}.*\.{name}{end}")
    return list(dict.fromkeys(found))


def selected(layers: Sequence[Layer], ignore: Sequence[str]) -> list[Layer]:
    """Return the layers that no pattern names, by its full name or by ``re:`` and a pattern.

    A pattern after ``re:`` matches at the start of the name, as in the compressed-tensors library.

    Raises:
        UnknownNameError: a name is that of no layer.
        ConfigError: a pattern matches none or is not valid, no layer is left, or layers that run
            as one product would be stored in different ways.
    """
    ignored: set[str] = set()
    for pattern in ignore:
        matched = {layer.name for layer in layers if _matches(pattern, layer.name)}
        if not matched and pattern != "lm_head":
            _raise_unmatched(pattern, layers)
        ignored |= matched
    left = [layer for layer in layers if layer.name not in ignored]
    if not left:
        raise ConfigError("--ignore names every linear layer, so nothing is left to quantize")
    for product in dict.fromkeys(layer.product for layer in left):
        parts = [layer.name for layer in layers if layer.product == product]
        plain = [name for name in parts if name in ignored]
        if plain:
            raise ConfigError(
                f"--ignore names {', '.join(plain)}, but not all that runs as one product with it: "
                f"{', '.join(parts)}. Try: name all of them, or none"
            )
    return left


def check_groups(layers: Sequence[Layer], chosen: WeightFormat, adjustable: bool) -> None:
    """Raise ConfigError unless groups divide the inputs of every layer.

    Args:
        adjustable: the scheme works with groups of other sizes too.
    """
    size = chosen.inputs_per_scale
    if size is None:
        return
    bad = [layer for layer in layers if layer.in_features % size]
    if not bad:
        return
    endings = sorted({layer.name.rpartition(".")[2] for layer in bad})
    patterns = " ".join(f"--ignore 're:.*{ending}'" for ending in endings)
    common = math.gcd(*(layer.in_features for layer in layers))
    largest = max(n for n in range(1, min(size, common) + 1) if common % n == 0)
    other = f", or --group-size {largest}, which divides all inputs" if adjustable else ""
    more = f" and {len(bad) - 1} more layers" if len(bad) > 1 else ""
    raise ConfigError(
        f"{bad[0].name}{more}: groups of {size} do not divide the {bad[0].in_features} inputs. "
        f"Try: {patterns}, which leaves them plain{other}"
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
            "Try: start it with re:.* where it is to match the end of a name"
        )
    ends = any(pattern in name for name in names)
    hint = f"Try: --ignore 're:.*{re.escape(pattern)}'" if ends else ""
    nearest = nearest_first(pattern, names)[:_MOST_NAMED]
    raise UnknownNameError("layer", pattern, nearest, hint, "in --ignore")
