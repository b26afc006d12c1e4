"""A model that one process computes, as those that load it see its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from interposer import Config, Placement, Ranks
from interposer_models._engine.engine import Engine
from interposer_models._language_model import LanguageModel


class Alone:
    """Has the members of ``Group`` that ``load`` calls, where there is nobody to agree with."""

    ranks: Ranks | None = None
    alike = True

    def placement(self, config: Config) -> Placement | None:
        """Leave the place to the plan."""
        return None

    def together(self, activity: str) -> AbstractContextManager[None]:
        """Return a block about which nobody is told."""
        return nullcontext()

    def agree(self, facts: Mapping[str, object]) -> None:
        """Take any facts."""

    def smallest(self, number: int) -> int:
        """Return the number of this process."""
        return number

    def inner(self) -> Any:
        """Return what a draft model is loaded with."""
        return None

    def engine(self, *parts: Any, **facts: Any) -> Engine:
        """Return the engine of these parts."""
        return Engine(*parts, **facts)

    def model(self, engine: Engine, *parts: Any) -> LanguageModel:
        """Return the model of an engine and other parts."""
        return LanguageModel(engine, *parts)
