"""vLLM's blocks of keys and values, seen as the cache that a backend here expects.

Dimensions: K kv heads, D head size, P pages (vLLM's blocks), S page size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interposer import AttentionBackend, AttentionBatch, AttentionSpec
from interposer.errors import ConfigError

__all__ = ["View", "view_for"]

View = Callable[[Tensor], Tensor]


def view_for(backend: AttentionBackend) -> View:
    """Return the function that views ``[P, K, S, 2 D]`` as the backend's cache, without a copy.

    vLLM holds the pages outermost, a layout may want the heads there. Whether a backend follows
    strides or relies on the order that it declared is not said by a layout: it is tried, on a
    few tokens, beside a cache as declared.

    Raises: ConfigError: the backend's pages hold other axes, or it computes something else.
    """
    spec, layout = backend.spec, backend.kv_layout()
    heads, size, width = spec.num_kv_heads, spec.page_size, spec.head_size
    named = {"K": heads, "2": 2, "S": size, "D": width}
    # Of memory: P K 2 S D.
    places = {"P": 0, "K": 1, "2": 2, "S": 3, "D": 4}
    for order in ("K2SD", "2KSD", "2SKD", "SKD2"):
        if layout.page_shape == tuple(named[axis] for axis in order):
            axes = [places[axis] for axis in order]
            axes.insert(layout.page_axis, places["P"])
            break
    else:
        raise ConfigError(f"{type(backend).__name__} has pages of {layout.page_shape}")

    def view(blocks: Tensor) -> Tensor:
        if blocks.dtype != layout.dtype:
            blocks = blocks.view(layout.dtype)
        return blocks.view(len(blocks), heads, 2, size, width).permute(axes)

    _try(backend, view)
    return view


@torch.inference_mode()
def _try(backend: AttentionBackend, view: View) -> None:
    """Raise ConfigError unless a view of blocks gives what a cache of the layout gives."""
    spec, layout = backend.spec, backend.kv_layout()
    size, pages = spec.page_size, 4
    blocks = torch.zeros(pages, spec.num_kv_heads, size, 2 * spec.head_size, dtype=layout.dtype)
    (declared,) = layout.allocate(1, pages, "cpu")
    page_table = torch.tensor([[3, 1]])
    stored = 0
    for count in (size + 2, 1):
        seen = torch.arange(stored, stored + count)
        stored += count
        batch = AttentionBatch(
            query_starts=torch.tensor([0, count]),
            seq_lens=torch.tensor([stored]),
            page_table=page_table,
            slots=page_table[0][seen // size] * size + seen % size,
            max_query_tokens=count,
            max_seq_tokens=stored,
        )
        step = _inputs(spec, count)
        outputs = [_attend(backend, step, cache, batch) for cache in (declared, view(blocks))]
        if not torch.equal(*outputs):
            raise ConfigError(
                f"{type(backend).__name__} relies on the order of its cache in memory, and vLLM "
                "has the pages outermost"
            )


def _inputs(spec: AttentionSpec, count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)

    def drawn(heads: int) -> Tensor:
        return torch.randn(count, heads, spec.head_size, generator=generator).to(spec.dtype)

    return drawn(spec.num_heads), drawn(spec.num_kv_heads), drawn(spec.num_kv_heads)


def _attend(
    backend: AttentionBackend,
    step: tuple[Tensor, Tensor, Tensor],
    cache: Tensor,
    batch: AttentionBatch,
) -> Tensor:
    spec, plan = backend.spec, backend.plan(batch)
    one = torch.ones(spec.num_kv_heads if spec.head_scales else 1)
    sinks = torch.zeros(spec.num_heads, dtype=spec.dtype)
    match spec.is_quantized, spec.sinks:
        case False, False:
            return backend.forward(*step, cache, plan)
        case False, True:
            return backend.forward_with_sinks(*step, cache, plan, sinks)
        case True, False:
            scales = backend.prepare_scales(one, one)
            return backend.forward_quantized(*step, cache, plan, scales)
    scales = backend.prepare_scales(one, one)
    return backend.forward_quantized_with_sinks(*step, cache, plan, scales, sinks)
