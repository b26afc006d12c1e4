"""Weights whose op has nothing but its reference are dequantized once, while they load.

Dimensions: O output features, I input features, V vocabulary, H hidden size, T tokens.
"""

from __future__ import annotations

import json
import logging
import operator
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from interposer import (
    Call,
    Case,
    Config,
    EmbeddingMethod,
    Explanation,
    Kernel,
    LinearMethod,
    OpEntry,
    QuantizationScheme,
    SchemeEntry,
    Site,
    custom_op,
    explain,
    hookimpl,
    place,
    register,
)
from interposer.errors import CheckpointError
from interposer_engine import LanguageModel, load
from interposer_ops.layers.linear import Linear
from interposer_testing.described import DeviceDescription

TOKENS = [token * 37 % 256 for token in range(24)]
MIB = 2**20


# A package of somebody else, whose ops have no kernel anywhere.


def tenths_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (6, 8), generator=generator, dtype=torch.int8)
    arguments = {
        "x": torch.randn(3, 8, generator=generator).to(dtype),
        "codes": codes,
        "scale": torch.rand(6, generator=generator),
        "bias": None,
    }
    yield Case("rows", arguments, {"in_features": 8, "out_features": 6}, 9, 3000.0)


@custom_op("tenths_linear", cases=tenths_cases, constants=("codes", "scale", "bias"))
def tenths_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    weight = codes.to(scale.dtype) * scale[:, None]
    offset = None if bias is None else bias.to(scale.dtype)
    return nn.functional.linear(x.to(scale.dtype), weight, offset).to(x.dtype)


def rows_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    codes = torch.arange(-24, 24, dtype=torch.int8).view(6, 8)
    arguments = {"token_ids": torch.tensor([5, 0]), "codes": codes, "scale": torch.ones(6)}
    yield Case("rows", {**arguments, "out_dtype": dtype}, {"vocab_size": 6}, 0)


