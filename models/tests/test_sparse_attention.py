"""Sparse attention to latent vectors: its backends, the family that has it, and its checkpoints.

Parity with transformers, and that of kernels with references, are tested where all are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.conftest import example, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from interposer import AttentionSpec, Capability, Config, Resolver, Site, current_registry, place
from interposer.errors import CheckpointError
from interposer_engine import load, plan
from interposer_models._decoder.sparse_attention import IndexerBackend, SparseLatentBackend
from interposer_models._families import examples
from interposer_testing import attention_specs, check_attention

SPECS = [spec for _, spec in attention_specs(quick=True)]
# Its first steps have fewer tokens than it names, the later ones more.
INDEXER = next(spec for spec in SPECS if spec.type == "indexer" and spec.top_k == 12)
SPARSE = next(spec for spec in SPECS if spec.sparse)


def site(spec: AttentionSpec) -> Site:
    return Site(Resolver(current_registry(), place().device, Config()), "attn", spec.dtype)


class Worst(IndexerBackend):
    """Names the tokens of the smallest scores."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        return super().forward(query, key, -value, cache, plan)


class Unsorted(IndexerBackend):
    """Names tokens in descending order."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        return super().forward(query, key, value, cache, plan).flip(1)


class Later(IndexerBackend):
    """Names the token after each that it should name."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        selected = super().forward(query, key, value, cache, plan)
        return torch.where(selected >= 0, selected + 1, selected)


class Fewer(IndexerBackend):
    """Leaves one token out."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        selected = super().forward(query, key, value, cache, plan)
        selected[:, -1:] = -1
        return selected


class Wide(IndexerBackend):
    """Names in int64."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        return super().forward(query, key, value, cache, plan).long()


class Verbose(IndexerBackend):
    """Names tokens where all are seen."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        selected = super().forward(query, key, value, cache, plan)
        return selected if selected.shape[1] else selected.new_zeros(len(selected), 1)


class Dense(SparseLatentBackend):
    """Attends to all tokens."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        return super().forward(query, key, value[:, :0], cache, plan)


class FirstSequence(SparseLatentBackend):
    """Reads the pages of the first sequence."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, plan: Any
    ) -> Tensor:
        wrong = plan._replace(sequences=plan.sequences * 0)
        return super().forward(query, key, value, cache, wrong)


@pytest.mark.parametrize("wrong", [Worst, Unsorted, Later, Fewer, Wide, Verbose])
def test_the_kit_detects_wrong_indexers(wrong: type[IndexerBackend]) -> None:
    assert check_attention(IndexerBackend, INDEXER, site(INDEXER)) == []
    assert check_attention(wrong, INDEXER, site(INDEXER))


@pytest.mark.parametrize("wrong", [Dense, FirstSequence])
def test_the_kit_detects_wrong_attention(wrong: type[SparseLatentBackend]) -> None:
    assert check_attention(SparseLatentBackend, SPARSE, site(SPARSE)) == []
    assert check_attention(wrong, SPARSE, site(SPARSE))


@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        (INDEXER, {"type": "decoder"}, "serves indexers only, got decoder"),
        (INDEXER, {"top_k": 0}, "needs a top_k of at least 1, got 0"),
        (INDEXER, {"window_tokens": 4}, "has neither windows nor a softcap"),
        (INDEXER, {"num_kv_heads": 2}, "needs one key per token, of two elements or more, got 2"),
        (INDEXER, {"cache_dtype": torch.int8}, "stores the cache as torch.float32"),
        (SPARSE, {"sparse": False}, "serves sparse attention only"),
        (SPARSE, {"top_k": 0}, "needs a top_k of at least 1, got 0"),
        (SPARSE, {"latent": False}, "serves latent attention only"),
        (SPARSE, {"softcap": 1.0}, "has neither windows nor a softcap"),
    ],
)
def test_the_backends_refuse(spec: AttentionSpec, changes: dict[str, Any], reason: str) -> None:
    backend = IndexerBackend if spec is INDEXER else SparseLatentBackend
    assert backend.accepts(replace(spec, **changes), Capability("")).reason.startswith(reason)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek") / "v32"
    write_checkpoint(example(examples.deepseek_v32, "few"), path)
    return path


def test_indexers_share_a_backend_but_not_caches(model: Path) -> None:
    layers = plan(model, dtype="float32").model.attention_layers
    shapes = [layer.backend.kv_layout().page_shape[1:] for layer in layers]
    assert shapes == [(40,), (16,)] * 3
    assert len({layer.backend for layer in layers}) == 2


def test_only_selected_tokens_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an indexer does not name has no part in the result."""
    lm = load(model, dtype="float32", cache_tokens=512)
    logits = lm.logits(list(range(60)))
    dense = SparseLatentBackend.forward

    def all_tokens(self: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
        return dense(self, query, key, value[:, :0], *arguments)

    monkeypatch.setattr(SparseLatentBackend, "forward", all_tokens)
    every = lm.logits(list(range(60)))
    torch.testing.assert_close(logits[:12], every[:12])
    assert (logits[20:] - every[20:]).abs().max() > 1e-3


def test_chunked_prefill_selects_the_same_tokens(model: Path) -> None:
    prompts = [list(range(n)) for n in (50, 3, 33)]
    tokens_by_chunk_size: list[Sequence[Any]] = []
    for step in (512, 8):
        lm = load(model, dtype="float32", cache_tokens=1024, max_step_tokens=step)
        completions = lm.generate(prompts, max_new_tokens=16, ignore_eos=True)
        tokens_by_chunk_size.append([completion.token_ids for completion in completions])
    assert tokens_by_chunk_size[0] == tokens_by_chunk_size[1]


def changed(model: Path, path: Path, **fields: Any) -> Path:
    """Write a copy of a checkpoint with other fields."""
    path.mkdir()
    config = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(load_file(model / "model.safetensors"), path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 8"),
        ({"index_topk": 0}, "index_topk: Input should be greater than 0"),
        ({"index_n_heads": 2**23}, "index heads of 16 exceed the limit of 16777216 elements"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 of 3 layers"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types.0: Input should be 'indexed"),
        ({"rope_interleave": False}, "rope_interleave: Input should be True"),
        ({"index_n_heads": 4}, "self_attn.indexer.weights_proj.weight' has shape [16, 64]"),
    ],
)
def test_contradictory_fields_are_refused(
    model: Path, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(changed(model, tmp_path / "changed", **fields), dtype="float32", cache_tokens=64)
    assert reason in str(caught.value)
