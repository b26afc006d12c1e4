"""Embeddings and outputs are held as they are stored, and once where they are one table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.landing import landing_sample
from torch.utils import _pytree

from interposer import Config, Resolver, Site, current_registry, explain, place
from interposer.errors import CheckpointError
from interposer_cpu import native
from interposer_engine import LanguageModel, load
from interposer_gguf import _native_library as native_library
from interposer_gguf._block_formats import FORMATS
from interposer_gguf._blocks_embedding import BlocksEmbedding
from interposer_gguf._cases import random_rows
from interposer_gguf._checkpoint import GGUFCheckpoint
from interposer_ops.layers.embedding import Embedding, LMHead

PROMPT = "import os\nimport sys\n"
V, H = 4096, 256
Write = Callable[..., Path]


def loaded(path: Path, dtype: str = "float32", **settings: Any) -> LanguageModel:
    return load(path, dtype=dtype, max_sequences=1, cache_tokens=256, **settings)


def held(*layers: torch.nn.Module) -> int:
    """Return the bytes of what layers hold, once for each memory."""
    found: dict[int, int] = {}
    for layer in layers:
        assert list(layer.parameters()) == []
        operands = layer.constants if isinstance(layer, Embedding) else layer.operands
        for leaf in _pytree.tree_leaves(operands):
            if isinstance(leaf, torch.Tensor):
                found[leaf.data_ptr()] = leaf.untyped_storage().nbytes()
    return sum(found.values())


def tables(lm: LanguageModel) -> tuple[Embedding, LMHead]:
    embedding = lm.engine.model.get_submodule("model.embed_tokens")
    head = lm.engine.model.get_submodule("lm_head")
    assert isinstance(embedding, Embedding)
    assert isinstance(head, LMHead)
    return embedding, head


def assert_is_dequantized(path: Path, dequantize: Callable[[Path], Path]) -> LanguageModel:
    """Compare with the file whose blocks the library ``gguf`` has dequantized."""
    lm, reference = loaded(path), loaded(dequantize(path))
    tokens = reference.tokenizer.encode(PROMPT)
    rows = [tables(model)[0](torch.tensor(tokens)) for model in (lm, reference)]
    # Both add an offset in float32, one of them perhaps at once with the product.
    torch.testing.assert_close(*rows, atol=1e-7 * float(rows[1].abs().max()), rtol=0)
    expected = reference.logits(tokens)
    # Sums in another order, through two layers of random weights.
    size = float(expected.abs().max())
    torch.testing.assert_close(lm.logits(tokens), expected, atol=2e-5 * size, rtol=0)
    return lm


@pytest.mark.landing(1)
@pytest.mark.parametrize("stored_as", landing_sample(FORMATS, every=3))
def test_a_tied_embedding_is_stored_once(
    directory: Callable[[str], Path],
    write: Write,
    requantize: Write,
    dequantize: Callable[[Path], Path],
    stored_as: str,
) -> None:
    path = write(directory("tied"), "f32")
    layout = FORMATS[stored_as]
    lm = assert_is_dequantized(requantize(path, lambda _: stored_as), dequantize)
    stored = V * layout.row_bytes(H)
    # What is packed has a few bytes that describe it, and rows in whole vectors.
    assert stored <= held(*tables(lm)) < stored + 4096


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "stored_as", landing_sample(["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"], every=3)
)
def test_files_quantized_by_the_gguf_library_are_read(
    directory: Callable[[str], Path],
    write: Write,
    dequantize: Callable[[Path], Path],
    stored_as: str,
) -> None:
    for source in ("tied", "llama"):
        assert_is_dequantized(write(directory(source), stored_as), dequantize)


def test_an_untied_head_keeps_its_own_format(
    directory: Callable[[str], Path],
    write: Write,
    requantize: Write,
    dequantize: Callable[[Path], Path],
) -> None:
    """As llama-quantize does it: the output has more bits than the rest."""

    def kind(name: str) -> str:
        return "q6_k" if name == "output.weight" else "q4_0"

    path = requantize(write(directory("qwen2"), "f32"), kind)
    lm = assert_is_dequantized(path, dequantize)
    embedding, head = tables(lm)
    assert held(embedding) == V * FORMATS["q4_0"].row_bytes(H)
    assert held(head) == V * FORMATS["q6_k"].row_bytes(H)
    places = {
        prefix: row.choice.request.name for row in explain(lm).rows for prefix in row.prefixes
    }
    assert places["model.embed_tokens"] == "gguf_embedding"
    assert places["lm_head"] == "gguf_linear"


@pytest.mark.slow
def test_an_unquantized_embedding_stays_unquantized(
    directory: Callable[[str], Path],
    write: Write,
    requantize: Write,
    dequantize: Callable[[Path], Path],
) -> None:
    def kind(name: str) -> str:
        return "q8_0" if name.startswith("blk.") else "f32"

    assert_is_dequantized(requantize(write(directory("tied"), "f32"), kind), dequantize)


@pytest.mark.slow
@pytest.mark.parametrize("stored_as", ["q4_0", "q6_k"])
def test_a_tied_embedding_is_replaced_in_place(
    directory: Callable[[str], Path], write: Write, requantize: Write, stored_as: str
) -> None:
    plain = write(directory("tied"), "f32")
    paths = [requantize(plain, lambda _: stored_as, seed) for seed in (0, 1)]
    lm, other = map(loaded, paths)
    tokens = lm.tokenizer.encode(PROMPT)
    before = held(*tables(lm))
    assert lm.update_weights(GGUFCheckpoint.open(paths[1]).stream()) == ()
    assert torch.equal(lm.logits(tokens), other.logits(tokens))
    assert held(*tables(lm)) == before


@pytest.mark.landing(11)
@pytest.mark.parametrize("forbidden", ["*_native", "gguf_*_native"])
@pytest.mark.parametrize("stored_as", FORMATS)
def test_without_native_kernels_a_tied_embedding_is_stored_once(
    stored_as: str, forbidden: str
) -> None:
    """Whichever kernels are there, none of a form of its own is taken."""
    layout = FORMATS[stored_as]
    config = Config(kernels={"*": {"forbid": [forbidden]}}, canary="off", tables=False)
    site = Site(Resolver(current_registry(), place().device, config), "", torch.float32)
    site.resolver.choose_scheme({"quant_method": "gguf", "tensors": {"embed_tokens": stored_as}})
    head_site = site.at("lm_head")
    embedding = Embedding(site.at("embed_tokens"), V, H, head_site)
    head = LMHead(head_site, V, H, tied=embedding)
    rows = random_rows(layout, V, H, torch.Generator().manual_seed(0))
    embedding.get_parameter(stored_as).data.copy_(rows)
    for layer in (embedding, head):
        layer.finalize()
    numbers = layout.dequantized(rows, torch.float64)
    ids, x = torch.tensor([3, V - 1, 0]), torch.randn(2, H)
    torch.testing.assert_close(embedding(ids).double(), numbers[ids], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(head(x).double(), x.double() @ numbers.T, atol=1e-3, rtol=1e-4)
    # Ops for groups of integers take scales of 32 bits, unless a kernel narrows them.
    more = V * (H // 32) * 2 if stored_as in ("q4_0", "q8_0") else 0
    assert held(embedding, head) <= V * layout.row_bytes(H) + more + 4096


@pytest.mark.skipif(
    bool(native.why_absent()) or native_library.path() is None, reason="needs native kernels"
)
def test_native_kernels_serve_every_format() -> None:
    config = Config(canary="off", tables=False)
    site = Site(Resolver(current_registry(), place().device, config), "", torch.bfloat16)
    for name, layout in FORMATS.items():
        for head in (None, site.at(f"{name}.head")):
            with torch.device("meta"):
                method = BlocksEmbedding(layout)
                method.create_weights(torch.nn.Module(), site.at(name), V, H, head)
            chosen = [
                bound.choice.chosen.name for bound in (method.lookup, method.head_kernel) if bound
            ]
            assert all(kernel.endswith("_native") for kernel in chosen), chosen


@pytest.mark.landing(1)
@pytest.mark.parametrize("tied", [False, True])
def test_a_scale_that_is_not_finite_is_refused(
    directory: Callable[[str], Path], write: Write, requantize: Write, tied: bool
) -> None:
    path = requantize(write(directory("tied" if tied else "llama"), "f32"), lambda _: "q4_0")
    file = gguf.GGUFReader(path, "r+")
    stored = next(t for t in file.tensors if t.name == "token_embd.weight")
    stored.data[3, 0:2] = (0, 0x7C)  # an infinite scale
    file.data.flush()
    with pytest.raises(CheckpointError, match=r"embed_tokens\.q4_0: holds a scale or an offset"):
        loaded(path)
