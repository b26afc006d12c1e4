"""What is wrong in a decoder's block shows on the cases of the standard one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interposer import LayerEntry, current_registry, hookimpl, place, register
from interposer.testing import Trial
from interposer.testing.part import layer_trials
from interposer_ops.layers.decoder_block import DecoderBlock


def trials(provider: str) -> list[Trial]:
    found = layer_trials(current_registry(), place().device, provider, seed=0)
    return [t for t in found if getattr(t.candidate.record, "layer_id", "") == "decoder_block"]


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


def registered(replacement: type[DecoderBlock]) -> Any:
    entry = LayerEntry("decoder_block", "other", f"{__name__}:{replacement.__name__}")

    class Plugin:
        @staticmethod
        @hookimpl
        def interposer_records() -> list[LayerEntry]:
            return [entry]

    return register(Plugin, "others")


def test_the_standard_block_is_right() -> None:
    found = trials("interposer-ops")
    assert {trial.request.dtype for trial in found} == {"float32", "bfloat16", "float16"}
    assert len(found) == 15
    assert [fault for trial in found for fault in trial.run()] == []


@pytest.mark.parametrize(
    ("wrong", "labels"),
    [
        (Streamless, {"decode", "mixed, biases", "mixed, last block", "prompts, first block"}),
        (Unturned, {"decode", "prompts, window"}),
        (Shifted, {"mixed, last block", "prompts, window"}),
        (Swapped, {"decode", "mixed, biases"}),
        (Forgetful, {"decode", "mixed, last block", "mixed, biases"}),
    ],
)
def test_what_is_wrong_is_found(wrong: type[DecoderBlock], labels: set[str]) -> None:
    with registered(wrong):
        found = [t for t in trials("others") if t.request.dtype == "float32"]
        blamed = {trial.label for trial in found if trial.run()}
    assert labels <= blamed
