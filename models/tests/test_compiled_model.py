"""A model behind torch.compile: one graph of the whole, for any batch, and the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interposer import Config, explain, register
from interposer.errors import ConfigError, UnknownNameError
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, Record
from interposer_models import Completion, LanguageModel, load
from interposer_ops.devices.compilation import expose_kernels
from interposer_ops.linear import linear

SHIPPED = Path(__file__).parents[2] / "examples/models/stdlib-lm"
OWN = ("interposer-cpu", "interposer-models", "interposer-ops", "interposer-quantization")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [1] * 30]
FP8 = torch.float8_e4m3fn


def opaque_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Project ``x`` by numpy, which torch's compiler cannot see."""
    found = torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)
    return found if bias is None else found + bias


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    return {"weight": weight.t().contiguous(), "bias": bias}


def linear_of_packed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return opaque_linear(x, weight.t(), bias)


def plugin(*records: Record) -> Any:
    class Acme:
        @staticmethod
        @hookimpl
        def interposer_records() -> list[Record]:
            return [*records]

    return Acme


OPAQUE = Kernel(
    "linear",
    "linear_numpy",
    f"{__name__}:opaque_linear",
    score=50,
    properties=frozenset({"opaque"}),
)
PACKED = Kernel(
    "linear",
    "linear_of_packed",
    f"{__name__}:linear_of_packed",
    prepare=f"{__name__}:packed",
    score=60,
    properties=frozenset({"opaque"}),
)


def loaded(path: Path, compile: str = "off", **more: Any) -> LanguageModel:
    config = Config(compile=compile, plugins=OWN, canary="off", **more)
    return load(path, "float32", config=config, cache_tokens=512, max_sequences=8)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def graphs(lm: LanguageModel) -> int:
    assert lm.engine.compiled is not None
    return lm.engine.compiled.graphs


def test_batches_of_any_size_are_served_by_few_graphs(llama: Path, tmp_path: Path) -> None:
    plain, compiled = loaded(llama), loaded(llama, "aot_eager", cache_dir=tmp_path)
    assert (graphs(compiled), plain.engine.compiled) == (0, None)

    def both(prompts: list[list[int]], count: int) -> None:
        expected, found = (
            lm.generate(prompts, max_new_tokens=count, ignore_eos=True) for lm in (plain, compiled)
        )
        assert tokens(found) == tokens(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-4)

    both(PROMPTS, 3)
    both(PROMPTS[:1], 3)
    both([[5] * 70, [6] * 9, *PROMPTS, [7] * 41], 3)
    both([[8] * 100], 20)
    both([[2] * 33, [9] * 5, [4] * 62, [3] * 17], 9)
    # Of some forty steps. The compiler takes sizes that are equal at first for one, and compiles
    # again where they differ, so that there may be a few more graphs than kinds of steps.
    assert 0 < graphs(compiled) <= 8


def test_the_shipped_model_is_one_graph(tmp_path: Path) -> None:
    plain, compiled = (
        load(
            SHIPPED,
            config=Config(compile=backend, plugins=OWN, cache_dir=tmp_path),
            cache_tokens=512,
        )
        for backend in ("off", "aot_eager")
    )
    prompts = ["def f(", "import os, sys"]
    expected, found = (lm.generate(prompts, max_new_tokens=6) for lm in (plain, compiled))
    assert tokens(found) == tokens(expected)
    assert graphs(compiled) > 0
    assert "note: steps are compiled: by 'aot_eager'" in str(explain(compiled))


def test_new_weights_are_computed_with(llama: Path, tmp_path: Path) -> None:
    weights = {name: t * 1.5 for name, t in load_file(llama / "model.safetensors").items()}
    plain, compiled = loaded(llama), loaded(llama, "eager", cache_dir=tmp_path)
    before = tokens(compiled.generate(PROMPTS, max_new_tokens=4))
    known = graphs(compiled)
    for lm in (plain, compiled):
        lm.update_weights(weights)
    expected = tokens(plain.generate(PROMPTS, max_new_tokens=4))
    assert tokens(compiled.generate(PROMPTS, max_new_tokens=4)) == expected != before
    assert graphs(compiled) == known


