"""Plugin that registers the standard ops, kernels, layers, attention and communicators."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import (
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
    "head_linear": "head_linear:HeadLinear",
    "embedding": "embedding:Embedding",
    "lm_head": "embedding:LMHead",
    "rotary_embedding": "rotary:RotaryEmbedding",
    "activation": "activation:GatedActivation",
    "gated_mlp": "mlp:GatedMLP",
    "router": "moe.router:Router",
    "experts": "moe.experts:Experts",
    "attention": "attention:Attention",
    "self_attention": "self_attention:SelfAttention",
    "decoder_block": "decoder_block:DecoderBlock",
    "sampler": "sampler:Sampler",
}
_ATTENTION = {
    "paged": "layers.attention:PagedBackend",
    "grouped": "attention:GroupedBackend",
}
# Class, score and properties. Communicators of vendors and of interposer have scores of 10 or more.
_COMMUNICATORS: dict[str, tuple[str, float, frozenset[str]]] = {
    "torch": ("TorchCommunicator", 1.0, frozenset()),
    "ordered": ("OrderedCommunicator", 0.0, frozenset({"deterministic", "batch_invariant"})),
}
# Modules of layer cases; those of all other layers are in ``_cases``.
_CASES = {
    "attention": "_attention_cases",
    "decoder_block": "_decoder_block_cases",
    "sampler": "_sampler_cases",
}


@hookimpl
def interposer_records() -> list[Record]:
    """Return the records of ops, kernels, layers, attention, communicators and the interpreter."""
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
    # A policy checks the bound kernels for these properties too; the backends take none away.
    attention = (
        AttentionEntry(name, f"interposer_ops.{target}", score=0.0, properties=PLAIN)
        for name, target in _ATTENTION.items()
    )
    communicators = (
        CommunicatorEntry(
            name,
            f"interposer_ops.communicators:{target}",
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
