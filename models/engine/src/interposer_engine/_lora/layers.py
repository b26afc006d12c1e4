"""The LoRA adapters of a layer, computed by two grouped matmuls for all tokens of a step.

``StepAdapters`` holds the adapter of each token of the current step, and ``LowRank`` adds the
low-rank sums to the outputs of a layer.

Dimensions: T tokens, I inputs, O outputs of a part, A adapters, R the largest rank (in
``StepAdapters`` the tokens with logits), P adapted parts of a merged layer, V vocabulary, E
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from interposer import Choice, LinearMethod, Site
from interposer.errors import ConfigError
from interposer_engine._lora.files import AdapterPlace, Matrices
from interposer_engine._scheduler import Chunk
from interposer_engine._sequence import TokenSequence
from interposer_ops.lora import lora_expand, lora_shrink

NONE = -1
"""Number of a token without an adapter."""


class Attachable(Protocol):
    """Interface of objects that add adapters to a layer."""

    def attach(self, layer: nn.Module) -> Handle:
        """Add adapters to the layer, until the handle is removed."""
        ...


class Handle(Protocol):
    """Handle that removes adapters from a layer again."""

    def remove(self) -> None:
        """Remove the adapters from the layer."""
        ...


class StepHooks:
    """Hooks and forwards of layers with adapters, attached only in steps that use adapters."""

    def __init__(self, hooks: Mapping[Any, Attachable]) -> None:
        self._hooks = dict(hooks)
        self._handles: list[Handle] = []

    def switch(self, on: bool) -> None:
        """Attach all hooks and forward functions, or remove them."""
        if on and not self._handles:
            self._handles = [hook.attach(layer) for layer, hook in self._hooks.items()]
        elif not on and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []


class StepAdapters:
    """The adapter number of each token, in fixed memory that captured graphs can read.

    Attributes:
        names: adapters that requests can name.
        hooks: hooks of the layers; set after the hooks are created.
    """

    hooks = StepHooks({})

    def __init__(
        self,
        versions: Iterable[int],
        current: Mapping[str, int],
        num_tokens: int,
        device: str,
        graphs: bool,
        leave: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Allocate memory for the adapter numbers of the largest step.

        Args:
            versions: loaded versions; the number of a version in a step is its position.
            current: the version that new requests get, by name.
            num_tokens: tokens of the largest step, or of the largest graph if that is larger.
            graphs: steps may be captured. Hooks stay attached then, as a graph only computes what
                was not captured.
            leave: called with the version of a request that ended, if the version was replaced.
        """
        self.names = tuple(current)
        self._numbers = {version: number for number, version in enumerate(versions)}
        self._current, self._leave = dict(current), leave
        self._graphs = graphs
        self._buffer = torch.full((num_tokens,), NONE, device=device)
        self._tokens = self._rows = self._buffer

    def version(self, name: str | None) -> int | None:
        """Return the adapter version that a new request with this adapter name gets."""
        return None if name is None else self._current[name]

    def request_ended(self, sequence: TokenSequence) -> None:
        """Release the adapter of a request that has ended."""
        version = sequence.adapter
        if version is not None and version not in self._current.values():
            self._leave(version)

    def assign(self, chunks: Iterable[Chunk]) -> None:
        """Set the adapter number of each token of the next step."""
        numbered_chunks = [
            (NONE if (version := chunk.sequence.adapter) is None else self._numbers[version], chunk)
            for chunk in chunks
        ]
        has_adapters = self._graphs or any(number != NONE for number, _ in numbered_chunks)
        self.hooks.switch(has_adapters)
        if not has_adapters:
            return
        by_token = chain.from_iterable(
            repeat(number, chunk.num_rows) for number, chunk in numbered_chunks
        )
        self._tokens = self._in_buffer([*by_token])
        by_logit_row = chain.from_iterable(
            repeat(number, chunk.num_logits) for number, chunk in numbered_chunks
        )
        self._rows = torch.tensor([*by_logit_row], dtype=torch.int64, device=self._buffer.device)

    def of_rows(self, count: int, prefix: str) -> Tensor:
        """Return the adapter number of each row that a layer computes, int64 ``[count]``.

        The rows are all tokens of the step, padded if a graph computes them, or only the tokens
        whose logits are computed.

        Raises: ConfigError: the layer computes other rows.
        """
        # The number of rows identifies them: the head computes only rows with logits.
        if count == len(self._tokens):
            return self._tokens
        if count == len(self._rows):
            return self._rows
        if self._graphs and len(self._tokens) < count <= len(self._buffer):
            return self._buffer[:count]
        raise ConfigError(
            f"{prefix} computes {count} rows in a step of {len(self._tokens)} tokens, so the "
            "adapter of each row is unknown. Try: an adapter without this module"
        )

    def _in_buffer(self, numbers: list[int]) -> Tensor:
        count, buffer = len(numbers), self._buffer
        numbers_tensor = torch.tensor(numbers, dtype=torch.int64)
        if count > len(buffer):  # a call for all logits of a long text, which uses no graph
            return numbers_tensor.to(buffer.device)
        if self._graphs:
            buffer[count:] = NONE
        buffer[:count].copy_(numbers_tensor, non_blocking=True)
        return buffer[:count]


