"""The decision which layers hold their weights dequantized, and what that takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from interposer import Choice, Placement, Site, Verdict
from interposer.records import OpEntry
from interposer_models._decoder.decoder import CausalLM
from interposer_models._dequantization.methods import DequantizedEmbedding, DequantizedLinear
from interposer_ops.layers.linear import Linear

# Of what is free; the rest is for the cache and for the steps themselves.
_SHARE = 0.75
# A weight is dequantized in float64, where its codes and its scales are held besides.
_BYTES_MEANWHILE = 3 * 8

Choices = Mapping[tuple[object, ...], Choice]


@dataclass(frozen=True, slots=True)
class _Place:
    """A layer whose product is computed by the reference of an op.

    Attributes:
        references: choices of such ops, by their keys in the resolver.
        others: the same of what else the method of the layer calls.
        num_weights: of the product.
        exchange: returns the method that holds them dequantized.
    """

    layer: Any
    references: Choices
    others: Choices
    num_weights: int
    exchange: Callable[[], Any]

    @property
    def stored_bytes(self) -> int:
        """Return what the weight takes as it is stored."""
        held = self.layer._parameters.items()
        return sum(p.nbytes for name, p in held if p is not None and name != "bias")


def dequantize_once(model: nn.Module, site: Site, placement: Placement) -> None:
    """Exchange the methods of layers that would dequantize their weights in every step.

    Those keep theirs that cannot do with a plain product, and all of them where the memory is too
    small. Choices say so, and the resolver's notes what it comes to. Called before weights load.

    Args:
        site: of the model.
    """
    resolver: Any = site.resolver
    if not resolver.config.dequantize:
        return
    places: list[_Place] = []
    refused: dict[tuple[object, ...], Verdict] = {}
    for place in _places(model, site):
        verdict = place.layer.method.dequantizable()
        if verdict:
            places.append(place)
        else:
            told = {k: c for k, c in place.references.items() if c.chosen.emulation}
            refused.update(dict.fromkeys(told, verdict))
    verdict = _judge_memory(places, model, site, placement) if places else Verdict.accept()
    if not verdict:
        refused.update({key: verdict for place in places for key in place.references})
        resolver.notes.append(
            f"{_listed(places)} are dequantized in every step, slowly: {verdict.reason}"
        )
    for key, why in refused.items():
        resolver.annotate(key, f"not dequantized while loading: {why.reason}")
    if not (places and verdict):
        return
    served: dict[tuple[object, ...], list[_Place]] = defaultdict(list)
    for place in places:
        for key in (*place.references, *place.others):
            served[key].append(place)
    for key, own in served.items():
        count = len(set(resolver.choices[key][1]))
        note = (
            f"not called at {len(own)} of {count} places: their weights are dequantized once, "
            f"while loading, to {_sizes(own, site)}, and multiplied by the op 'linear'"
        )
        resolver.annotate(key, note, idle=len(own) == count)
    for place in places:
        place.layer.method = place.exchange()
    resolver.notes.append(
        f"{_listed(places)} are dequantized once, while loading, to {_sizes(places, site)}. "
        "Config(dequantize=False) keeps them as they are stored, and is slow"
    )


def _places(model: nn.Module, site: Site) -> Iterator[_Place]:
    """Yield the layers of which a product is left to a reference, as nothing else can compute it.

    An op of products states the dim ``in_features``. A reference that somebody wants is none.
    """
    by_prefix: dict[str, dict[tuple[object, ...], Choice]] = defaultdict(dict)
    for key, (choice, prefixes) in site.resolver.choices.items():
        if choice.request.kind == "kernel" and not choice.idle:
            for prefix in prefixes:
                by_prefix[prefix][key] = choice

    def place(
        layer: Any, prefixes: Sequence[str], size: tuple[int, int], method: Any, *sites: Site
    ) -> Iterator[_Place]:
        choices = {k: c for prefix in prefixes for k, c in by_prefix[prefix].items()}
        references = {key: choice for key, choice in choices.items() if _is_slow(choice)}
        if references:
            own = Site(site.resolver, layer.prefix, site.dtype)
            others = {k: c for k, c in choices.items() if k not in references}

            def exchange() -> Any:
                return method(layer.method, own, *size, *sites)

            yield _Place(layer, references, others, size[0] * size[1], exchange)

    for module in model.modules():
        if isinstance(module, Linear):
            size = module.in_features, sum(module.parts.values())
            yield from place(module, (module.prefix,), size, DequantizedLinear)
    if not isinstance(model, CausalLM):
        return  # nothing says which layers of another frame are the table and the head
    head, table = model.lm_head, model.model.embed_tokens
    hidden, vocab = model.model.config.hidden_size, model.config.vocab_size
    if table.is_tied:
        at = Site(site.resolver, head.prefix, site.dtype)
        both = head.prefix, table.prefix
        yield from place(table, both, (vocab, hidden), DequantizedEmbedding, at)
    else:
        yield from place(head, (head.prefix,), (hidden, vocab), DequantizedLinear)


def _is_slow(choice: Choice) -> bool:
    return (
        isinstance(choice.chosen.record, OpEntry)
        and not choice.wished
        and "in_features" in choice.request.dims
        and choice.request.name != "linear"
    )


def _judge_memory(
    places: Sequence[_Place], model: nn.Module, site: Site, placement: Placement
) -> Verdict:
    """Refuse unless all weights fit, and what dequantizing the largest takes on the host."""
    needed = sum(parameter.nbytes for parameter in model.parameters())
    needed += sum(_plain_bytes(place, site) - place.stored_bytes for place in places)
    device = placement.device
    if device.torch_device.partition(":")[0] == "cpu":
        needed += _BYTES_MEANWHILE * max(place.num_weights for place in places)
    if placement.described:
        free = device.capability.memory_bytes
    else:
        free = placement.platform.memory(device.torch_device).free_bytes
    if needed <= _SHARE * free or (placement.described and not free):
        return Verdict.accept()
    return Verdict.refuse(
        f"dequantized, they would need {_mebibytes(needed)} with all other weights, and "
        f"{_SHARE:.0%} of the free memory are {_mebibytes(int(_SHARE * free))}"
    )


def _listed(places: Sequence[_Place]) -> str:
    ops = sorted({choice.request.name for place in places for choice in place.references.values()})
    return (
        f"the weights of {len(places)} layers, which only the reference of {', '.join(ops)} reads,"
    )


def _sizes(places: Sequence[_Place], site: Site) -> str:
    plain = sum(_plain_bytes(place, site) for place in places)
    stored = sum(place.stored_bytes for place in places)
    return f"{_mebibytes(plain)} instead of {_mebibytes(stored)}"


def _plain_bytes(place: _Place, site: Site) -> int:
    return place.num_weights * site.dtype.itemsize


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
