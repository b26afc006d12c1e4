"""The trial of a block: it must compute what its layer computes part by part.

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
from interposer_models._adapt.agreement import normals
from interposer_models._adapt.block import BlockForward
from interposer_models._adapt.block_trace import BlockParts
from interposer_models._adapt.forwards import own_forward
from interposer_models._adapt.noise import ROUNDINGS, distance, rounded_once
from interposer_models._adapt.paged_rows import batch_of
from interposer_models._adapt.visit import Asked, MakeMask, Paged, visited_by

# Tokens of each step.
_STEPS = (5, 1, 2)


def judge_block(
    module: nn.Module, parts: BlockParts, forward: BlockForward, hidden_size: int
) -> Verdict:
    """Refuse unless a block computes what its layer does, over a cache, in the root mean square.

    The bound is what roundings explain: one at the input is measured, and each run has a few,
    which are independent. It is twice their root of the sum of squares.
    """
    count, dtype = sum(_STEPS), forward.backend.spec.dtype
    x = normals((1, count, hidden_size), dtype, torch.device("cpu"))
    angles = normals((1, count, parts.head_size // 2), torch.float64, x.device) * 3
    trial = _Trial(module, parts, forward, (angles.cos().to(dtype), angles.sin().to(dtype)))
    with torch.no_grad():
        # The input is as large as what is added to it, so that neither hides the other.
        added = (trial.expected(x).double() - x.double()).square().mean().sqrt()
        x = (x * float(added.clamp(1e-3, 1e3))).to(dtype)
        expected, noisy = trial.expected(x), trial.expected(rounded_once(x))
        found = trial.found(x)
    if isinstance(found, str):
        return Verdict.refuse(f"a trial of it was left to its class: {found}")
    one = max(distance(noisy, expected), torch.finfo(dtype).eps / 2)
    apart = distance(found, expected) / (2 * math.sqrt(2 * ROUNDINGS) * one)
    if apart <= 1:
        return Verdict.accept()
    return Verdict.refuse(f"its results are {apart:.1f} times as far away as rounding explains")


class _Trial:
    """Runs of a layer that gets the tokens of one sequence in steps.

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
        self._own, self._parts, self._forward = own_forward(module), parts, forward
        self._tables = [torch.cat((table, table), -1) for table in tables]

    def _arguments(self, first: int, upto: int) -> dict[str, Any]:
        angles = tuple(table[:, first:upto] for table in self._tables)
        return {"position_embeddings": angles, "use_cache": True}

    def expected(self, x: Tensor) -> Tensor:
        """Return ``[1, T, H]`` of the class."""
        cache, found = _Shared(), []
        for first, upto in pairwise(accumulate(_STEPS, initial=0)):
            away = torch.arange(first, upto)[:, None] - torch.arange(upto)
            window = self._parts.window_tokens or upto
            found.append(
                self._own(
                    x[:, first:upto],
                    attention_mask=((away >= 0) & (away < window))[None, None],
                    past_key_values=cache,
                    **self._arguments(first, upto),
                )
            )
        return torch.cat(found, dim=1)

    def found(self, x: Tensor) -> Tensor | str:
        """Return ``[1, T, H]`` of the block over pages, or why it was left to the class."""
        backend = self._forward.backend
        size = backend.spec.page_size
        (cache,) = backend.kv_layout().allocate(1, -(-x.shape[1] // size), "cpu")
        found = []
        for first, upto in pairwise(accumulate(_STEPS, initial=0)):
            plan = backend.plan(batch_of(1, upto - first, first, size))
            with visited_by(_Over((backend, cache, plan))):
                out = self._forward.computed((x[:, first:upto],), self._arguments(first, upto))
            if isinstance(out, str):
                return out
            found.append(out)
        return torch.cat(found, dim=1)


class _Shared:
    """One layer of a cache for whichever layer writes to it."""

    def __init__(self) -> None:
        self._layer = DynamicLayer()

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        return self._layer.update(key, value)


class _Over:
    """A visitor that lets a layer attend over one cache."""

    def __init__(self, paged: Paged) -> None:
        self._paged = paged

    def pages(self, module: nn.Module) -> Paged:
        """Return it."""
        return self._paged

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return what is made."""
        return make(**settings)

    def attend(self, asked: Asked) -> Tensor:
        """Refuse: a block attends by itself.

        Raises: RuntimeError: always.
        """
        raise RuntimeError("a block asked for its attention")
