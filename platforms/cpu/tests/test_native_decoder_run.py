"""Decoder blocks that follow each other in one call, compared with a call of each.

Dimensions: T tokens, H hidden size.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from interposer import Config
from interposer_cpu import native
from interposer_engine import SamplingParams, load

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
PROMPTS = ["def main(", "import os\n"]
NATIVE = Config(disable=("interposer-example-norm",), layers={"rms_norm": "standard"}, packed="off")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count the calls of one block and of several."""
    library, calls = native.library(), {"decoder_block": 0, "decoder_blocks": 0}
    with monkeypatch.context() as patched:
        for name in calls:
            whole = getattr(library, name)

            def count(*arguments: int, name: str = name, whole: Any = whole) -> None:
                calls[name] += 1
                whole(*arguments)

            patched.setattr(library, name, count)
        yield calls


def loaded(quantization: Any = None, dtype: str = "bfloat16") -> Any:
    return load(SHIPPED, dtype, config=NATIVE, quantization=quantization, max_sequences=4)


def texts(lm: Any) -> list[str]:
    return [actual.text for actual in lm.generate(PROMPTS, SamplingParams(max_new_tokens=12))]


def by_blocks(lm: Any) -> list[str]:
    """Generate text with a hook on the first block."""
    handle = lm.engine.model.model.layers[0].register_forward_hook(lambda *_: None)
    try:
        return texts(lm)
    finally:
        handle.remove()


@pytest.mark.landing(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", [None, "int8", "w4a8"])
def test_a_run_gives_the_results_of_its_blocks(
    method: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = loaded(method and {"quant_method": method}, dtype)
    with counted(monkeypatch) as calls:
        together = texts(lm)
    assert calls["decoder_block"] == 0
    assert calls["decoder_blocks"] > 0
    with counted(monkeypatch) as calls:
        assert by_blocks(lm) == together
    assert calls["decoder_block"] > 0
    assert calls["decoder_blocks"] == 0


def states(decoder: Any, by: str, monkeypatch: pytest.MonkeyPatch, lm: Any) -> torch.Tensor:
    """Compute the normalized hidden states of a prompt, and check which call computed them."""
    actual: list[torch.Tensor] = []
    handle = decoder.register_forward_hook(lambda _module, _given, out: actual.append(out.clone()))
    with counted(monkeypatch) as calls:
        lm.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2))
    handle.remove()
    assert calls[by] > 0
    return torch.cat(actual)


def test_a_run_writes_the_same_cache_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded()
    decoder = lm.engine.model.model
    together = states(decoder, "decoder_blocks", monkeypatch, lm)
    decoder.layers[1].forward = decoder.layers[1].forward  # as a watcher does
    single = states(decoder, "decoder_block", monkeypatch, lm)
    assert torch.equal(together, single)


def test_a_run_uses_exchanged_weights() -> None:
    lm = loaded()
    before = texts(lm)
    down = lm.engine.model.model.layers[0].mlp.down_proj
    own = down.operands
    down.operands = ((own[0][0].clone(), *own[0][1:]), *own[1:])
    assert texts(lm) == before
    down.operands[0][0][4096:].zero_()
    changed = texts(lm)
    assert changed == by_blocks(lm)
    down.operands = own
    assert texts(lm) == before


def test_a_run_calls_a_replaced_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded()
    before = texts(lm)
    down = lm.engine.model.model.layers[1].mlp.down_proj
    kernel, called = down.kernel, []

    def other(*arguments: Any) -> Any:
        called.append(1)
        return kernel(*arguments)

    down.kernel = other
    with counted(monkeypatch) as calls:
        changed = texts(lm)
    assert called
    assert calls["decoder_blocks"] == 0
    assert by_blocks(lm) == changed
    down.kernel = kernel
    with counted(monkeypatch) as calls:
        assert texts(lm) == before
    assert calls["decoder_block"] == 0


def test_a_copied_run_uses_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded()
    texts(lm)
    decoder = lm.engine.model.model
    other = copy.deepcopy(decoder)
    (blocks, _, run), (own, _, own_run) = other._joined, decoder._joined
    assert run is not own_run
    assert [*run.blocks] == [*other.layers] == blocks
    assert [*own_run.blocks] == [*decoder.layers] == own
    assert {id(each) for each in run.instances}.isdisjoint(id(each) for each in own_run.instances)
