"""A model behind torch.compile: one graph of the whole, for any batch, and the same tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from models.conftest import SIZES, write_checkpoint
from models.tests.interpreter import interpreted
from safetensors.torch import load_file, save_file
from tests.adapter_files import write_adapter
from tests.forks import forks
from tests.tape import TapePlatform
from transformers import LlamaConfig

from interposer import Config, current_registry, explain, register
from interposer.errors import ConfigError, UnknownNameError
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, PlatformEntry, Record
from interposer_engine import Completion, LanguageModel, load
from interposer_ops.devices.compilation import expose_kernels
from interposer_ops.linear import linear

SHIPPED = Path(__file__).parents[3] / "examples/models/stdlib-lm"
OWN = ("interposer-cpu", "interposer-models", "interposer-ops", "interposer-quantization")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [1] * 30]
FP8 = torch.float8_e4m3fn


def opaque_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Project ``x`` by numpy, which torch's compiler cannot see."""
    product = torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)
    return product if bias is None else product + bias


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a Llama of one block, as each block is compiled for itself."""
    path = tmp_path_factory.mktemp("tiny")
    sizes = {**SIZES, "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 64}
    write_checkpoint(LlamaConfig(**sizes), path)
    return path


def loaded(path: Path, compile: str = "off", **more: Any) -> LanguageModel:
    sizes: dict[str, Any] = {"cache_tokens": 512, "max_sequences": 8, "max_step_tokens": 64}
    policy = {"plugins": OWN, "canary": "off", **more}
    return load(path, "float32", config=Config(compile=compile, **policy), **sizes)


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def graphs(lm: LanguageModel) -> int:
    assert lm.engine.runner.compiled is not None
    return lm.engine.runner.compiled.graphs


@pytest.mark.slow
def test_every_kind_of_step_is_one_graph(tiny: Path, tmp_path: Path) -> None:
    """Whatever is one apart, sizes that happen to be equal at first are not taken for one."""
    plain, compiled = loaded(tiny), loaded(tiny, "aot_eager", cache_dir=tmp_path)
    assert (graphs(compiled), plain.engine.runner.compiled) == (0, None)

    def both(prompts: list[list[int]], count: int, kinds: int) -> None:
        expected, actual = (
            lm.generate(prompts, max_new_tokens=count, ignore_eos=True) for lm in (plain, compiled)
        )
        assert tokens(actual) == tokens(expected)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-4)
        assert graphs(compiled) == kinds

    # Of as many sequences as there are columns of the page table, and tokens as there are numbers
    # in half of a head: what is equal here differs below.
    both([[5, 3, 2, 7], [2, 7, 1, 1]], 3, 2)  # prompts of several, and their decoding
    both([[8] * 4], 3, 4)  # of one
    both([[5] * 30, [6] * 9, [7] * 4], 9, 4)
    both([[8] * 60], 20, 4)
    both([[3] * 7], 2, 4)
    both([[4] * 100], 2, 5)  # a first part, which ends no prompt, and a second
    both([[2, 7, 1], [1] * 70], 4, 6)  # one that ends and one that goes on
    both([[2] * 33, [9] * 5, [4] * 62, [3] * 17, [5] * 150], 9, 6)
    for length in (4, 40):
        one, other = (lm.logits([*range(length)]) for lm in (plain, compiled))
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert graphs(compiled) == 7


# Inductor decorates a class of torch's own so when it is first imported.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_shipped_model_is_one_graph(backend: str, tmp_path: Path) -> None:
    plain, compiled = (
        load(SHIPPED, config=Config(compile=how, plugins=OWN, cache_dir=tmp_path), cache_tokens=512)
        for how in ("off", backend)
    )
    expected, actual = (lm.generate(["def f("], max_new_tokens=6) for lm in (plain, compiled))
    assert tokens(actual) == tokens(expected)
    assert graphs(compiled) == 2
    assert f"note: steps are compiled: by {backend!r}" in str(explain(compiled))


@pytest.mark.process
@pytest.mark.slow
def test_a_later_process_reuses_the_code_of_inductor(tiny: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("inductor_model.py")
    recorded = []
    for folder in ("one", "two"):  # of torch's own cache
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / folder)}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes
        done = forks().run(script, tiny, tmp_path / "store", env=environment)
        assert done.returncode == 0, done.stderr
        recorded.append(json.loads(done.stdout))
    cold, warm = recorded
    assert cold["compiled"] == warm["compiled"] == cold["plain"] == warm["plain"]
    assert cold["graphs"] == warm["graphs"] == 2
    assert (cold["graph_hits"], cold["hits"], cold["misses"]) == (0, 0, 2)
    assert (warm["graph_hits"], warm["misses"]) == (2, 0)


@pytest.mark.slow
def test_steps_of_compiled_models_are_captured(tiny: Path, tmp_path: Path) -> None:
    """Decode steps are compiled while the platform warms up, and what it captures is compiled."""
    more = {"platform": "tape", "graphs": "on", "plugins": OWN[1:], "cache_dir": tmp_path}
    with register(plugin(PlatformEntry("tape", "tests.tape:TapePlatform")), "tapes"):
        TapePlatform.captured = TapePlatform.replayed = 0
        plain, graphed = (loaded(tiny, how, **more) for how in ("off", "aot_eager"))
        both = [tokens(lm.generate(PROMPTS, max_new_tokens=9)) for lm in (plain, graphed)]
        assert both[0] == both[1]
        assert (TapePlatform.captured, TapePlatform.replayed) == (2, 16)
        assert graphs(graphed) == 2
        assert {"decode steps run as graphs", "steps are compiled"} <= {
            note.partition(":")[0] for note in explain(graphed).notes
        }


def test_a_backend_that_captures_itself_is_refused_beside_graphs(tiny: Path) -> None:
    more: dict[str, Any] = {"platform": "tape", "plugins": OWN[1:]}
    with register(plugin(PlatformEntry("tape", "tests.tape:TapePlatform")), "tapes"):
        with pytest.raises(ConfigError, match=r"'cudagraphs' captures graphs of its own.*Try: "):
            loaded(tiny, "cudagraphs", **more)
        noted = str(explain(tiny, config=Config(compile="cudagraphs", **more)))
        assert "note: steps are not compiled: 'cudagraphs' captures graphs of its own" in noted
        apart = str(explain(tiny, config=Config(compile="cudagraphs", graphs="off", **more)))
        assert "note: steps are compiled: by 'cudagraphs'" in apart


@pytest.mark.slow
def test_new_weights_are_computed_with(tiny: Path, tmp_path: Path) -> None:
    weights = {name: t * 1.5 for name, t in load_file(tiny / "model.safetensors").items()}
    plain, compiled = loaded(tiny), loaded(tiny, "eager", cache_dir=tmp_path)
    before = tokens(compiled.generate(PROMPTS, max_new_tokens=4))
    known = graphs(compiled)
    for lm in (plain, compiled):
        lm.update_weights(weights)
    expected = tokens(plain.generate(PROMPTS, max_new_tokens=4))
    assert tokens(compiled.generate(PROMPTS, max_new_tokens=4)) == expected != before
    assert graphs(compiled) == known


@pytest.mark.slow
def test_an_opaque_kernel_is_an_op_of_the_graph(tiny: Path, tmp_path: Path) -> None:
    with register(plugin(OPAQUE), "acme"):
        compiled = loaded(tiny, "eager", cache_dir=tmp_path)
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
        compiled_layer: Any = torch.compile(layer, fullgraph=True, dynamic=True, backend=keep)
        by_op = compiled_layer(x)
        torch.testing.assert_close(by_op, linear(x, *layer.operands))
        (graph,) = seen
        ops = [node.target for node in graph.nodes if node.op == "call_function"]
        assert ops == [torch.ops.interposer_kernels.acme_linear_numpy.default]
        (node,) = (node for node in graph.nodes if node.op == "call_function")
        assert node.meta["example_value"].shape[1:] == by_op.shape[1:]
        expected = tokens(loaded(tiny).generate(PROMPTS, max_new_tokens=3))
        assert tokens(compiled.generate(PROMPTS, max_new_tokens=3)) == expected


def test_an_opaque_kernel_that_prepares_is_not_chosen(tiny: Path, tmp_path: Path) -> None:
    with register(plugin(PACKED), "acme"):
        plain = loaded(tiny)
        choice, _ = next(
            e for e in plain.resolver.choices.values() if e[0].request.name == "linear"
        )
        assert choice.chosen.name == "linear_of_packed"
        with pytest.raises(ConfigError, match=r"compiled graph: it prepares its constants"):
            expose_kernels(plain.resolver)
        compiled = loaded(tiny, "eager", cache_dir=tmp_path)
        text = str(explain(compiled).why("linear"))
        assert "not traceable by torch.compile, and prepares constants" in text


def test_the_platform_names_the_backend(tiny: Path) -> None:
    noted = explain(tiny, config=Config(compile="on", plugins=OWN))
    assert "note: steps are compiled: by 'inductor', the backend of platform 'cpu'" in str(noted)
    described = explain(tiny, "h100", Config(compile="on"))
    assert "steps are compiled: by the backend of platform 'cuda'" in str(described)
    assert "steps are" not in str(explain(tiny, config=Config(plugins=OWN)))
    with pytest.raises(UnknownNameError, match="Unknown compile backend 'aot_eagre'"):
        loaded(tiny, "aot_eagre")


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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_triton_kernels_are_ops_of_the_graph(tiny: Path, tmp_path: Path) -> None:
    """Of 8-bit floats, where norms and activations quantize for the projections behind them."""
    sizes = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 96)}
    adapter = write_adapter(
        tmp_path / "adapter", {f"model.layers.0.{name}": size for name, size in sizes.items()}
    )
    actual = interpreted(
        "interpreted_model.py", quantized(tiny, tmp_path / "fp8"), tmp_path / "cache", adapter
    )
    plain, compiled, apart = (actual[way] for way in ("plain", "compiled", "apart"))
    assert compiled["tokens"] == plain["tokens"] == apart["tokens"]
    assert (plain["graphs"], plain["bound"]) == (0, compiled["bound"])
    assert compiled["graphs"] == 2
    assert {f"interposer_ops_{name}" for name in compiled["kernels"] if "triton" in name} <= {
        *actual["ops"]
    }
    # Every standard op of two steps is reached by a model.
    quantizing = {f"{op}_triton" for op in current_registry().ops if "_quantize_" in op}
    assert len(quantizing) == 3
    assert quantizing <= {*plain["kernels"]}
    assert quantizing.isdisjoint(apart["kernels"])
    # What is quantized is not rounded before, and a code may be the next one for it.
    one, other = (torch.tensor(way["logits"]) for way in (plain, apart))
    assert not torch.equal(one, torch.zeros_like(one))
    torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
    # Adapters read the inputs that the base reads: codes of three bits behind the point, or not.
    assert {"lora_shrink_triton", "lora_expand_triton"} <= {*plain["kernels"]}
    added = torch.tensor(plain["adapted"]) - one
    added_apart = torch.tensor(apart["adapted"]) - other
    assert (added - added_apart).norm() < 0.1 * added_apart.norm()
