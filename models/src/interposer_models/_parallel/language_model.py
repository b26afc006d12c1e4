"""The model of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch

from interposer import explain
from interposer.errors import ConfigError
from interposer_models._language_model import LanguageModel
from interposer_models._parallel.engine import RankedEngine
from interposer_models._transfer.meeting import Meeting
from interposer_models._transfer.receiver import WeightsFrom, at_rank


class RankedLanguageModel(LanguageModel):
    """A model that several processes compute; each call is made on every one of them.

    Where rank 0 was given the others by a command, it makes their calls. ``close`` gives back
    what the ranks share.
    """

    engine: RankedEngine

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do as ``close``."""
        self.close()

    def close(self) -> None:
        """Give back the communicators; the model computes nothing afterwards."""
        self.engine.lead.close()
        for communicator in self._resolver.communicators.values():
            communicator.close()

    def explanations(self) -> list[dict[str, Any]]:
        """Return ``interposer.explain(model).to_dict()`` of each rank, in order."""
        return self.engine.lead.everywhere("explanation", (), self.explanation)

    def explanation(self) -> dict[str, Any]:
        """Return ``interposer.explain(model).to_dict()`` of this rank."""
        return explain(self).to_dict()

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter on every rank; see ``LanguageModel.load_adapter``."""
        load = super().load_adapter
        self.engine.lead.everywhere(
            "load_adapter",
            (name, path),
            lambda: load(name, path, replace=replace),
            replace=replace,
        )

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter on every rank; see ``LanguageModel.remove_adapter``."""
        remove = super().remove_adapter
        self.engine.lead.everywhere("remove_adapter", (name,), lambda: remove(name))

    def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightsFrom,
    ) -> tuple[str, ...]:
        """Exchange weights on every rank; see ``LanguageModel.update_weights``.

        From a trainer, each rank receives what all others do, and keeps its share. So all of them
        are in the trainer's group.

        Raises: ConfigError: ranks that follow this one cannot be in the group.
        """
        lead, update = self.engine.lead, super().update_weights
        given: Any = tensors
        if not isinstance(tensors, WeightsFrom):
            given = [*(tensors.items() if isinstance(tensors, Mapping) else tensors)]
        elif not (lead.is_one_program or isinstance(tensors.group, Meeting)):
            raise ConfigError(
                "The process groups of this program do not hold the ranks that follow it. "
                "Try: WeightsFrom(Meeting(address, rank, size)), and the same address in "
                "send_weights"
            )

        def take() -> tuple[str, ...]:
            ranks = self._resolver.ranks
            if not isinstance(given, WeightsFrom):
                return update(given)
            return update(at_rank(given, 0 if ranks is None else ranks.rank))

        found = lead.everywhere("update_weights", (given,), take)
        return cast("tuple[str, ...]", found[0])
