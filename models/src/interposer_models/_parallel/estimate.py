"""The time of a decode step over several ranks, on paper.

Dimensions: N ranks, M of them on a node, K nodes, B sequences, C tokens in the cache of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from interposer import CausalModel, Choice, Ranks, Resolver
from interposer_models._bench.work import ModelWork
from interposer_ops.layers.fused_sums import FUSED_SUM
from interposer_ops.layers.rank_dispatcher import EXCHANGE

_BATCHES = 1, 64
_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Links:
    """The ways between ranks. Seconds are those of the smallest message, there and back.

    Attributes:
        link_bytes_per_s: of one rank to the others of its node, in one direction.
        link_seconds: of a collective within a node.
        network_bytes_per_s: of one rank to other nodes, in one direction.
        network_seconds: of a collective between nodes.
    """

    link_bytes_per_s: float
    link_seconds: float
    network_bytes_per_s: float = 0.0
    network_seconds: float = 0.0

    def all_reduce(self, num_bytes: float, ranks: int, nodes: int = 1) -> float:
        """Return the seconds of an all-reduce of so many bytes of each rank.

        Within a node every rank reads all parts at once, (M - 1) b, or each sums up its share and
        reads the others' sums, 2 (M - 1) / M b with twice the latency: whichever is less. Between
        nodes each rank reduces the share of b / M that it has, 2 (K - 1) / K of it, between the
        two halves of the second way.
        """
        inside = max(1, ranks // nodes)
        at_once = self.link_seconds + (inside - 1) * num_bytes / self.link_bytes_per_s
        half = self.link_seconds + (inside - 1) / inside * num_bytes / self.link_bytes_per_s
        if inside == 1:
            at_once = half = 0.0
        if nodes == 1:
            return min(at_once, 2 * half)
        share = 2 * (nodes - 1) / nodes * num_bytes / inside
        return 2 * half + self.network_seconds + share / self.network_bytes_per_s

    def all_gather(self, num_bytes: float, ranks: int, nodes: int = 1) -> float:
        """Return the seconds in which every rank gets so many bytes of each other one.

        What comes from other nodes comes once, and goes on to the other ranks of the node.
        """
        inside = max(1, ranks // nodes)
        seconds = (ranks - 1) * num_bytes / self.link_bytes_per_s if inside > 1 else 0.0
        if inside > 1:
            seconds += self.link_seconds
        if nodes > 1:
            seconds += self.network_seconds
            seconds += (nodes - 1) * num_bytes / self.network_bytes_per_s
        return seconds


@dataclass(frozen=True, slots=True)
class Step:
    """The parts of the time of a decode step, in seconds; nothing of them overlaps.

    Attributes:
        reading: weights and caches of one rank.
        multiplying: its products.
        exchanging: all collectives.
    """

    reading: float
    multiplying: float
    exchanging: float

    @property
    def seconds(self) -> float:
        """The longer one of reading and multiplying, and what is exchanged."""
        return max(self.reading, self.multiplying) + self.exchanging

    @property
    def bound(self) -> str:
        """The name of the part that takes longest."""
        parts = {
            "memory": self.reading,
            "products": self.multiplying,
            "collectives": self.exchanging,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind and size in a step; ``row_bytes`` are those of one token."""

    collective: str
    row_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model of one rank on a device of declared speed.

    Attributes:
        work: of one rank.
        rates: ``memory_bytes_per_s`` and ``flops_per_s``, and those of ``Links`` by their names.
    """

    work: ModelWork
    ranks: Ranks
    memory_bytes: int
    rates: Mapping[str, float]
    exchanges: tuple[Exchange, ...]

    def step(self, batch: int, context: int) -> Step:
        """Return the time of a step of B sequences with C tokens in the cache."""
        rates, nodes = dict(self.rates), len(set(self.ranks.hosts))
        memory, flops = rates.pop("memory_bytes_per_s"), rates.pop("flops_per_s")
        links = Links(**rates)
        exchanging = sum(
            e.count * getattr(links, e.collective)(e.row_bytes * batch, self.ranks.size, nodes)
            for e in self.exchanges
        )
        read = self.work.weight_bytes(batch) + batch * self.work.context_bytes(context)
        products = self.work.operations(1, context, batch)
        return Step(read / memory, products / flops, exchanging)

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights of one rank."""
        return sum(part.num_bytes for part in (*self.work.weights, self.work.head))

    def lines(self, context: int = _CONTEXT) -> Iterator[str]:
        """Yield whether it fits, then a sentence for each batch."""
        weights, memory = self.weight_bytes, self.memory_bytes
        cache = self.work.context_bytes(context)
        room = memory - weights
        fits = f"room for {int(room / cache * context):,} tokens" if cache and room > 0 else "room"
        held = f"{weights / 2**30:.1f} GiB of weights for each of {self.ranks.size} ranks"
        yield f"{held}, of {memory / 2**30:.1f} GiB: " + (
            f"they fit, with {fits}" if room > 0 else "they do not fit"
        )
        for batch in _BATCHES:
            step = self.step(batch, context)
            yield (
                f"on paper, a step of {batch} behind {context} tokens takes "
                f"{step.seconds * 1e3:.2f} ms, bound by {step.bound}: {step.reading * 1e3:.2f} "
                f"reading, {step.multiplying * 1e3:.2f} multiplying at the same time, "
                f"{step.exchanging * 1e3:.2f} in {sum(e.count for e in self.exchanges)} collectives"
            )


def exchanges_of(choices: Iterable[tuple[Choice, list[str]]]) -> tuple[Exchange, ...]:
    """Return the collectives that a step takes, of the choices that were made for a model.

    A layer that asks for several sizes uses one of them in each step, so that the smallest counts,
    which is that of one token.
    """
    sizes: dict[tuple[str, str], int] = {}
    for choice, prefixes in choices:
        request = choice.request
        # One that is fused is asked for beside the plain one, which says how long it takes.
        if request.kind != "communicator" or request.name == FUSED_SUM:
            continue
        for prefix in set(prefixes):
            if prefix.rpartition(".")[2] == EXCHANGE:  # of more rows than a decode step has
                continue
            key, found = (request.name, prefix), int(request.dims["bytes"])
            sizes[key] = min(found, sizes.get(key, found))
    counted: dict[tuple[str, int], int] = {}
    for (name, _), size in sizes.items():
        counted[name, size] = counted.get((name, size), 0) + 1
    return tuple(Exchange(name, size, count) for (name, size), count in counted.items())


def estimated(model: CausalModel, resolver: Resolver) -> list[str]:
    """Return what is to be said of the speed of described ranks, where their rates are declared."""
    ranks, can = resolver.ranks, resolver.device.capability
    if ranks is None or not (resolver.described and can.rates):
        return []
    exchanges = exchanges_of(resolver.choices.values())
    work = ModelWork.of(model)
    return [*Estimate(work, ranks, can.memory_bytes, can.rates, exchanges).lines()]
