"""The adapter of each token of the step that runs, which layers with adapters read.

Dimensions: T tokens of the step, R tokens whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from interposer.errors import ConfigError
from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.sequence import Sequence

NONE = -1
"""The number of no adapter."""


class Attachable(Protocol):
    """Computes a layer with adapters."""

    def attach(self, layer: nn.Module) -> Handle:
        """Compute with adapters from now on, until the handle is removed."""
        ...


class Handle(Protocol):
    """A change of a layer by ``Attachable``."""

    def remove(self) -> None:
        """Undo it."""
        ...


class StepHooks:
    """Hooks and forwards of layers with adapters, there in steps that have a use for them."""

    def __init__(self, hooks: Mapping[Any, Attachable]) -> None:
        self._hooks = dict(hooks)
        self._handles: list[Handle] = []

    def switch(self, on: bool) -> None:
        """Attach or remove them all."""
        if on and not self._handles:
            self._handles = [hook.attach(layer) for layer, hook in self._hooks.items()]
        elif not on and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []


class StepAdapters:
    """Numbers of adapters by token, at one address for all steps, so that graphs can read them.

    Attributes:
        names: of the adapters that requests can ask for.
        hooks: of the layers, once they are made.
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
        """Take memory.

        Args:
            versions: that are loaded; the number of one in a step is its place among them.
            current: the version that new requests get by a name.
            num_tokens: of the largest step, and of the largest graph.
            graphs: steps may be captured. What a graph does not compute when it is captured, it
                never does.
            leave: told the version of a request that has ended, if new ones get another one.
        """
        self.names = tuple(current)
        self._numbers = {version: number for number, version in enumerate(versions)}
        self._current, self._leave = dict(current), leave
        self._graphs = graphs
        self._held = torch.full((num_tokens,), NONE, device=device)
        self._tokens = self._rows = self._held

    def version(self, name: str | None) -> int | None:
        """Return the version that a new request gets by a name."""
        return None if name is None else self._current[name]

    def leave(self, sequence: Sequence) -> None:
        """Note that a request has ended."""
        version = sequence.adapter
        if version is not None and version not in self._current.values():
            self._leave(version)

    def assign(self, chunks: Iterable[Chunk]) -> None:
        """Set the adapters of the tokens of the next step."""
        chosen = [
            (NONE if (one := chunk.sequence.adapter) is None else self._numbers[one], chunk)
            for chunk in chunks
        ]
        engaged = self._graphs or any(number != NONE for number, _ in chosen)
        self.hooks.switch(engaged)
        if not engaged:
            return
        by_token = chain.from_iterable(repeat(number, chunk.num_rows) for number, chunk in chosen)
        self._tokens = self._placed([*by_token])
        wanted = chain.from_iterable(repeat(number, chunk.num_logits) for number, chunk in chosen)
        self._rows = torch.tensor([*wanted], dtype=torch.int64, device=self._held.device)

    def of_rows(self, count: int, prefix: str) -> Tensor:
        """Return the adapters of the rows that a layer computes, ``[count]`` int64.

        These are all tokens, with the padding of a graph behind them, or those whose logits are
        wanted.

        Raises: ConfigError: it computes other rows.
        """
        if count == len(self._tokens):
            return self._tokens
        if count == len(self._rows):
            return self._rows
        if self._graphs and len(self._tokens) < count <= len(self._held):
            return self._held[:count]
        raise ConfigError(
            f"{prefix} computes {count} rows in a step of {len(self._tokens)} tokens, so that the "
            "adapters of these are not known. Try: an adapter without this module"
        )

    def _placed(self, numbers: list[int]) -> Tensor:
        count, held = len(numbers), self._held
        given = torch.tensor(numbers, dtype=torch.int64)
        if count > len(held):  # as of a call for all logits of a long text, which is no graph
            return given.to(held.device)
        if self._graphs:
            held[count:] = NONE
        held[:count].copy_(given, non_blocking=True)
        return held[:count]
