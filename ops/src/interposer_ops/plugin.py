"""The plugin record of the standard ops, layers and the attention backend built from ops."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import AttentionEntry, LayerEntry, OpEntry, Record

INTERPOSER_API = ">=1.0,<2"

_OPS = {
    "norms": ("rms_norm", "fused_add_rms_norm"),
    "activations": ("silu_and_mul", "gelu_and_mul"),
    "rotary": ("rotary_embedding",),
    "linear": ("linear", "embedding"),
    "kv_cache": ("reshape_and_cache",),
    "attention": ("paged_attention",),
    "sampling": ("apply_penalties", "sample_tokens"),
}
_PLAIN = frozenset({"deterministic", "graph_safe", "traceable"})
# They copy, add, multiply and divide, which rounds the same way wherever an element stands. A sum
# over a row may be split differently for more rows, and an exponential computed differently at the
# end of a chunk of memory.
_BATCH_INVARIANT = frozenset(
    {"rotary_embedding", "embedding", "reshape_and_cache", "apply_penalties"}
)
_LAYERS = {
    "rms_norm": "norm:RMSNorm",
    "linear": "linear:Linear",
    "merged_linear": "linear:MergedLinear",
    "embedding": "embedding:Embedding",
    "lm_head": "embedding:LMHead",
    "rotary_embedding": "rotary:RotaryEmbedding",
    "activation": "activation:GatedActivation",
    "attention": "attention:Attention",
    "sampler": "sampler:Sampler",
}


@hookimpl
def interposer_records() -> list[Record]:
    """Return all ops, the standard layers and the ``paged`` attention backend."""
    ops = [
        OpEntry(
            name,
            f"interposer_ops.{module}:{name}",
            _PLAIN | {"batch_invariant"} if name in _BATCH_INVARIANT else _PLAIN,
        )
        for module, names in _OPS.items()
        for name in names
    ]
    layers = [
        LayerEntry(layer_id, "standard", f"interposer_ops.layers.{target}", score=0.0)
        for layer_id, target in _LAYERS.items()
    ]
    # It adds nothing to the kernels that it binds, of which a policy requires the same.
    paged = AttentionEntry(
        "paged", "interposer_ops.layers.attention:PagedBackend", score=0.0, properties=_PLAIN
    )
    return [*ops, *layers, paged]
