"""Views of vLLM's KV cache blocks as the cache layout of a selected backend.

Shapes: K kv heads, D head size, P pages (vLLM's blocks), S page size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionBatch, AttentionSpec
from interposer.errors import ConfigError

__all__ = ["View", "view_for"]

View = Callable[[Tensor], Tensor]


def view_for(backend: AttentionBackend) -> View:
    """Return a function that views blocks ``[P, K, S, 2 D]`` as the backend's cache.

    In vLLM's memory the pages are outermost; in a backend's layout, the heads may be outermost. A
    layout does not state whether the backend supports arbitrary strides. So the backend attends to
    a few tokens twice, in a view and in a cache of its own layout, and the results must be equal.

    Raises: ConfigError: the backend's pages have other axes, or the results differ.
    """
    spec, layout = backend.spec, backend.kv_layout()
    heads, size, width = spec.num_kv_heads, spec.page_size, spec.head_size
    sizes_by_axis = {"K": heads, "2": 2, "S": size, "D": width}
    # vLLM's order of axes in memory: P K 2 S D.
    vllm_axes = {"P": 0, "K": 1, "2": 2, "S": 3, "D": 4}
    for order in ("K2SD", "2KSD", "2SKD", "SKD2"):
        if layout.page_shape == tuple(sizes_by_axis[axis] for axis in order):
            axes = [vllm_axes[axis] for axis in order]
            axes.insert(layout.page_axis, vllm_axes["P"])
            break
    else:
        raise ConfigError(f"{type(backend).__name__} has pages of {layout.page_shape}")

    def view(blocks: Tensor) -> Tensor:
        if blocks.dtype != layout.dtype:
            blocks = blocks.view(layout.dtype)
        return blocks.view(len(blocks), heads, 2, size, width).permute(axes)

    _check_strides(backend, view)
    return view


@torch.inference_mode()
def _check_strides(backend: AttentionBackend, view: View) -> None:
    """Raise ConfigError unless attention over a view equals attention over the declared layout."""
    spec, layout = backend.spec, backend.kv_layout()
    size, pages = spec.page_size, 4
    blocks = torch.zeros(pages, spec.num_kv_heads, size, 2 * spec.head_size, dtype=layout.dtype)
    (declared_cache,) = layout.allocate(1, pages, "cpu")
    # Pages that are not adjacent, so that a backend which ignores strides reads wrong memory.
    page_table = torch.tensor([[3, 1]])
    seq_len = 0
    # A prompt that fills more than one page, then a decode step.
    for num_tokens in (size + 2, 1):
        positions = torch.arange(seq_len, seq_len + num_tokens)
        seq_len += num_tokens
        batch = AttentionBatch(
            query_starts=torch.tensor([0, num_tokens]),
            seq_lens=torch.tensor([seq_len]),
            page_table=page_table,
            slots=page_table[0][positions // size] * size + positions % size,
            max_query_tokens=num_tokens,
            max_seq_tokens=seq_len,
        )
        step = _inputs(spec, num_tokens)
        outputs = [_attend(backend, step, cache, batch) for cache in (declared_cache, view(blocks))]
        if not torch.equal(*outputs):
            raise ConfigError(
                f"{type(backend).__name__} relies on the order of its cache in memory, and vLLM "
                "has the pages outermost"
            )


def _inputs(spec: AttentionSpec, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)

    def random(heads: int) -> Tensor:
        return torch.randn(count, heads, spec.head_size, generator=generator).to(spec.dtype)

    return random(spec.num_heads), random(spec.num_kv_heads), random(spec.num_kv_heads)


def _attend(
    backend: AttentionBackend,
    step: tuple[Tensor, Tensor, Tensor],
    cache: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    spec, options = backend.spec, dict[str, Any]()
    if spec.is_quantized:
        unit_scales = torch.ones(spec.num_kv_heads if spec.head_scales else 1)
        options["scales"] = backend.prepare_scales(unit_scales, unit_scales)
    if spec.sinks:
        options["sinks"] = torch.zeros(spec.num_heads, dtype=spec.dtype)
    return backend.forward(*step, cache, backend.plan(batch), **options)
