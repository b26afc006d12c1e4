"""The plugin of the standard ops: their records, those of the layers, and attention backends."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import (
    COLLECTIVES,
    AttentionEntry,
    CommunicatorEntry,
    LayerEntry,
    PlatformEntry,
    Record,
)
from interposer_ops._records import PLAIN, read_records

INTERPOSER_API = ">=1.0,<2"

_LAYERS = {
    "rms_norm": "norm:RMSNorm",
    "linear": "linear:Linear",
    "merged_linear": "linear:MergedLinear",
    "embedding": "embedding:Embedding",
    "lm_head": "embedding:LMHead",
    "rotary_embedding": "rotary:RotaryEmbedding",
    "activation": "activation:GatedActivation",
    "gated_mlp": "mlp:GatedMLP",
    "router": "experts:Router",
    "experts": "experts:Experts",
    "attention": "attention:Attention",
    "self_attention": "self_attention:SelfAttention",
    "decoder_block": "decoder_block:DecoderBlock",
    "sampler": "sampler:Sampler",
}
_ATTENTION = {
    "paged": "layers.attention:PagedBackend",
    "grouped": "attention:GroupedBackend",
}
# What they promise of sums. Vendors' and native ones have 10 at least.
_COMMUNICATORS: dict[str, tuple[str, float, frozenset[str]]] = {
    "torch": ("TorchCommunicator", 1.0, frozenset()),
    "ordered": ("OrderedCommunicator", 0.0, frozenset({"deterministic", "batch_invariant"})),
}
# Where the cases of a layer are that has a module of its own for them.
_CASES = {
    "attention": "_attention_cases",
    "decoder_block": "_decoder_block_cases",
    "sampler": "_sampler_cases",
}


@hookimpl
def interposer_records() -> list[Record]:
    """Return all ops and kernels, the standard layers, attention and communicators."""
    layers = [
        LayerEntry(
            layer_id,
            "standard",
            f"interposer_ops.layers.{target}",
            score=0.0,
            cases=f"interposer_ops.layers.{_CASES.get(layer_id, '_cases')}:{layer_id}_layers",
        )
        for layer_id, target in _LAYERS.items()
    ]
    # They add nothing to the kernels that they bind, of which a policy requires the same.
    attention = (
        AttentionEntry(name, f"interposer_ops.{target}", score=0.0, properties=PLAIN)
        for name, target in _ATTENTION.items()
    )
    communicators = (
        CommunicatorEntry(
            name,
            f"interposer_ops.communicators:{target}",
            COLLECTIVES,
            score=score,
            properties=properties,
        )
        for name, (target, score, properties) in _COMMUNICATORS.items()
    )
    interpreter = PlatformEntry(
        "interpreter",
        "interposer_ops._triton.interpreter:InterpreterPlatform",
        score=-10.0,
        explicit=True,
    )
    return [*read_records(), *layers, *attention, *communicators, interpreter]