@custom_op("tenths_rows", cases=rows_cases, constants=("codes", "scale"))
def tenths_rows(token_ids: Tensor, codes: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (codes[token_ids].to(scale.dtype) * scale[token_ids][:, None]).to(out_dtype)


def put(layer: nn.Module, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        held = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, held)


def weight_of(layer: nn.Module) -> Tensor:
    return layer.get_parameter("codes").double() * layer.get_parameter("scale").double()[:, None]


def check(layer: nn.Module, prefix: str) -> None:
    if not (layer.get_parameter("scale") > 0).all():
        raise CheckpointError(f"{prefix}.scale", "holds what is no scale", "quantize again")


def tenths_linear_fast(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    product = nn.functional.linear(x, codes.to(x.dtype)) * scale.to(x.dtype)
    return product if bias is None else product + bias


class TenthsLinear(LinearMethod):
    """``codes`` ``[O, I]`` int8 with ``scale`` ``[O]``."""

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        self.prefix = site.prefix
        self.bound = site.bind_kernel(
            tenths_linear, in_features=in_features, out_features=out_features
        )
        put(
            layer,
            codes=torch.empty(out_features, in_features, dtype=torch.int8),
            scale=torch.empty(out_features, dtype=torch.float32),
            bias=torch.empty(out_features, dtype=site.dtype) if bias else None,
        )

    def dequantized(self, layer: nn.Module) -> Tensor:
        return weight_of(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        check(layer, self.prefix)
        names = ("codes", "scale", "bias")
        prepared = self.bound.prepared(**{name: layer._parameters[name] for name in names})
        return self.bound.function, tuple(prepared[name] for name in names)


class CoarseLinear(TenthsLinear):
    """Rounds its inputs to integers besides."""

    def dequantized_input(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x.double().round()

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        kernel, operands = super().finalize(layer)
        return lambda x, *rest: kernel(x.round(), *rest), operands


class TenthsEmbedding(EmbeddingMethod):
    """``codes`` ``[V, H]`` int8 with ``scale`` ``[V]``."""

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        self.prefix, self.dtype = site.prefix, site.dtype
        table = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        sizes = {"in_features": hidden_size, "out_features": vocab_size}
        self.rows, self.product = site.bind_table(tenths_rows, table, tenths_linear, sizes, head)
        codes = torch.empty(vocab_size, hidden_size, dtype=torch.int8)
        put(layer, codes=codes, scale=torch.empty(vocab_size, dtype=torch.float32))

    def dequantized(self, layer: nn.Module) -> Tensor:
        return weight_of(layer)

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        check(layer, self.prefix)
        held = layer.get_parameter("codes"), layer.get_parameter("scale")
        lookup = self.rows.function, (*held, self.dtype)
        return lookup, None if self.product is None else (self.product.function, (*held, None))


class Tenths(QuantizationScheme):
    """All linear layers, the table and the head."""

    method = "tenths"

    def __init__(self, linear: type[LinearMethod]) -> None:
        self.linear = linear

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Tenths:
        return cls(CoarseLinear if settings.get("coarse") else TenthsLinear)

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod:
        return self.linear()

    def head_method(self, prefix: str) -> LinearMethod:
        return self.linear()

    def embedding_method(self, prefix: str, head: str | None) -> EmbeddingMethod:
        return TenthsEmbedding()


@hookimpl
def interposer_records() -> list[Any]:
    """Return the records of this module."""
    return [
        OpEntry("tenths_linear", f"{__name__}:tenths_linear"),
        OpEntry("tenths_rows", f"{__name__}:tenths_rows"),
        SchemeEntry("tenths", "tenths", f"{__name__}:Tenths"),
    ]


@pytest.fixture
def registered() -> Iterator[None]:
    with register(sys.modules[__name__]):
        yield


# Models.

KINDS = ["llama", "llama-tied-biased"]
every_kind = pytest.mark.parametrize("pair", KINDS, indirect=True)
with_untied_head = pytest.mark.parametrize("pair", KINDS[:1], indirect=True)


@pytest.fixture
def tenths(registered: None, pair: tuple[Path, Any], tmp_path: Path) -> Path:
    """The directory of a model whose matrices are all quantized."""
    source, target = pair[0], tmp_path / "tenths"
    target.mkdir()
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2:
            stored[name] = tensor
            continue
        layer, scale = name.removesuffix(".weight"), tensor.abs().amax(1) / 127
        stored[f"{layer}.scale"] = scale
        stored[f"{layer}.codes"] = (tensor / scale[:, None]).round().to(torch.int8)
    save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    configure(target, {**config, "quantization_config": {"quant_method": "tenths"}})
    shutil.copy(source / "tokenizer.json", target)
    return target


def configure(path: Path, config: Mapping[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(config))


def loaded(path: Path, dtype: str = "float32", **policy: Any) -> LanguageModel:
    return load(path, dtype=dtype, cache_tokens=256, config=Config(**policy))


def functions(lm: LanguageModel) -> set[Any]:
    """Return the kernels of the linear layers and the head."""
    model: Any = lm.engine.model
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    return {layer.kernel for layer in (*layers, model.lm_head)}


@pytest.mark.landing(1)
@every_kind
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.06)])
def test_a_dequantized_model_equals_the_reference(tenths: Path, dtype: str, error: float) -> None:
    lm, reference = loaded(tenths, dtype), loaded(tenths, dtype, dequantize=False)
    assert functions(reference) == {tenths_linear.reference}
    assert tenths_linear.reference not in functions(lm)
    expected = reference.logits(TOKENS)
    torch.testing.assert_close(lm.logits(TOKENS), expected, rtol=error, atol=error)
    if dtype == "float32":
        completions = [m.generate([TOKENS], max_new_tokens=8)[0] for m in (lm, reference)]
        assert completions[0].token_ids == completions[1].token_ids


def tensors_of(layer: Any) -> list[Tensor]:
    """Return all that a finalized layer holds."""
    values = [dict(layer._parameters), getattr(layer, "constants", ()), layer.operands]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@every_kind
def test_stored_tensors_are_freed_after_dequantizing(tenths: Path) -> None:
    model: Any = loaded(tenths).engine.model
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in (*layers, model.lm_head):
        stored = tensors_of(layer)
        assert stored
        assert all(not name.endswith(("codes", "scale")) for name, _ in layer.named_parameters())
        assert torch.int8 not in {tensor.dtype for tensor in stored}


@every_kind
def test_notes_state_the_memory(
    tenths: Path, pair: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(pair[0] / "model.safetensors")
    if "lm_head.weight" in tensors:
        del tensors["model.embed_tokens.weight"]
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
    plain = sum(tensor.numel() * 4 for tensor in matrices) / MIB
    stored = sum(tensor.numel() + 4 * len(tensor) for tensor in matrices) / MIB
    with caplog.at_level(logging.WARNING, "interposer"):
        explained = explain(loaded(tenths))
    (note,) = beside_the_cache(explained)
    assert f"to {plain:.1f} MiB instead of {stored:.1f} MiB" in note
    assert "which only the reference of tenths_linear reads" in note
    assert "Config(dequantize=False)" in note
    assert note in caplog.text
    assert f"note: {note}" in str(explain(tenths, dtype="float32"))
    rows = [row for row in explained.rows if row.choice.request.name == "tenths_linear"]
    assert len(rows) == 5
    for row in rows:
        assert row.choice.idle
        dims, count = row.choice.request.dims, len(row.prefixes)
        plain = 4 * count * int(dims["in_features"]) * int(dims["out_features"]) / MIB
        start = f"not called at {count} of {count} places: their weights are dequantized once, "
        assert row.choice.notes[-1].startswith(f"{start}while loading, to {plain:.1f} MiB instead")


def beside_the_cache(explained: Explanation) -> list[str]:
    """Return the notes but that on the size of the cache, which every loaded model has."""
    return [note for note in explained.notes if not note.startswith("KV cache of ")]


@with_untied_head
@pytest.mark.parametrize(
    "policy",
    [
        {"dequantize": False},
        {"kernels": {"tenths_linear": "reference"}},
        {"kernels": {"tenths_linear": {"prefer": ["reference"]}}},
    ],
    ids=["switched off", "pinned", "preferred"],
)
def test_a_requested_reference_is_kept(tenths: Path, policy: dict[str, Any]) -> None:
    lm = loaded(tenths, **policy)
    assert functions(lm) == {tenths_linear.reference}
    assert beside_the_cache(explain(lm)) == []


@with_untied_head
def test_a_pin_keeps_the_reference_at_its_places(tenths: Path) -> None:
    lm = loaded(tenths, kernels={"tenths_linear@*.down_proj": "reference"})
    idle = {
        module.prefix
        for module in lm.engine.model.modules()
        if isinstance(module, Linear) and module.kernel is tenths_linear.reference
    }
    assert idle == {f"model.layers.{index}.mlp.down_proj" for index in range(3)}


@with_untied_head
def test_a_kernel_is_called_where_there_is_one(tenths: Path) -> None:
    kernel = Kernel("tenths_linear", "tenths_linear_fast", f"{__name__}:tenths_linear_fast")
    records = SimpleNamespace(interposer_records=hookimpl(lambda: [kernel]))
    with register(records, name="fast-tenths"):
        lm = loaded(tenths, canary="off")
    assert functions(lm) == {tenths_linear_fast}
    assert beside_the_cache(explain(lm)) == []


@with_untied_head
def test_weights_beyond_the_memory_stay_quantized(tenths: Path, tmp_path: Path) -> None:
    described = json.loads(DeviceDescription.of(place()).to_json())
    for free, fits in ((0, True), (MIB, False), (64 * MIB, True)):
        device = tmp_path / f"{free}.json"
        device.write_text(json.dumps({**described, "memory_bytes": free, "name": "Small"}))
        explained = explain(tenths, device)
        (note,) = [note for note in explained.notes if "tenths_linear" in note]
        rows = [row for row in explained.rows if row.choice.request.name == "tenths_linear"]
        assert {row.choice.idle for row in rows} == {fits}
        assert ("dequantized once" in note) == fits
        if not fits:
            assert "dequantized in every step, slowly" in note
            assert "75% of the free memory are 0.8 MiB" in note
            assert all("not dequantized while loading" in row.choice.notes[-1] for row in rows)


@pytest.mark.parametrize("pair", KINDS[1:], indirect=True)
def test_idle_references_do_not_prevent_graphs(tenths: Path) -> None:
    graphs = {
        dequantize: explain(tenths, "h200", Config(dequantize=dequantize, disable=["example-norm"]))
        for dequantize in (True, False)
    }
    assert graphs[True].notes[-1] == "decode steps run as graphs"
    assert "for 'tenths_linear' does not promise to be graph_safe" in graphs[False].notes[-1]


@with_untied_head
def test_a_method_that_changes_inputs_keeps_its_kernel(tenths: Path) -> None:
    config = json.loads((tenths / "config.json").read_text())
    config["quantization_config"]["coarse"] = True
    configure(tenths, config)
    lm = loaded(tenths)
    assert functions(lm).isdisjoint({tenths_linear.reference})
    layer = lm.engine.model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, Linear)
    assert isinstance(layer.method, CoarseLinear)
    assert "changes inputs" in layer.method.dequantizable().reason
    assert beside_the_cache(explain(lm)) == []


@every_kind
def test_invalid_stored_values_are_still_refused(tenths: Path) -> None:
    stored = load_file(tenths / "model.safetensors")
    name = "model.embed_tokens.scale" if "lm_head.scale" not in stored else "lm_head.scale"
    stored[name][3] = 0
    save_file(stored, tenths / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds what is no scale"):
        loaded(tenths)


@every_kind
def test_weights_are_exchanged_in_place(tenths: Path) -> None:
    lm = loaded(tenths)
    operands = [*tensors_of(lm.engine.model.lm_head)]
    stored = load_file(tenths / "model.safetensors")
    changed = {name: tensor.flip(0) for name, tensor in stored.items() if "codes" in name}
    lm.update_weights({**stored, **changed})
    save_file({**stored, **changed}, tenths / "model.safetensors")
    # Tensors stay, whose memory may be that of the new weights.
    assert all(map(operator.is_, tensors_of(lm.engine.model.lm_head), operands))
    torch.testing.assert_close(lm.logits(TOKENS), loaded(tenths).logits(TOKENS))
