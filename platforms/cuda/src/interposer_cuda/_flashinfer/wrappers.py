"""The wrappers of FlashInfer that a backend plans with, once per step for all layers.

A wrapper holds the plan that it made last, so that an older one is refused. A graph has a wrapper
of its own, whose buffers stay where they are.

Dimensions: T tokens.
Source: ``use_cuda_graph`` and the buffers beside it in flashinfer/decode.py and flashinfer/mla.py
of flashinfer-ai/flashinfer: one batch size for each wrapper, as many indices as its buffer holds,
and a plan before each replay, whose starts and lengths it wants on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from interposer import AttentionBatch, Site
from interposer.errors import RequestError
from interposer_cuda._flashinfer.pages import FlashInferPages

# What its documentation recommends for the partial results of split sequences.
_WORKSPACE_BYTES = 128 * 2**20


class FlashInferPlan(NamedTuple):
    """A step that a wrapper has planned.

    Attributes:
        slots: ``[T]`` int64.
        wrapper: None where there is nothing to attend to.
        number: of the plan among those of the backend; None where the wrapper is the plan's own.
    """

    slots: torch.Tensor
    wrapper: Any
    number: int | None


# Of each model, since its layers run one after the other. Two models may run at the same time.
_workspaces: WeakKeyDictionary[Any, dict[torch.device, torch.Tensor]] = WeakKeyDictionary()


class FlashInferWrappers:
    """The wrappers of one backend; those of a model share a workspace."""

    def __init__(self, site: Site) -> None:
        self._kept: dict[str, Any] = {}
        self._model = site.resolver
        self._number = 0

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the wrapper of that name for steps that are not captured, made once."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def workspace(self, device: torch.device) -> torch.Tensor:
        """Return the memory that each of them is made with."""
        held = _workspaces.setdefault(self._model, {})
        if device not in held:
            # Some of its kernels count in it, from 0 on.
            held[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return held[device]

    def planned(self, slots: torch.Tensor, wrapper: Any) -> FlashInferPlan:
        """Return the newest plan, after which older ones are refused."""
        self._number += 1
        return FlashInferPlan(slots, wrapper, self._number)

    def check(self, plan: FlashInferPlan) -> None:
        """Return where the plan's wrapper still holds it.

        Raises: RequestError: the plan is not the last one.
        """
        if plan.number not in (None, self._number):
            raise RequestError(
                f"the plan is number {plan.number} of this backend, whose wrapper holds number "
                f"{self._number}. Try: plan a step after the layers of the one before have run"
            )


def pages_of(batch: AttentionBatch, page_size: int) -> FlashInferPages:
    """Return the pages of a step, by the lengths on the host, with indices on the device."""
    host = batch.on_host()
    pages = FlashInferPages.of(host.page_table, host.seq_lens, page_size)
    return pages.indexed_on(batch.slots.device)


def buffers(batch: AttentionBatch, **sizes: int) -> dict[str, torch.Tensor]:
    """Return zeros in int32 that the wrapper of a graph keeps its numbers in."""
    device = batch.slots.device
    return {name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in sizes.items()}
