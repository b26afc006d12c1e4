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
from interposer_models._transfer.receiver import WeightsFrom


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
        """Return ``interposer.explain(model).to_dict()`` of each rank, in order.

        Raises: RankError: a rank was lost.
        """
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

        Raises: ConfigError: they are to come from a trainer.
        """
        if isinstance(tensors, WeightsFrom):
            raise ConfigError(
                "A trainer sends to models of one process, and this one has several. "
                "Try: update_weights(tensors) with whole tensors"
            )
        items = [*(tensors.items() if isinstance(tensors, Mapping) else tensors)]
        update = super().update_weights
        found = self.engine.lead.everywhere("update_weights", (items,), lambda: update(items))
        return cast("tuple[str, ...]", found[0])
