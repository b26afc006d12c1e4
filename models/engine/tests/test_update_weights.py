"""New weights replace those of a running model in place: all of them or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.conftest import SIZES, write_checkpoint
from safetensors.torch import load_file, save_file
from tests.landing import num_examples
from torch import nn
from transformers import Qwen3MoeConfig

from interposer import Config
from interposer.errors import CheckpointError, RequestError
from interposer_engine import LanguageModel, load
from interposer_engine._checkpoint.updates import GroupUpdate
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear

WEIGHTS = "model.safetensors"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
FP8 = torch.float8_e4m3fn

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor, torch.Generator], Tensors]


def in_8_bit_floats(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    """Return the tensors that fbgemm_fp8 stores."""
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(FP8).max
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale}


def in_blocks(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    """Return the tensors that fp8 stores with blocks of 16 by 32."""
    blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 32))
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(FP8).max
    codes = (blocks / scale).to(FP8).flatten(2).flatten(0, 1)
    return {"weight": codes, "weight_scale_inv": scale.flatten(2).flatten(0, 1)}


def in_int8(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    """Return the tensors that compressed-tensors stores with a scale per output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def in_codes(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    """Return random numbers in the form in which gptq stores 4 bits in groups of 32."""
    outputs, inputs = weight.shape
    groups = inputs // 32

    def words(*shape: int) -> torch.Tensor:
        low, high = -(2**31), 2**31 - 1
        return torch.randint(low, high, shape, generator=generator).to(torch.int32)

    return {
        "qweight": words(inputs // 8, outputs),
        "qzeros": words(groups, outputs // 8),
        "scales": 0.01 + 0.02 * torch.rand(groups, outputs, generator=generator),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // 32,
    }


def plain(weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    return {"weight": weight}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": INT8}}
GPTQ = {"bits": 4, "group_size": 32, "sym": False, "desc_act": True}
KINDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "plain": (plain, {}),
    "fbgemm_fp8": (in_8_bit_floats, {"quant_method": "fbgemm_fp8"}),
    "fp8": (in_blocks, {"quant_method": "fp8", "weight_block_size": [16, 32]}),
    "int8": (
        in_int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": GROUPS,
            "ignore": ["lm_head"],
        },
    ),
    "gptq": (in_codes, {"quant_method": "gptq", **GPTQ}),
}


def stored(kind: str, plain_tensors: Tensors, seed: int) -> Tensors:
    """Return the tensors of a checkpoint of this kind whose weights are noisy by the seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, tensor in plain_tensors.items():
        noisy = tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            parts = KINDS[kind][0](noisy, generator)
            tensors |= {f"{layer}.{key}": value.contiguous() for key, value in parts.items()}
        else:
            tensors[name] = noisy
    return tensors


def write(folder: Path, source: Path, kind: str, tensors: Tensors) -> Path:
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    facts = json.loads((source / "config.json").read_text())
    quantization = KINDS[kind][1]
    facts |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(facts))
    shutil.copy(source / "tokenizer.json", folder)
    return folder


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def two(kind: str, llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of one kind with other weights."""
    tensors = load_file(llama / WEIGHTS)
    first, second = (
        write(tmp_path / str(seed), llama, kind, stored(kind, tensors, seed)) for seed in (1, 2)
    )
    return first, second


@pytest.mark.parametrize("method", [None, "int8"])
def test_experts_whose_memory_is_swapped_are_updated(method: str | None, tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    experts: dict[str, Any] = {
        "moe_intermediate_size": 512,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    }
    first, second = tmp_path / "first", tmp_path / "second"
    write_checkpoint(Qwen3MoeConfig(**sizes, **experts), first)
    shutil.copytree(first, second)
    original = load_file(first / WEIGHTS)
    other = {name: tensor.flip(0).contiguous() for name, tensor in original.items()}
    save_file(other, second / WEIGHTS, {"format": "pt"})
    quantization = None if method is None else {"quant_method": method}
    options: dict[str, Any] = {"cache_tokens": 64, "quantization": quantization}
    lm = load(first, **options)
    unchanged = kept(lm)
    lm.update_weights(other)
    assert torch.equal(lm.logits(TOKENS), load(second, **options).logits(TOKENS))
    lm.update_weights(original)
    assert unchanged()


def operands(lm: LanguageModel) -> dict[str, tuple[Any, ...]]:
    return {
        layer.prefix: layer.operands
        for layer in lm.engine.model.modules()
        if isinstance(layer, Linear | LMHead)
    }


def kept(lm: LanguageModel) -> Callable[[], bool]:
    """Return a function that compares the model's results with its present ones."""
    before = lm.logits(TOKENS)
    return lambda: torch.equal(lm.logits(TOKENS), before)


@pytest.mark.landing(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_updated_model_equals_a_loaded_one(two: tuple[Path, Path], dtype: str) -> None:
    first, second = (load(path, dtype=dtype, cache_tokens=64) for path in two)
    unchanged, expected = kept(first), second.logits(TOKENS)
    assert not torch.equal(first.logits(TOKENS), expected)
    before = operands(first)
    assert first.update_weights(load_file(two[1] / WEIGHTS)) == ()
    assert torch.equal(first.logits(TOKENS), expected)
    # Whoever took the operands before, such as a captured graph, has the new ones.
    for prefix, operand in operands(first).items():
        assert all(old is new for old, new in zip(before[prefix], operand, strict=True))
    assert first.update_weights(load_file(two[0] / WEIGHTS).items()) == ()
    assert unchanged()


@pytest.mark.landing(2)
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("pair", ["llama-tied-biased", "qwen3", "qwen3-tied"], indirect=True)
def test_tied_biased_and_normed_models_are_updated(
    pair: tuple[Path, Any], tmp_path: Path, quantization: str | None
) -> None:
    path, model = pair
    trained: nn.Module = type(model)(model.config)
    with torch.no_grad():
        for new, old in zip(trained.parameters(), model.parameters(), strict=True):
            new.copy_(1.1 * old)
    trained.save_pretrained(tmp_path)  # type: ignore[operator]
    shutil.copy(path / "tokenizer.json", tmp_path)
    lm, expected = (
        load(folder, dtype="float32", cache_tokens=64, quantization=quantization)
        for folder in (path, tmp_path)
    )
    assert not torch.equal(lm.logits(TOKENS), expected.logits(TOKENS))
    # The trainer's own parameters, which require gradients; a tied head is listed besides.
    assert lm.update_weights(trained.state_dict(keep_vars=True)) == ()
    assert torch.equal(lm.logits(TOKENS), expected.logits(TOKENS))


@pytest.fixture
def lm(llama: Path) -> LanguageModel:
    return load(llama, dtype="float32", cache_tokens=64)


@pytest.fixture
def tensors(llama: Path) -> Tensors:
    return stored("plain", load_file(llama / WEIGHTS), seed=3)


def test_layers_without_new_tensors_stay_unchanged(
    lm: LanguageModel, llama: Path, tensors: Tensors
) -> None:
    unchanged = kept(lm)
    names = [name for name in tensors if ".1.self_attn." in name or "embed" in name]
    assert len(names) == 5
    assert lm.update_weights({name: tensors[name] for name in names}) == ()
    assert not unchanged()
    original = load_file(llama / WEIGHTS)
    lm.update_weights({name: original[name] for name in names})
    assert unchanged()


@settings(max_examples=num_examples(15))
@given(data=st.data())
def test_any_layers_are_updated_in_any_order(llama: Path, data: st.DataObject) -> None:
    original = load_file(llama / WEIGHTS)
    new = stored("plain", original, seed=4)
    lm, reference = (load(llama, dtype="float32", cache_tokens=64) for _ in range(2))
    by_layer: dict[str, list[str]] = {}
    for prefix, layer in lm.engine.model.named_modules():
        parent = prefix.rpartition(".")[0]
        parts = [f"{parent}.{part}" for part in layer.parts] if isinstance(layer, Linear) else []
        names = [f"{part}.weight" for part in parts or [prefix]]
        by_layer[prefix] = [name for name in names if name in new]
    prefixes = sorted(prefix for prefix, names in by_layer.items() if names)
    chosen = data.draw(st.lists(st.sampled_from(prefixes), min_size=1, unique=True))
    order = data.draw(st.permutations([name for prefix in chosen for name in by_layer[prefix]]))
    assert lm.update_weights((name, new[name]) for name in order) == ()
    # One layer at a time gives the same.
    for prefix in sorted(chosen):
        reference.update_weights({name: new[name] for name in by_layer[prefix]})
    assert torch.equal(lm.logits(TOKENS), reference.logits(TOKENS))
    lm.update_weights({name: original[name] for name in order})
    reference = load(llama, dtype="float32", cache_tokens=64)
    assert torch.equal(lm.logits(TOKENS), reference.logits(TOKENS))


ATTENTION = "model.layers.1.self_attn"
Q, K = f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight"
Edit = Callable[[Tensors], object]


def renamed(tensors: Tensors) -> object:
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    return tensors


def put(name: str, change: Callable[[torch.Tensor], object]) -> Edit:
    def edit(tensors: Tensors) -> object:
        return {**tensors, name: change(tensors[name])}

    return edit


def one_twice(tensors: Tensors) -> object:
    return [*tensors.items(), (Q, tensors[Q])]


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (renamed, r"layers\.9\.mlp\.up_proj\.weight', which the model has no place for"),
        (put(K, lambda t: t[:-1]), r"k_proj\.weight' has shape \[31, 64\].*asks for \[32, 64\]"),
        (put(K, lambda t: t.int()), r"k_proj\.weight' is stored as torch\.int32, expected"),
        (put(K, lambda t: t.to(FP8).view(torch.int8)), r"k_proj\.weight' is stored as torch\.int8"),
        (put(K, lambda t: t.numpy()), r"k_proj\.weight' is ndarray, not a tensor"),
        (one_twice, r"holds the tensor '.*q_proj\.weight' twice"),
        (lambda tensors: [(Q, tensors[Q])] * 2, r"holds the tensor '.*q_proj\.weight' twice"),
        (lambda tensors: iter(()), r"holds no tensor of the model\nTry: pass tensors; an iterator"),
    ],
)
def test_a_bad_update_changes_nothing(
    lm: LanguageModel, tensors: Tensors, edit: Edit, message: str
) -> None:
    unchanged, edited = kept(lm), edit(tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        lm.update_weights(edited)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"update of {lm.path}: ")
    assert unchanged()


def test_an_update_needs_all_parts_of_a_fused_layer(lm: LanguageModel, tensors: Tensors) -> None:
    unchanged = kept(lm)
    with pytest.raises(CheckpointError) as caught:
        lm.update_weights({name: tensors[name] for name in (Q, "model.norm.weight")})
    assert f"lacks the tensor {K!r}, '{ATTENTION}.v_proj.weight', which goes" in str(caught.value)
    assert f"goes together with {Q!r}\n" in str(caught.value)
    assert unchanged()


@pytest.mark.landing(3)
@pytest.mark.parametrize("kind", ["fbgemm_fp8", "fp8", "int8", "gptq"], indirect=True)
def test_an_update_needs_all_tensors_of_a_quantized_layer(
    two: tuple[Path, Path], kind: str
) -> None:
    lm, new = load(two[0], dtype="float32", cache_tokens=64), load_file(two[1] / WEIGHTS)
    unchanged = kept(lm)
    names = [name for name in new if name.startswith("model.layers.0.mlp.down_proj.")]
    assert len(names) > 1
    for name in names:
        with pytest.raises(CheckpointError, match="lacks the tensor") as caught:
            lm.update_weights({name: new[name]})
        assert all(repr(part) in str(caught.value) for part in names)
        assert unchanged()
    assert lm.update_weights({name: new[name] for name in names}) == ()
    assert not unchanged()


@pytest.mark.parametrize("kind", ["fbgemm_fp8", "fp8", "gptq"], indirect=True)
def test_scales_that_are_nan_change_nothing(two: tuple[Path, Path], kind: str) -> None:
    lm, new = load(two[0], dtype="float32", cache_tokens=64), load_file(two[1] / WEIGHTS)
    unchanged = kept(lm)
    name = next(n for n in reversed(new) if "scale" in n and "layers.2" in n)
    new[name] = new[name].clone()
    new[name].view(-1)[-1] = torch.nan
    with pytest.raises(CheckpointError, match="nan"):
        lm.update_weights(new)
    assert unchanged()


def test_an_error_of_the_iterator_changes_nothing(lm: LanguageModel, tensors: Tensors) -> None:
    unchanged = kept(lm)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors.items())[:20]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        lm.update_weights(failing())
    assert unchanged()


def test_an_interrupted_write_still_writes_all_weights(
    lm: LanguageModel,
    tensors: Tensors,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply, calls = GroupUpdate.apply, 0

    def interrupted(update: GroupUpdate) -> None:
        nonlocal calls
        calls += 1
        apply(update)
        if calls == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(GroupUpdate, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.update_weights(tensors)
    expected = load(write(tmp_path / "new", llama, "plain", tensors), "float32", cache_tokens=64)
    assert torch.equal(lm.logits(TOKENS), expected.logits(TOKENS))


def test_requests_that_run_keep_their_weights(lm: LanguageModel, tensors: Tensors) -> None:
    expected = [delta.token_id for delta in lm.stream(TOKENS, max_new_tokens=6)]
    deltas = lm.stream(TOKENS, max_new_tokens=6)
    first = next(deltas)
    with pytest.raises(RequestError, match="finish or cancel them"):
        lm.update_weights(tensors)
    assert [first.token_id, *(delta.token_id for delta in deltas)] == expected
    assert lm.update_weights(tensors) == ()


@pytest.mark.parametrize("pair", ["llama-tied-biased"], indirect=True)
def test_a_tied_head_goes_with_its_embedding(pair: tuple[Path, Any]) -> None:
    lm = load(pair[0], dtype="float32", cache_tokens=64)
    unchanged = kept(lm)
    weight = 2 * load_file(pair[0] / WEIGHTS)["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"tied to 'model\.embed_tokens\.weight'"):
        lm.update_weights({"lm_head.weight": weight})
    assert unchanged()
    assert lm.update_weights({"model.embed_tokens.weight": weight, "lm_head.weight": weight}) == ()
    embedding, head = lm.engine.model.model.embed_tokens, lm.engine.model.lm_head
    assert isinstance(embedding, Embedding)
    assert isinstance(head, LMHead)
    assert torch.equal(embedding(torch.tensor([5, 0])), weight[[5, 0]])
    hidden = torch.randn(2, weight.shape[1])
    torch.testing.assert_close(head(hidden), hidden @ weight.T)
    assert not unchanged()


@pytest.mark.parametrize("kind", ["gptq"], indirect=True)
def test_an_update_returns_layers_with_new_operands(
    two: tuple[Path, Path], llama: Path, tmp_path: Path, kind: str
) -> None:
    new, layer = load_file(two[1] / WEIGHTS), "model.layers.1.mlp.down_proj"
    new[f"{layer}.g_idx"] = new[f"{layer}.g_idx"].flip(0).contiguous()
    expected = load(write(tmp_path / "flipped", llama, kind, new), "float32", cache_tokens=64)
    lm = load(two[0], dtype="float32", cache_tokens=64)
    assert lm.update_weights(new) == (layer,)
    assert torch.equal(lm.logits(TOKENS), expected.logits(TOKENS))
    # Now it has an order, and the next one has the same form.
    assert lm.update_weights(new) == ()
    assert lm.update_weights(load_file(two[0] / WEIGHTS)) == (layer,)


@pytest.mark.parametrize("kind", ["gptq"], indirect=True)
def test_groups_that_follow_each_other_need_not_be_stored(
    two: tuple[Path, Path], llama: Path, tmp_path: Path, kind: str
) -> None:
    ordered = {"quantization_config": {"quant_method": kind, **GPTQ, "desc_act": False}}
    models = []
    for name, left_out in (("all", ()), ("fewer", ("g_idx",))):
        tensors = load_file(two[0] / WEIGHTS)
        stored = {key: t for key, t in tensors.items() if not key.endswith(left_out)}
        path = write(tmp_path / name, llama, kind, stored)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | ordered))
        models.append(load(path, dtype="float32", cache_tokens=64))
    complete, fewer = models
    assert torch.equal(complete.logits(TOKENS), fewer.logits(TOKENS))
    new = {k: t for k, t in load_file(two[1] / WEIGHTS).items() if "g_idx" not in k}
    for model in models:
        assert model.update_weights(new) == ()
    assert torch.equal(complete.logits(TOKENS), fewer.logits(TOKENS))


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_compiled_layers_compute_with_the_new_weights(
    llama: Path, tensors: Tensors, quantization: str | None
) -> None:
    config = Config(kernels={"linear": "reference"})
    lm = load(llama, "float32", config=config, cache_tokens=64, quantization=quantization)
    layer: nn.Module = lm.engine.model.get_submodule("model.layers.1.mlp.gate_up_proj")
    num_compiled = 0

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    before = compiled(x)
    assert torch.equal(before, layer(x))
    lm.update_weights(tensors)
    assert torch.equal(compiled(x), layer(x))
    assert not torch.equal(layer(x), before)
    assert num_compiled == 1


def test_hooks_and_foreign_attributes_stay(lm: LanguageModel, tensors: Tensors) -> None:
    layer: Any = lm.engine.model.get_submodule("model.layers.0.mlp.down_proj")
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1

    layer.register_forward_hook(hook)
    layer.note = "mine"
    lm.update_weights(tensors)
    lm.logits(TOKENS)
    assert (calls, layer.note) == (1, "mine")


def test_weights_that_were_loaded_in_inference_mode_are_updated(
    llama: Path, lm: LanguageModel, tensors: Tensors
) -> None:
    with torch.inference_mode():
        second = load(llama, dtype="float32", cache_tokens=64)
    for model in (lm, second):
        assert model.update_weights(tensors) == ()
    with torch.inference_mode():
        assert lm.update_weights(tensors) == ()
    assert torch.equal(lm.logits(TOKENS), second.logits(TOKENS))
