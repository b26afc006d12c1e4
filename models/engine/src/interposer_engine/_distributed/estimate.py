"""Estimated time of a decode step on several ranks, from declared device and link rates.

Dimensions: N ranks, M of them on a node, K nodes, B sequences, C tokens in the cache of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from interposer import CausalModel, Choice, Ranks, Resolver
from interposer.errors import ConfigError
from interposer_engine._bench.roofline import ModelWork
from interposer_ops.layers.moe.dispatcher import EXCHANGE
from interposer_ops.layers.moe.placement import ExpertPlacement, balanced_placement
from interposer_ops.layers.moe.sharded_experts import ExpertParallelExperts, NotPlacedNote
from interposer_ops.layers.tensor_parallel.fused_all_reduce import FUSED_ALL_REDUCE
from interposer_ops.layers.tensor_parallel.sharding import Shard

_BATCHES = 1, 64
_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Links:
    """Declared bandwidths and latencies of the connections between ranks.

    Attributes:
        link_bytes_per_s: rate from one rank to the others of its node, in one direction.
        link_seconds: latency of a collective within a node.
        network_bytes_per_s: rate from one rank to other nodes, in one direction.
        network_seconds: latency of a collective between nodes.
    """

    link_bytes_per_s: float
    link_seconds: float
    network_bytes_per_s: float = 0.0
    network_seconds: float = 0.0

    def all_reduce(self, num_bytes: float, ranks: int, nodes: int = 1) -> float:
        """Return the time of an all-reduce of ``num_bytes`` per rank, in seconds.

        Within a node the faster of two algorithms counts, for b bytes. One-shot: every rank reads
        all parts, (M - 1) b. Two-shot: a reduce-scatter and an all-gather, 2 (M - 1) / M b with
        twice the latency. Between nodes, each rank all-reduces its b / M after the reduce-scatter,
        2 (K - 1) / K of it.

        Args:
            ranks: N.
            nodes: K.
        """
        node_ranks = max(1, ranks // nodes)
        one_shot = self.link_seconds + (node_ranks - 1) * num_bytes / self.link_bytes_per_s
        two_shot_half = (
            self.link_seconds + (node_ranks - 1) / node_ranks * num_bytes / self.link_bytes_per_s
        )
        if node_ranks == 1:
            one_shot = two_shot_half = 0.0
        if nodes == 1:
            return min(one_shot, 2 * two_shot_half)
        network_bytes = 2 * (nodes - 1) / nodes * num_bytes / node_ranks
        return 2 * two_shot_half + self.network_seconds + network_bytes / self.network_bytes_per_s

    def all_gather(self, num_bytes: float, ranks: int, nodes: int = 1) -> float:
        """Return the time of an all-gather of ``num_bytes`` per rank, in seconds.

        Data from other nodes crosses the network once, and is passed on within the node.
        """
        node_ranks = max(1, ranks // nodes)
        # Each rank receives from all others over its own link, one after another.
        seconds = (ranks - 1) * num_bytes / self.link_bytes_per_s if node_ranks > 1 else 0.0
        if node_ranks > 1:
            seconds += self.link_seconds
        if nodes > 1:
            seconds += self.network_seconds
            seconds += (nodes - 1) * num_bytes / self.network_bytes_per_s
        return seconds


@dataclass(frozen=True, slots=True)
class Step:
    """The parts of a decode step's time, in seconds.

    Reading and multiplying overlap; exchanging overlaps with nothing.

    Attributes:
        reading: weights and caches of one rank.
        multiplying: matmuls of one rank.
        exchanging: all collectives.
    """

    reading: float
    multiplying: float
    exchanging: float

    @property
    def seconds(self) -> float:
        """Time of the step: the longer of memory reads and matmuls, plus all collectives."""
        return max(self.reading, self.multiplying) + self.exchanging

    @property
    def bound(self) -> str:
        """Name of the longest part of the step: the bottleneck."""
        parts = {
            "memory": self.reading,
            "products": self.multiplying,
            "collectives": self.exchanging,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind and size in a step; ``row_bytes`` is the size per token."""

    collective: str
    row_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated decode speed and memory of one rank of a model, on a device of declared rates.

    Attributes:
        work: work of one rank.
        rates: ``memory_bytes_per_s``, ``flops_per_s``, and the attributes of ``Links``.
    """

    work: ModelWork
    ranks: Ranks
    memory_bytes: int
    rates: Mapping[str, float]
    exchanges: tuple[Exchange, ...]

    def step(self, batch: int, context: int) -> Step:
        """Return the estimated time of a step of B sequences with C tokens each in the KV cache."""
        rates, nodes = dict(self.rates), len(set(self.ranks.hosts))
        memory, flops = rates.pop("memory_bytes_per_s"), rates.pop("flops_per_s")
        links = Links(**rates)
        exchanging = sum(
            e.count * getattr(links, e.collective)(e.row_bytes * batch, self.ranks.size, nodes)
            for e in self.exchanges
        )
        read_bytes = self.work.weight_bytes(batch) + batch * self.work.context_bytes(context)
        num_operations = self.work.operations(1, context, batch)
        return Step(read_bytes / memory, num_operations / flops, exchanging)

    @property
    def weight_bytes(self) -> float:
        """Size of the weights of one rank, in bytes."""
        return sum(part.num_bytes for part in (*self.work.weights, self.work.head))

    def lines(self, context: int = _CONTEXT) -> Iterator[str]:
        """Yield a line on whether weights and KV cache fit, then a line for each batch size."""
        weights, memory = self.weight_bytes, self.memory_bytes
        cache = self.work.context_bytes(context)
        free_bytes = memory - weights
        fits = (
            f"room for {int(free_bytes / cache * context):,} tokens"
            if cache and free_bytes > 0
            else "room"
        )
        text = f"{weights / 2**30:.1f} GiB of weights for each of {self.ranks.size} ranks"
        yield f"{text}, of {memory / 2**30:.1f} GiB: " + (
            f"they fit, with {fits}" if free_bytes > 0 else "they do not fit"
        )
        for batch in _BATCHES:
            step = self.step(batch, context)
            yield (
                f"estimate: a step of batch size {batch} after {context} cached tokens takes "
                f"{step.seconds * 1e3:.2f} ms, bound by {step.bound}: {step.reading * 1e3:.2f} "
                f"reading, {step.multiplying * 1e3:.2f} multiplying at the same time, "
                f"{step.exchanging * 1e3:.2f} in {sum(e.count for e in self.exchanges)} collectives"
            )


def exchanges_of(choices: Iterable[tuple[Choice, list[str]]]) -> tuple[Exchange, ...]:
    """Return the collectives of one step of a model, from the model's choices.

    For a layer that requested several sizes, the smallest counts: that of one token.
    """
    sizes: dict[tuple[str, str], int] = {}
    for choice, prefixes in choices:
        request = choice.request
        # A fused all-reduce is requested next to the plain one, which states the time.
        if request.kind != "communicator" or request.name == FUSED_ALL_REDUCE:
            continue
        for prefix in set(prefixes):
            if prefix.rpartition(".")[2] == EXCHANGE:  # has more rows than a decode step
                continue
            key, num_bytes = (request.name, prefix), int(request.dims["bytes"])
            sizes[key] = min(num_bytes, sizes.get(key, num_bytes))
    counts: dict[tuple[str, int], int] = {}
    for (name, _), size in sizes.items():
        counts[name, size] = counts.get((name, size), 0) + 1
    return tuple(Exchange(name, size, count) for (name, size), count in counts.items())


def estimate_notes(model: CausalModel, resolver: Resolver) -> list[str]:
    """Return lines on the estimated speed of described ranks, if their device declares rates."""
    ranks, capability = resolver.ranks, resolver.device.capability
    if ranks is None or not (resolver.described and capability.rates):
        return []
    exchanges = exchanges_of(resolver.choices.values())
    work = ModelWork.of(model)
    return [*Estimate(work, ranks, capability.memory_bytes, capability.rates, exchanges).lines()]


_KINDS = {
    "heads": "sharded by heads",
    "column": "sharded by outputs",
    "row": "sharded by inputs, then all-reduced",
    "expert": "sharded inside every expert, then all-reduced",
    "experts": "expert parallel",
    "vocabulary": "sharded by tokens",
}
_REPLICATED = "replicated on every rank"


def shard_notes(model: nn.Module) -> list[str]:
    """Describe how each layer with weights is sharded, and the size of this rank's shard.

    Layers of several blocks are listed once if the sizes are equal.
    """
    layers_by_kind: dict[str, dict[str, None]] = {}
    for prefix, layer in model.named_modules():
        name = ".".join(part for part in prefix.split(".") if not part.isdigit())
        shards = [*_shards(layer)]
        if shards:
            kinds = dict.fromkeys(shard.kind for _, shard in shards)
            for kind in kinds:
                sizes = ", ".join(
                    _size(part, shard) for part, shard in shards if shard.kind == kind
                )
                layers_by_kind.setdefault(_KINDS[kind], {})[f"{name} ({sizes})"] = None
        elif any(parameter is not None for parameter in layer._parameters.values()):
            layers_by_kind.setdefault(_REPLICATED, {})[name] = None
    kinds_in_order = [*_KINDS.values(), _REPLICATED]
    return [
        f"{kind}: {', '.join(layers_by_kind[kind])}"
        for kind in kinds_in_order
        if kind in layers_by_kind
    ]


def _shards(layer: nn.Module) -> Iterator[tuple[str, Shard]]:
    """Yield ``(part, shard)`` of each sharded part; the part is "" for an undivided layer."""
    shards_by_part = getattr(layer, "shards", None)
    if isinstance(shards_by_part, dict):
        for part, shard in shards_by_part.items():
            if isinstance(shard, Shard):
                yield part, shard
    elif isinstance(shard := getattr(layer, "shard", None), Shard):
        yield "", shard


def _size(part: str, shard: Shard) -> str:
    return f"{part} {shard.size} of {shard.whole}".lstrip()


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The number of rows that each expert of a layer has computed since the last placement.

    Attributes:
        rows: rows of each expert, by number. A token is one row of each expert that it is
            routed to.
        placement: the rank of each expert.
    """

    rows: tuple[int, ...]
    placement: ExpertPlacement

    @property
    def imbalance(self) -> float:
        """Rows of the most loaded rank, divided by the mean over all ranks; 1 without rows."""
        rows_by_rank = self.placement.shares(self.rows)
        return (
            max(rows_by_rank) * len(rows_by_rank) / total if (total := sum(rows_by_rank)) else 1.0
        )


