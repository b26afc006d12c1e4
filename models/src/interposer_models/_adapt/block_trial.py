"""A numerical trial of a decoder block against the replaced layer.

Dimensions: B sequences, T tokens, H hidden size, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from interposer import Verdict
from interposer_models._adapt.agreement import random_normals
from interposer_models._adapt.attention_interceptor import (
    AttentionCall,
    MakeMask,
    PagedCache,
    intercepted_by,
)
from interposer_models._adapt.block import BlockForward
from interposer_models._adapt.block_trace import BlockParts
from interposer_models._adapt.forwards import class_forward
from interposer_models._adapt.noise import ROUNDINGS, distance, perturb_once
from interposer_models._adapt.paged_rows import uniform_batch

# Tokens of each step: prefill, decode, chunk.
_STEPS = (5, 1, 2)


def check_block(
    module: nn.Module, parts: BlockParts, forward: BlockForward, hidden_size: int
) -> Verdict:
    """Refuse a block with results further from the layer's than rounding explains.

    Both run over a cache. The effect of one rounding of the input is measured. Each run has
    ``ROUNDINGS`` independent roundings; the bound is twice the root of the sum of squares.
    """
    num_tokens, dtype = sum(_STEPS), forward.backend.spec.dtype
    x = random_normals((1, num_tokens, hidden_size), dtype, torch.device("cpu"))
    angles = random_normals((1, num_tokens, parts.head_size // 2), torch.float64, x.device) * 3
    trial = _Trial(module, parts, forward, (angles.cos().to(dtype), angles.sin().to(dtype)))
    with torch.no_grad():
        # The input is scaled to the size of the layer's update, so that neither hides the other.
        update_size = (trial.run_class(x).double() - x.double()).square().mean().sqrt()
        x = (x * float(update_size.clamp(1e-3, 1e3))).to(dtype)
        expected, perturbed = trial.run_class(x), trial.run_class(perturb_once(x))
        actual = trial.run_block(x)
    if isinstance(actual, str):
        return Verdict.refuse(f"a trial of it ran on its class: {actual}")
    one_rounding = max(distance(perturbed, expected), torch.finfo(dtype).eps / 2)
    excess = distance(actual, expected) / (2 * math.sqrt(2 * ROUNDINGS) * one_rounding)
    if excess <= 1:
        return Verdict.accept()
    return Verdict.refuse(f"its results are {excess:.1f} times as far away as rounding explains")


class _Trial:
    """Runs a layer on the tokens of one sequence in steps.

    Args:
        tables: cosines and sines, ``[1, T, D / 2]``.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: BlockParts,
        forward: BlockForward,
        tables: tuple[Tensor, Tensor],
    ) -> None:
        self._class_forward, self._parts, self._forward = class_forward(module), parts, forward
        self._tables = [torch.cat((table, table), -1) for table in tables]

    def _arguments(self, first: int, end: int) -> dict[str, Any]:
        angles = tuple(table[:, first:end] for table in self._tables)
        return {"position_embeddings": angles, "use_cache": True}

    def run_class(self, x: Tensor) -> Tensor:
        """Run the class's forward, ``[1, T, H]``."""
        cache, outputs = _SingleLayerCache(), []
        for first, end in pairwise(accumulate(_STEPS, initial=0)):
            distance = torch.arange(first, end)[:, None] - torch.arange(end)
            window = self._parts.window_tokens or end
            outputs.append(
                self._class_forward(
                    x[:, first:end],
                    attention_mask=((distance >= 0) & (distance < window))[None, None],
                    past_key_values=cache,
                    **self._arguments(first, end),
                )
            )
        return torch.cat(outputs, dim=1)

    def run_block(self, x: Tensor) -> Tensor | str:
        """Run the block over pages, ``[1, T, H]``, or return why the block refuses."""
        backend = self._forward.backend
        size = backend.spec.page_size
        (cache,) = backend.kv_layout().allocate(1, -(-x.shape[1] // size), "cpu")
        outputs = []
        for first, end in pairwise(accumulate(_STEPS, initial=0)):
            plan = backend.plan(uniform_batch(1, end - first, first, size))
            with intercepted_by(_PagedInterceptor((backend, cache, plan))):
                out = self._forward.compute((x[:, first:end],), self._arguments(first, end))
            if isinstance(out, str):
                return out
            outputs.append(out)
        return torch.cat(outputs, dim=1)


class _SingleLayerCache:
    """A cache with one layer, for any layer index."""

    def __init__(self) -> None:
        self._layer = DynamicLayer()

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._layer.update(key, value)


class _PagedInterceptor:
    """An interceptor that gives a block one paged cache."""

    def __init__(self, paged: PagedCache) -> None:
        self._paged = paged

    def paged_cache(self, module: nn.Module) -> PagedCache:
        return self._paged

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        return make(**settings)

    def attend(self, call: AttentionCall) -> Tensor:
        # A block computes its own attention, so that this call means a wrong trace.
        raise RuntimeError("a block asked for its attention")