def test_an_opaque_kernel_is_an_op_of_the_graph(llama: Path, tmp_path: Path) -> None:
    with register(plugin(OPAQUE), "acme"):
        compiled = loaded(llama, "eager", cache_dir=tmp_path)
        blocks: Any = compiled.engine.model.model.layers
        layer = blocks[0].mlp.down_proj
        assert layer.kernel is opaque_linear  # itself, with nothing around it
        (name,) = expose_kernels(compiled.resolver)
        assert name == "interposer_kernels::acme_linear_numpy"
        seen: list[Any] = []

        def keep(graph: Any, inputs: Any) -> Any:
            seen.append(graph.graph)
            return graph

        x = torch.randn(5, layer.in_features)
        by_op = torch.compile(layer, fullgraph=True, dynamic=True, backend=keep)(x)
        torch.testing.assert_close(by_op, linear(x, *layer.operands))
        (graph,) = seen
        ops = [node.target for node in graph.nodes if node.op == "call_function"]
        assert ops == [torch.ops.interposer_kernels.acme_linear_numpy.default]
        (node,) = (node for node in graph.nodes if node.op == "call_function")
        assert node.meta["example_value"].shape[1:] == by_op.shape[1:]
        expected = tokens(loaded(llama).generate(PROMPTS, max_new_tokens=3))
        assert tokens(compiled.generate(PROMPTS, max_new_tokens=3)) == expected


def test_an_opaque_kernel_that_prepares_is_not_chosen(llama: Path, tmp_path: Path) -> None:
    with register(plugin(PACKED), "acme"):
        plain = loaded(llama)
        choice, _ = next(
            e for e in plain.resolver.choices.values() if e[0].request.name == "linear"
        )
        assert choice.chosen.name == "linear_of_packed"
        with pytest.raises(ConfigError, match=r"cannot be an op of a compiled graph: its const"):
            expose_kernels(plain.resolver)
        compiled = loaded(llama, "eager", cache_dir=tmp_path)
        text = str(explain(compiled).why("linear"))
        assert "not traceable by torch.compile, and prepares constants" in text


def test_the_platform_names_the_backend(llama: Path) -> None:
    noted = explain(llama, config=Config(compile="on", plugins=OWN))
    assert "note: steps are compiled: by 'inductor', the backend of platform 'cpu'" in str(noted)
    described = explain(llama, "h100", Config(compile="on"))
    assert "steps are compiled: by the backend of platform 'cuda'" in str(described)
    assert "steps are" not in str(explain(llama, config=Config(plugins=OWN)))
    with pytest.raises(UnknownNameError, match="Unknown compile backend 'aot_eagre'"):
        loaded(llama, "aot_eagre")


def interpreted(*arguments: str | Path) -> dict[str, Any]:
    """Return what the script prints with triton told to interpret, before it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("interpreted_model.py"))]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def quantized(source: Path, target: Path) -> Path:
    """Write the first block of a model with weights of 8-bit floats, and scales of inputs."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if "layers." in layer and "layers.0." not in layer:
            continue
        if layer.endswith("_proj"):
            scale = tensor.abs().amax() / torch.finfo(FP8).max
            tensors[name] = (tensor / scale).to(FP8)
            tensors[f"{layer}.weight_scale"] = scale
            tensors[f"{layer}.input_scale"] = torch.tensor(0.03)
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 1
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_triton_kernels_are_ops_of_the_graph(llama: Path, tmp_path: Path) -> None:
    """Of 8-bit floats, where norms and activations quantize for the projections behind them."""
    found = interpreted(quantized(llama, tmp_path / "fp8"), tmp_path / "cache")
    plain, compiled, apart = (found[way] for way in ("plain", "compiled", "apart"))
    assert compiled["tokens"] == plain["tokens"] == apart["tokens"]
    assert (plain["graphs"], plain["bound"]) == (0, compiled["bound"])
    assert 0 < compiled["graphs"] <= 6
    assert {f"interposer_ops_{name}" for name in compiled["kernels"] if "triton" in name} <= {
        *found["ops"]
    }
    quantizing = {"fused_add_rms_norm_quantize_fp8_triton", "silu_and_mul_quantize_fp8_triton"}
    assert quantizing <= {*plain["kernels"]}
    assert quantizing.isdisjoint(apart["kernels"])
    # What is quantized is not rounded before, and a code may be the next one for it.
    one, other = (torch.tensor(way["logits"]) for way in (plain, apart))
    assert not torch.equal(one, torch.zeros_like(one))
    torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
