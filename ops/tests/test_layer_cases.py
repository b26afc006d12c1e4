"""What is wrong in layers made of others shows on the cases of the standard ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from interposer import LayerEntry, PluggableLayer, current_registry, hookimpl, place, register
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.sampler import Sampler
from interposer_testing import Trial, layer_trials


def trials(provider: str, layer_id: str) -> list[Trial]:
    return list(layer_trials(current_registry(), place().device, provider, 0, layer_id))


class Streamless(DecoderBlock):
    """Adds nothing to the stream."""

    def forward(self, x: Any, residual: Any, *rest: Any) -> Any:
        out, _ = super().forward(x, residual, *rest)
        return out, x.float() if residual is None else residual


class Unturned(DecoderBlock):
    """Turns heads by the angles of the tokens behind."""

    def forward(self, x: Any, residual: Any, cos: Any, sin: Any, *rest: Any) -> Any:
        return super().forward(x, residual, cos.roll(1, -1), sin.roll(1, -1), *rest)


class Shifted(DecoderBlock):
    """Returns other tokens than those asked for, or all in another order."""

    def forward(self, *inputs: Any) -> Any:
        return tuple(part.roll(1, 0) for part in super().forward(*inputs))


class Swapped(DecoderBlock):
    """Exchanges the weights of its norms."""

    def finalize(self) -> None:
        for one, other in (
            (self.input_layernorm, self.post_attention_layernorm),
            (self.self_attn.q_norm, self.self_attn.k_norm),
        ):
            if one is not None and other is not None:
                one.weight, other.weight = other.weight, one.weight


class Forgetful(DecoderBlock):
    """Attends to nothing that the cache held before."""

    def forward(
        self, x: Any, residual: Any, cos: Any, sin: Any, cache: Any, plan: Any, rows: Any
    ) -> Any:
        return super().forward(x, residual, cos, sin, torch.zeros_like(cache), plan, rows)


class Elsewhere(Attention):
    """Writes nothing to the cache."""

    def forward(self, query: Any, key: Any, value: Any, cache: Any, plan: Any) -> Any:
        return super().forward(query, key, value, torch.zeros_like(cache), plan)


class Lenient(Sampler):
    """Penalises nothing."""

    def forward(self, logits: Any, batch: Any) -> Any:
        return super().forward(logits, replace(batch, penalties=None))


def registered(replacement: type[PluggableLayer]) -> Any:
    entry = LayerEntry(replacement.layer_id, "other", f"{__name__}:{replacement.__name__}")

    class Plugin:
        @staticmethod
        @hookimpl
        def interposer_records() -> list[LayerEntry]:
            return [entry]

    return register(Plugin, "others")


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("layer_id", "number"), [("attention", 4), ("decoder_block", 5), ("sampler", 30)]
)
def test_standard_layers_pass_their_cases(layer_id: str, number: int) -> None:
    results = trials("interposer-ops", layer_id)
    for dtype in ("float32", "bfloat16", "float16"):
        assert sum(trial.request.dtype == dtype for trial in results) >= number
    assert [fault for trial in results for fault in trial.run()] == []


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("wrong", "labels"),
    [
        (Streamless, {"decode", "mixed, biases", "mixed, last block", "prompts, first block"}),
        (Unturned, {"decode", "prompts, window"}),
        (Shifted, {"mixed, last block", "prompts, window"}),
        (Swapped, {"decode", "mixed, biases"}),
        (Forgetful, {"decode", "mixed, last block", "mixed, biases"}),
        (Elsewhere, {"chunk after a prefix", "decode around page edges"}),
        (Lenient, {"penalties, many rows", "penalties, wide"}),
    ],
)
def test_wrong_layers_fail_their_cases(wrong: type[PluggableLayer], labels: set[str]) -> None:
    with registered(wrong):
        results = [t for t in trials("others", wrong.layer_id) if t.request.dtype == "float32"]
        blamed = {trial.label for trial in results if trial.run()}
    assert labels <= blamed
