"""The head and the table of embeddings, also by out-of-tree classes."""

from __future__ import annotations

from interposer import Verdict
from interposer_vllm._head import adopt_head, adopt_table
from interposer_vllm._replacement import replace_layers
from interposer_vllm._seam import Member, Seam

__all__ = ["SEAM"]

_MODULE = "vllm.model_executor.layers.vocab_parallel_embedding"


def _take() -> Verdict:
    return replace_layers(
        _MODULE, {"VocabParallelEmbedding": adopt_table, "ParallelLMHead": adopt_head}
    )


SEAM = Seam(
    name="head",
    members=(
        Member(
            "vllm.model_executor.custom_op:PluggableLayer.register_oot",
            "(_decorated_layer_cls=None, name=None)",
        ),
        Member(f"{_MODULE}:UnquantizedEmbeddingMethod.apply", "(self, layer, x, bias=None)"),
        Member(f"{_MODULE}:UnquantizedEmbeddingMethod.embedding", "(self, layer, input_)"),
        Member(f"{_MODULE}:UnquantizedEmbeddingMethod.tie_weights", "(self, layer, embed_tokens)"),
        Member(
            f"{_MODULE}:UnquantizedEmbeddingMethod.process_weights_after_loading", "(self, layer)"
        ),
    ),
    take=_take,
    stays="The head and the table of embeddings",
)