def placed_layers(model: nn.Module) -> dict[str, ExpertParallelExperts]:
    """Return the layers that are under expert parallelism, by prefix."""
    return {m.prefix: m for m in model.modules() if isinstance(m, ExpertParallelExperts)}


def loads_of(model: nn.Module) -> dict[str, ExpertLoads]:
    """Return the expert loads of all layers under expert parallelism, the same on every rank."""
    return {
        prefix: ExpertLoads(tuple(layer.routes.counts()), layer.routes.placement)
        for prefix, layer in placed_layers(model).items()
    }


def better_placements(model: nn.Module) -> dict[ExpertParallelExperts, ExpertPlacement]:
    """Return new expert placements for the layers that would then be better balanced."""
    placements = {}
    for layer in placed_layers(model).values():
        current = layer.routes.placement
        balanced = balanced_placement(layer.routes.counts(), current)
        if balanced != current:
            placements[layer] = balanced
    return placements


def check_expert_parallel(model: nn.Module, resolver: Resolver, ranks: Ranks | None) -> None:
    """Raise ConfigError if expert parallelism is requested, but no layer supports it."""
    if ranks is None or ranks.experts is None or placed_layers(model):
        return
    # Layers that declined expert parallelism have noted the reason.
    reasons = [note for note in resolver.notes if isinstance(note, NotPlacedNote)]
    explanation = "; ".join(reasons) or "the model has no MoE layer that can be divided"
    raise ConfigError(
        f"expert_parallel is requested, but no layer of this model supports it: {explanation}. "
        "Try: load without expert_parallel, which shards or replicates every expert"
    )


def load_notes(model: nn.Module) -> Iterator[str]:
    """Yield a note on the load balance of ranks, if experts are placed and have computed rows."""
    loads = loads_of(model)
    used_layers = {
        prefix: layer_loads for prefix, layer_loads in loads.items() if any(layer_loads.rows)
    }
    if used_layers:
        worst = max(used_layers, key=lambda prefix: used_layers[prefix].imbalance)
        rows = sum(sum(layer_loads.rows) for layer_loads in used_layers.values())
        yield (
            f"expert loads: {rows} rows in {len(used_layers)} layers; the most loaded rank has "
            f"{used_layers[worst].imbalance:.2f} times the mean in {worst}"
        )
