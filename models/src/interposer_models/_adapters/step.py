"""The LoRA adapter of each token of the current step, for layers with adapters.

Dimensions: T tokens of the step, R tokens with logits.
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
"""Number of a token without an adapter."""


class Attachable(Protocol):
    """Adds adapters to a layer."""

    def attach(self, layer: nn.Module) -> Handle:
        """Add adapters to the layer, until the handle is removed."""
        ...


class Handle(Protocol):
    """A change that ``Attachable`` made to a layer."""

    def remove(self) -> None:
        """Undo the change."""
        ...


class StepHooks:
    """Hooks and forward functions of layers with adapters, attached in steps that use adapters."""

    def __init__(self, hooks: Mapping[Any, Attachable]) -> None:
        self._hooks = dict(hooks)
        self._handles: list[Handle] = []

    def switch(self, on: bool) -> None:
        """Attach or remove all hooks."""
        if on and not self._handles:
            self._handles = [hook.attach(layer) for layer, hook in self._hooks.items()]
        elif not on and self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []


class StepAdapters:
    """The adapter number of each token, at one address for all steps, so that graphs can read it.

    Attributes:
        names: adapters that requests can name.
        hooks: hooks of the layers, after their creation.
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
        """Allocate memory for the largest step.

        Args:
            versions: loaded versions; the number of a version in a step is its position.
            current: the version that new requests get, by name.
            num_tokens: tokens of the largest step, or of the largest graph if that is larger.
            graphs: steps may be captured. Hooks stay attached then, as a graph only computes what
                was not captured.
            leave: called with the version of a request that ended, if new requests get another one.
        """
        self.names = tuple(current)
        self._numbers = {version: number for number, version in enumerate(versions)}
        self._current, self._leave = dict(current), leave
        self._graphs = graphs
        self._buffer = torch.full((num_tokens,), NONE, device=device)
        self._tokens = self._rows = self._buffer

    def version(self, name: str | None) -> int | None:
        """Return the version that a new request gets by a name."""
        return None if name is None else self._current[name]

    def leave(self, sequence: Sequence) -> None:
        """Release the adapter of a request that has ended."""
        version = sequence.adapter
        if version is not None and version not in self._current.values():
            self._leave(version)

    def assign(self, chunks: Iterable[Chunk]) -> None:
        """Set the adapters of the tokens of the next step."""
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
            f"{prefix} computes {count} rows in a step of {len(self._tokens)} tokens, so that the "
            "adapters of these are not known. Try: an adapter without this module"
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
