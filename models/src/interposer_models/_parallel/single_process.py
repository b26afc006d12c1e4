"""A model that one process computes, with the interface of a group of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from interposer import Config, Placement, Ranks
from interposer_models._engine.engine import Engine
from interposer_models._language_model import LanguageModel


class SingleProcess:
    """Implements the methods of ``Group`` that ``load`` calls, for a process without peers."""

    ranks: Ranks | None = None
    alike = True

    def placement(self, config: Config) -> Placement | None:
        """Return None: the plan selects the device."""
        return None

    def together(self, activity: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def agree(self, facts: Mapping[str, object]) -> None:
        """Accept any facts."""

    def smallest(self, number: int) -> int:
        """Return the number."""
        return number

    def inner(self) -> Any:
        """Return None, the ``tensor_parallel`` option of a draft model."""
        return None

    def engine(self, *parts: Any, **facts: Any) -> Engine:
        """Create the engine."""
        return Engine(*parts, **facts)

    def model(self, engine: Engine, *parts: Any) -> LanguageModel:
        """Create the model of an engine."""
        return LanguageModel(engine, *parts)
