"""Which layers are cut, compared with what transformers states for the same families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from models.tests.family_checkpoints import family_configs, write_config
from models.tests.rank_families import with_ranks
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from interposer import Ranks
from interposer_engine import plan
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.moe.sharded_experts import TensorParallelExperts
from interposer_ops.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

KINDS = {"colwise": "column", "packed_colwise": "column", "rowwise": "row"}
# Its other styles are not compared: of OLMo 2 it gathers what a norm is over, whole here; of
# Phi-3 and GLM-4 it gathers what one matrix of gate and up returns, whose parts are cut here.


def model_types() -> dict[str, str]:
    """Return the type of the models of each architecture."""
    listed = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return {
        name: kind
        for mapping in listed
        for kind, names in mapping.items()
        for name in ((names,) if isinstance(names, str) else names)
    }


def stated() -> dict[str, tuple[dict[str, Any], Mapping[str, str]]]:
    """Return an example and the plan of each family for which transformers has one."""
    types = model_types()
    plans: dict[str, tuple[dict[str, Any], Mapping[str, str]]] = {}
    for name, config in family_configs():
        kind = types.get(config["architectures"][0], "")
        cuts = getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None) if kind else None
        if cuts:
            plans.setdefault(name.partition("-")[0], (config, cuts))
    return plans


def cuts_of(model: nn.Module) -> dict[str, str]:
    """Return how each projection is cut, by its name without the numbers of blocks."""
    shards = {}
    for layer in model.modules():
        parent = str(getattr(layer, "prefix", "")).rpartition(".")[0]
        if isinstance(layer, ColumnParallelLinear):
            shards.update({f"{parent}.{part}": "column" for part in layer.parts})
        elif isinstance(layer, RowParallelLinear):
            shards[layer.prefix] = "row"
        elif isinstance(layer, TensorParallelExperts):
            # Of matrices that are stored inputs first it names the dimension in the file.
            kinds = ("row", "column") if layer.spec.inputs_first else ("column", "row")
            names = (f"{layer.prefix}.gate_up_proj", f"{layer.prefix}.down_proj")
            shards.update(zip(names, kinds, strict=True))
    return {re.sub(r"\.\d+\.", ".*.", name): kind for name, kind in shards.items()}


@pytest.mark.landing(8)
@pytest.mark.parametrize("family", sorted(stated()))
def test_layers_are_sharded_like_in_transformers(family: str, tmp_path: Path) -> None:
    config, cuts = stated()[family]
    path = write_config(tmp_path, config)
    with with_ranks(Ranks(0, 2, (0, 0), ("cpu", "cpu"))):
        planned = plan(path, platform="cpu")
    shards = cuts_of(planned.model)
    assert shards, planned.resolver.notes
    names = {re.sub(r"^.*?(?=layers\.)", "", name): kind for name, kind in shards.items()}
    both = {name for name in names if cuts.get(name) in KINDS}
    assert {name: names[name] for name in both} == {name: KINDS[cuts[name]] for name in both}
    # What it cuts here is not left whole: where its name is known, some of it is cut.
    replicated = whole_names(planned.model)
    expected = {name for name, style in cuts.items() if style in KINDS and name not in names}
    uncut = {
        name
        for name in expected
        if any(replicated_name.endswith(name) for replicated_name in replicated)
    }
    assert not uncut, planned.resolver.notes


def whole_names(model: nn.Module) -> set[str]:
    """Return the names of projections that are whole, without the numbers of blocks."""
    return {
        re.sub(r"\.\d+\.", ".*.", f"{layer.prefix.rpartition('.')[0]}.{part}")
        for layer in model.modules()
        if isinstance(layer, Linear) and not hasattr(layer, "slices")
        for part in layer.parts
    }


def shard_notes(path: Path) -> list[str]:
    notes = plan(path, platform="cpu", tensor_parallel=2).resolver.notes
    return [note for note in notes if note.startswith(("sharded ", "replicated "))]


def test_notes_list_shards_by_kind(llama: Path) -> None:
    heads, mlp = "model.layers.self_attn", "model.layers.mlp"
    norms = ("model.layers.input_layernorm", "model.layers.post_attention_layernorm", "model.norm")
    parts = "q_proj 32 of 64, k_proj 16 of 32, v_proj 16 of 32"
    assert shard_notes(llama) == [
        f"sharded by heads: {heads}.qkv_proj ({parts})",
        f"sharded by outputs: {mlp}.gate_up_proj (gate_proj 48 of 96, up_proj 48 of 96)",
        "sharded by inputs, then all-reduced: "
        f"{heads}.o_proj (32 of 64), {mlp}.down_proj (48 of 96)",
        "sharded by tokens: model.embed_tokens (128 of 256), lm_head (128 of 256)",
        f"replicated on every rank: {', '.join(norms)}",
    ]
    assert plan(llama, platform="cpu").resolver.notes == []


def test_notes_list_experts_as_sharded_and_routers_as_replicated(qwen3_moe: Path) -> None:
    notes = {note.partition(": ")[0]: note for note in shard_notes(qwen3_moe)}
    experts = notes["sharded inside every expert, then all-reduced"]
    assert experts.endswith("model.layers.mlp.experts (24 of 48)")
    assert "model.layers.mlp.router" in notes["replicated on every rank"]
