"""Adapters in fused calls: hooks that state a sum, against the parts that call them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from platforms.cpu.tests.test_native_decoder_block import Form, Steps, both, built, counted

from interposer_cpu import native
from interposer_cpu._kernels import lora

# Without a compiler the plugin works too, but has none of what is tested here.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

ADAPTERS = 3
PARTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Sum:
    shrink: Callable[..., Any]
    first: torch.Tensor
    expansions: list[tuple[Callable[..., Any], torch.Tensor, int]]


class Adds:
    """A hook as the models' are, for the parts of a projection."""

    def __init__(
        self, layer: Any, ids: dict[int, torch.Tensor], rank: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(layer.prefix))

        def drawn(*shape: int) -> torch.Tensor:
            return (0.1 * torch.randn(shape, generator=generator)).to(dtype)

        expansions, offset = [], 0
        for outputs in layer.parts.values():
            second = lora.prepare_expand(drawn(ADAPTERS, outputs, rank))["lora_b"]
            expansions.append((lora.lora_expand, second, offset))
            offset += outputs
        first = drawn(ADAPTERS, len(expansions) * rank, layer.in_features)
        first = lora.prepare_shrink(first)["lora_a"]
        self.low_rank: Sum | None = Sum(lora.lora_shrink, first, expansions)
        self.ids, self.rank, self.calls = ids, rank, 0

    def adapter_ids(self, num_rows: int) -> torch.Tensor:
        return self.ids[num_rows]

    def __call__(self, layer: Any, inputs: Any, y: torch.Tensor) -> None:
        assert self.low_rank is not None
        self.calls += 1
        ids = self.adapter_ids(len(y))
        shrunk = self.low_rank.shrink(inputs[0], self.low_rank.first, ids, 1.0)
        for index, (expand, second, offset) in enumerate(self.low_rank.expansions):
            expand(shrunk[:, index * self.rank : (index + 1) * self.rank], second, ids, y, offset)


def attached(
    block: Any,
    parts: tuple[str, ...],
    rows: torch.Tensor | None,
    count: int,
    dtype: torch.dtype = torch.float32,
) -> Any:
    ids = {count: torch.tensor([(0, -1, 2, 1, 2)[t % 5] for t in range(count)])}
    if rows is not None:
        ids[len(rows)] = ids[count][rows].contiguous()
    hooks = [Adds(block.get_submodule(part), ids, 3 + len(part) % 2, dtype) for part in parts]
    for part, hook in zip(parts, hooks, strict=True):
        block.get_submodule(part).register_forward_hook(hook)
    return hooks


def close(found: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    """Compare numbers: between gates and up, the fused call rounds nothing to ``dtype``."""
    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=limit * float(theirs.abs().max()))


@pytest.mark.parametrize("rows", [None, [1, 4, 6]])
@pytest.mark.parametrize("parts", [PARTS, PARTS[:1], PARTS[1:3], PARTS[3:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_hooks_are_computed_in_the_call(
    dtype: torch.dtype, parts: tuple[str, ...], rows: list[int] | None
) -> None:
    form = Form(dtype)
    fused, apart = both(form)
    steps = Steps(form, ((17, 1), (0, 4), (3, 2)))
    chosen = None if rows is None else torch.tensor(rows)
    plain = steps.run(fused, chosen)
    mine = attached(fused, parts, chosen, 7, dtype)
    theirs = attached(apart, parts, chosen, 7, dtype)
    found = steps.run(fused, chosen)
    # A hook of another kind makes the layer call its parts.
    apart.self_attn.rotary.register_forward_hook(lambda *_: None)
    apart.mlp.activation.register_forward_hook(lambda *_: None)
    expected = steps.run(apart, chosen)
    assert [hook.calls for hook in mine] == [0] * len(parts)
    assert [hook.calls for hook in theirs] == [1] * len(parts)
    close(found, expected, dtype)
    assert not torch.equal(found[0], plain[0])


def test_a_hook_of_other_kernels_is_called() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    (hook,) = attached(block, PARTS[:1], None, 1)
    known = steps.run(block)
    shrink = hook.low_rank.shrink
    (other,) = attached(built(form), PARTS[:1], None, 1)
    other.low_rank = Sum(
        lambda *given: shrink(*given), other.low_rank.first, hook.low_rank.expansions
    )
    block.self_attn.qkv_proj._forward_hooks.clear()
    block.self_attn.qkv_proj.register_forward_hook(other)
    calls = counted(block.self_attn.attn)
    close(steps.run(block), known)
    assert (hook.calls, other.calls, calls) == (0, 1, [1])


def test_a_block_holds_no_hook_that_is_gone() -> None:
    form = Form(torch.float32)
    block, steps = built(form), Steps(form, ((17, 1),))
    plain = steps.run(block)
    (hook,) = attached(block, PARTS[3:], None, 1)
    steps.run(block)
    kept = weakref.ref(hook)
    block.mlp.down_proj._forward_hooks.clear()
    del hook
    gc.collect()
    assert kept() is None
    assert all(map(torch.equal, steps.run(block), plain))


def test_an_mlp_and_heads_alone_add_as_well() -> None:
    form = Form(torch.float32)
    layer, parts = (built(form).mlp for _ in range(2))
    x = torch.randn(5, 64)
    mine, theirs = (
        attached(each, ("gate_up_proj", "down_proj"), None, 5) for each in (layer, parts)
    )
    parts.activation.register_forward_hook(lambda *_: None)
    with torch.inference_mode():
        close([layer(x)], [parts(x)])
    assert [hook.calls for hook in (*mine, *theirs)] == [0, 0, 1, 1]
