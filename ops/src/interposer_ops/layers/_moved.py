"""Layers that moved to another module, kept with a warning for one minor version."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module

__all__ = ["MOVED", "moved_names"]

MOVED: dict[str, dict[str, str]] = {
    "cuts": {
        "Cut": "tensor_parallel.sharding.Shard",
        "Slice": "tensor_parallel.sharding.Slice",
        "Slices": "tensor_parallel.sharding.Slices",
        "heads_cut": "tensor_parallel.sharding.shard_heads",
        "local_spec": "tensor_parallel.sharding.local_spec",
    },
    "divided_experts": {
        "share_experts": "moe.sharded_experts.shard_experts",
    },
    "divided_linear": {
        "AllReduce": "tensor_parallel.collectives.AllReduce",
        "ColumnLinear": "tensor_parallel.linear.ColumnParallelLinear",
        "Projection": "tensor_parallel.linear.Projection",
        "RowLinear": "tensor_parallel.linear.RowParallelLinear",
        "divides": "tensor_parallel.linear.shard_projections",
    },
    "divided_pairs": {
        "QKV": "tensor_parallel.projection_pairs.QKV",
        "PairNames": "tensor_parallel.projection_pairs.ProjectionNames",
        "share_heads": "tensor_parallel.projection_pairs.shard_attention",
        "share_inner": "tensor_parallel.projection_pairs.shard_mlp",
    },
    "divided_tables": {
        "share_embedding": "tensor_parallel.embedding.shard_embedding",
        "share_head": "tensor_parallel.embedding.shard_lm_head",
    },
    "expert_loop": {
        "ExpertLoop": "moe.sequential_experts.ExpertLoop",
        "JoinedLayers": "moe.sequential_experts.ConcatenatedLayers",
        "LinearExperts": "moe.sequential_experts.LinearExperts",
        "Pair": "moe.sequential_experts.ExpertProjections",
        "separate_projections": "moe.sequential_experts.separate_projections",
        "tell_in_turn": "moe.sequential_experts.note_sequential",
    },
    "expert_placement": {
        "ExpertParallel": "moe.placement.ExpertParallel",
        "ExpertPlacement": "moe.placement.ExpertPlacement",
        "balanced_placement": "moe.placement.balanced_placement",
        "even_placement": "moe.placement.even_placement",
    },
    "expert_stages": {
        "Dispatched": "moe.dispatcher.Dispatched",
        "ExpertDispatcher": "moe.dispatcher.ExpertDispatcher",
        "GatedActivation": "moe.experts.ExpertActivation",
        "GroupedProducts": "moe.experts.GroupedExperts",
        "LocalDispatcher": "moe.dispatcher.LocalDispatcher",
        "interleaved": "moe.experts.interleaved",
        "row_experts": "moe.experts.row_experts",
    },
    "experts": {
        "Experts": "moe.experts.Experts",
        "PlainExperts": "moe.experts.PlainExperts",
        "Router": "moe.router.Router",
        "gates_first": "moe.experts.gates_first",
        "register_matrices": "moe.experts.register_matrices",
        "taken_matrices": "moe.experts.take_matrices",
    },
    "fused_sums": {
        "FUSED_SUM": "tensor_parallel.fused_all_reduce.FUSED_ALL_REDUCE",
        "LeftSum": "tensor_parallel.fused_all_reduce.FusedAllReduceNorm",
        "ends_in_projection": "tensor_parallel.fused_all_reduce.ends_in_projection",
        "leave_sum": "tensor_parallel.fused_all_reduce.fuse_all_reduce",
    },
    "placed_experts": {
        "PlacedExperts": "moe.sharded_experts.ExpertParallelExperts",
    },
    "rank_dispatcher": {
        "RankDispatcher": "moe.dispatcher.AllToAllDispatcher",
    },
}
"""Current ``module.name`` by former module and name, all below ``interposer_ops.layers``."""


def moved_names(module: str) -> Callable[[str], object]:
    """Return a module ``__getattr__`` that loads moved names from their new modules."""
    package, _, former_module = module.rpartition(".")
    targets = MOVED[former_module]

    def load(name: str) -> object:
        if name not in targets:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        target = f"{package}.{targets[name]}"
        warnings.warn(
            f"{module}.{name} is now {target}: import it from there",
            DeprecationWarning,
            stacklevel=2,
        )
        home, _, current_name = target.rpartition(".")
        value: object = getattr(import_module(home), current_name)
        return value

    return load
