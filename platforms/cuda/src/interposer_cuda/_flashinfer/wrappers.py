"""FlashInfer wrappers of one attention backend: each step is planned once for all layers.

A FlashInfer wrapper holds only its last plan, so older plans are refused. Each captured graph has
a separate wrapper whose buffers stay at fixed addresses.

Dimensions: T tokens.
Source: ``use_cuda_graph`` and its buffer arguments in flashinfer/decode.py and flashinfer/mla.py
of flashinfer-ai/flashinfer: one batch size per wrapper, at most as many indices as its buffer
holds, and a plan before each replay with starts and lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from interposer import AttentionBatch, Site
from interposer.errors import RequestError
from interposer_cuda._flashinfer.pages import FlashInferPages

# Size that FlashInfer's documentation recommends for partial results of split sequences.
_WORKSPACE_BYTES = 128 * 2**20


class FlashInferPlan(NamedTuple):
    """A step that a FlashInfer wrapper has planned.

    Attributes:
        slots: ``[T]`` int64.
        wrapper: the FlashInfer wrapper; None if the step has no tokens.
        number: counts the backend's plans; None if the wrapper serves this plan alone.
    """

    slots: torch.Tensor
    wrapper: Any
    number: int | None


# One workspace per model and device: layers of a model run one after the other and can share it,
# while two models may run at the same time.
_workspaces: WeakKeyDictionary[Any, dict[torch.device, torch.Tensor]] = WeakKeyDictionary()


class FlashInferWrappers:
    """Cache of one backend's FlashInfer wrappers; all backends of a model share a workspace."""

    def __init__(self, site: Site) -> None:
        self._wrapper_by_name: dict[str, Any] = {}
        self._model = site.resolver
        self._last_number = 0

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the wrapper ``name`` for steps outside a graph, created on first use."""
        if name not in self._wrapper_by_name:
            self._wrapper_by_name[name] = make()
        return self._wrapper_by_name[name]

    def workspace(self, device: torch.device) -> torch.Tensor:
        """Return the model's workspace on ``device``, with which wrappers are created."""
        workspaces = _workspaces.setdefault(self._model, {})
        if device not in workspaces:
            # Some FlashInfer kernels keep counters in the workspace and need zeros at first.
            workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return workspaces[device]

    def new_plan(self, slots: torch.Tensor, wrapper: Any) -> FlashInferPlan:
        """Return the backend's newest plan; ``check`` refuses all older plans from now on."""
        self._last_number += 1
        return FlashInferPlan(slots, wrapper, self._last_number)

    def check(self, plan: FlashInferPlan) -> None:
        """Check that the plan's wrapper still holds the plan.

        Raises: RequestError: a newer plan has replaced ``plan``.
        """
        if plan.number not in (None, self._last_number):
            raise RequestError(
                f"the plan is number {plan.number} of this backend, whose wrapper holds number "
                f"{self._last_number}. Try: plan a step after the layers of the one before have run"
            )


def pages_of(batch: AttentionBatch, page_size: int) -> FlashInferPages:
    """Return the pages of a step: starts and lengths on the host, indices on the device."""
    host = batch.on_host()
    pages = FlashInferPages.of(host.page_table, host.seq_lens, page_size)
    return pages.indexed_on(batch.slots.device)


def graph_buffers(batch: AttentionBatch, **sizes: int) -> dict[str, torch.Tensor]:
    """Return int32 zeros by name, as index buffers for the wrapper of a captured graph."""
    device = batch.slots.device
    return {name: torch.zeros(n, dtype=torch.int32, device=device) for name, n in sizes.items()}