Members = Sequence[Mapping[AdapterPlace, Matrices]]
"""The matrices of each adapter for a layer, by place; empty if the adapter skips the layer."""


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """Kernels and operands of a low-rank sum, for platforms that fuse layers.

    Attributes:
        shrink: the kernel of ``lora_shrink``.
        first: prepared matrices for ``shrink``, ``[A, P R, I]``.
        expansions: for each part the kernel of ``lora_expand``, prepared matrices, and the first
            column of the output.
    """

    shrink: Callable[..., Tensor]
    first: Any
    expansions: Sequence[tuple[Callable[..., None], Any, int]]


class LowRank:
    """Forward hook that adds the low-rank sums of adapters to the outputs of a layer.

    The first matrices of all parts are stacked, so that one matmul is enough. Matrices of a
    smaller rank are padded with zeros.

    Attributes:
        members: the matrices of each adapter, as views of the stacked matrices.
        choices: kernel choices.
        low_rank: the sum, for platforms that fuse it into a kernel of several layers; None if the
            layer transforms its inputs first.
    """

    low_rank: LowRankSum | None = None

    def __init__(self, site: Site, members: Members, step: StepAdapters, device: str) -> None:
        self.prefix, self._step = site.prefix, step
        places = {place: None for member in members for place in member}
        # The order of the stacked matrices.
        self.places = sorted(places, key=lambda place: place.part)
        self._rank = max(m.rank for member in members for m in member.values())
        self._dtype, self._device = site.dtype, device
        first, second = self._stack(members)
        self.choices: list[Choice] = []
        self.members = [
            {
                place: Matrices(
                    self._rows(first[number], index)[..., : matrices.rank, :],
                    second[index][number][..., : matrices.rank],
                )
                for index, place in enumerate(self.places)
                if (matrices := member.get(place)) is not None
            }
            for number, member in enumerate(members)
        ]
        # For the kernels, each pair of adapter and expert is one adapter.
        self._bind(site, first.flatten(0, -3), [part.flatten(0, -3) for part in second])

    def _stack(self, members: Members) -> tuple[Tensor, list[Tensor]]:
        """Stack adapters' first matrices to ``[A, P R, I]``, second ones to ``[A, O, R]`` per part.

        With experts the shapes are ``[A, E, P R, I]`` and ``[A, E, O, R]``.
        """
        rank, places = self._rank, self.places
        kind: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        experts = places[0].experts
        lead = (len(members),) if experts is None else (len(members), experts)
        first = torch.zeros(*lead, len(places) * rank, places[0].inputs, **kind)
        second = [torch.zeros(*lead, place.outputs, rank, **kind) for place in places]
        for number, member in enumerate(members):
            for index, place in enumerate(places):
                if (matrices := member.get(place)) is not None:
                    self._rows(first[number], index)[..., : matrices.rank, :] = matrices.a
                    second[index][number, ..., : matrices.rank] = matrices.b
        return first, second

    def _rows(self, first: Tensor, index: int) -> Tensor:
        return first[..., index * self._rank : (index + 1) * self._rank, :]

    def _bind(self, site: Site, first: Tensor, second: list[Tensor]) -> None:
        sizes = {"rank": first.shape[1], "num_adapters": len(first)}
        shrinks = site.bind_kernel(lora_shrink, in_features=first.shape[2], **sizes)
        self.choices.append(shrinks.choice)
        self._shrinks = shrinks.function
        self._first: Any = shrinks.prepared(lora_a=first)["lora_a"]
        self._bind_expansions(site, second)
        if not self._takes_quantized_inputs(self.places[0].layer):
            self.low_rank = LowRankSum(self._shrinks, self._first, self._expansions)

    @staticmethod
    def _takes_quantized_inputs(layer: nn.Module) -> bool:
        method = getattr(layer, "method", None)
        return isinstance(method, LinearMethod) and method.takes_codes

    def adapter_ids(self, num_rows: int) -> Tensor:
        """Return the adapter number of each row that the layer computes, int64 ``[num_rows]``."""
        return self._step.of_rows(num_rows, self.prefix)

    def _bind_expansions(self, site: Site, second: list[Tensor]) -> None:
        self._expansions = []
        for place, matrices in zip(self.places, second, strict=True):
            count, outputs, rank = matrices.shape
            sizes = {"out_features": outputs, "rank": rank, "num_adapters": count}
            expands = site.bind_kernel(lora_expand, **sizes)
            self.choices.append(expands.choice)
            prepared = expands.prepared(lora_b=matrices)["lora_b"]
            self._expansions.append((expands.function, prepared, place.offset))

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """Add the low-rank sums of adapters to the layer's output ``y`` in place."""
        rows = y.view(-1, y.shape[-1])  # a view, so that ``y`` changes in place
        ids = self.adapter_ids(len(rows))
        self._add(self._shrunk(layer, inputs[0], ids, y.dtype), ids, rows)

    def attach(self, layer: nn.Module) -> RemovableHandle:
        """Add adapters to the layer, until the handle is removed."""
        # Prepended, so that hooks of other libraries see outputs with adapters. A layer that is
        # sharded by inputs takes its adapter before the all-reduce, in its ``summand``.
        target: nn.Module = getattr(layer, "summand", layer)
        return target.register_forward_hook(self, prepend=True)

    def add(self, x: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Add the low-rank sums of ``x`` to ``rows`` ``[T, O]`` in place.

        Args:
            ids: adapter of each row, ``[T]``.
        """
        self._add(self._shrinks(x, self._first, ids, 1.0), ids, rows)

    def _add(self, shrunk: Tensor, ids: Tensor, rows: Tensor) -> None:
        rank = self._rank
        for index, (expand, matrices, offset) in enumerate(self._expansions):
            part = shrunk[:, index * rank : (index + 1) * rank]
            expand(part, matrices, ids, rows, offset)

    def _shrunk(self, layer: nn.Module, x: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matmul of ``x`` with the first matrices, ``[T, P R]``, float32 or wider."""
        if self._takes_quantized_inputs(layer):
            # Scale inputs as the base layer does.
            x = x.to(dtype) * layer.operands[0]  # type: ignore[index]
        return self._shrinks(x.reshape(-1, x.shape[-1]), self._first, ids, 1.0)


class LowRankTable(LowRank):
    """The LoRA adapters of an embedding, whose first matrices are looked up by token id."""

    def _bind(self, site: Site, first: Tensor, second: list[Tensor]) -> None:
        self._first = first
        self._bind_expansions(site, second)

    def _shrunk(self, layer: nn.Module, x: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        # Rows without an adapter look up any entry; the expansion skips these rows.
        rows: Tensor = self._first[ids.clamp(min=0), :, x.flatten()]
        return rows.to(torch.promote_types(dtype, torch.float32))
