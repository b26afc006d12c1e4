"""The patch for the LM head and the embedding table: out-of-tree subclasses."""

from __future__ import annotations

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._head import adopt_head, adopt_table
from interposer_vllm._patch import Patch
from interposer_vllm._replacement import replace_layers

__all__ = ["PATCH"]

_MODULE = "vllm.model_executor.layers.vocab_parallel_embedding"


def _apply() -> Verdict:
    return replace_layers(
        _MODULE, {"VocabParallelEmbedding": adopt_table, "ParallelLMHead": adopt_head}
    )


PATCH = Patch(
    name="head",
    members=(
        HostMember(
            "vllm.model_executor.custom_op:PluggableLayer.register_oot",
            "(_decorated_layer_cls=None, name=None)",
        ),
        HostMember(f"{_MODULE}:UnquantizedEmbeddingMethod.apply", "(self, layer, x, bias=None)"),
        HostMember(f"{_MODULE}:UnquantizedEmbeddingMethod.embedding", "(self, layer, input_)"),
        HostMember(
            f"{_MODULE}:UnquantizedEmbeddingMethod.tie_weights", "(self, layer, embed_tokens)"
        ),
        HostMember(
            f"{_MODULE}:UnquantizedEmbeddingMethod.process_weights_after_loading", "(self, layer)"
        ),
    ),
    apply=_apply,
    scope="The head and the table of embeddings",
)
