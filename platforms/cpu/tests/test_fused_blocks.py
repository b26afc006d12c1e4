"""The shipped model in every scheme whose blocks the CPU platform computes by one call."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from interposer import Config
from interposer_cpu import native
from interposer_cpu._kernels.decoder_block import NativeDecoderBlock
from interposer_engine import LanguageModel, SamplingParams, load
from interposer_ops.layers.decoder_block import DecoderBlock

# Without a compiler the platform works too, but has nothing to compute blocks with.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

MODEL = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
TEXTS = ["import os\nimport sys\n\n\ndef main(path: str) -> int:\n    ", "class Error("]
SCHEMES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "int8": {"quant_method": "int8"},
    "int4": {"quant_method": "int4"},
    "w4a8": {"quant_method": "w4a8"},
    "fp8 channel": {"quant_method": "fp8", "strategy": "channel"},
    "fp8 block": {"quant_method": "fp8", "strategy": "block", "weight_block_size": [16, 16]},
    "fp8 tensor": {"quant_method": "fp8", "strategy": "tensor"},
}


def loaded(scheme: dict[str, Any] | None, layers: dict[str, str]) -> LanguageModel:
    # An example of a plugin, where it is installed, brings a norm of its own.
    others = ("interposer-example-norm",) if find_spec("interposer_example_norm") else ()
    config = Config(platform="cpu", layers=layers, disable=others, canary="off")
    return load(MODEL, "bfloat16", config=config, quantization=scheme, max_sequences=2)


@pytest.mark.landing(1)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_fused_blocks_generate_the_tokens_of_separate_layers(
    scheme: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    parts = loaded(scheme, {"decoder_block": "standard"})
    assert not any(isinstance(m, NativeDecoderBlock) for m in parts.engine.model.modules())
    expected = [output.token_ids for output in parts.generate(TEXTS, params)]

    def refuse(*_: object) -> None:
        raise AssertionError("a block called its parts")

    # What a fused block falls back to.
    monkeypatch.setattr(DecoderBlock, "forward", refuse)
    fused = loaded(scheme, {})
    assert [output.token_ids for output in fused.generate(TEXTS, params)] == expected
