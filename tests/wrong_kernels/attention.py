"""Attention kernels that see too much, too little or the wrong thing."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tests.wrong_kernels.wrong import wrong

from interposer_ops.attention import paged_attention
from interposer_ops.latent_attention import latent_attention_decode

Tensor = torch.Tensor


def named(*given: Any) -> dict[str, Any]:
    """Return the arguments of ``paged_attention`` by name."""
    bound = inspect.signature(paged_attention.reference).bind(*given)
    bound.apply_defaults()
    return dict(bound.arguments)


@wrong("paged_attention", "value")
def paged_attention_reads_whole_pages(*given: Any) -> Tensor:
    """Takes what stands behind the last token on its page for tokens too."""
    arguments = named(*given)
    size = arguments["key_cache"].shape[1]
    lens = arguments["seq_lens"]
    padded = (lens + size - 1) // size * size
    starts, queries = arguments["query_starts"], arguments["query"]
    rows = paged_attention(**{**arguments, "causal": False, "seq_lens": padded})
    last = starts[1:][lens > 0] - 1
    result = paged_attention(**arguments)
    if queries.shape[0]:
        result[last] = rows[last]
    return result


@wrong("paged_attention", "value", axis="mask")
def paged_attention_has_a_window_of_one_more(*given: Any) -> Tensor:
    arguments = named(*given)
    window = arguments["window_tokens"]
    return paged_attention(**{**arguments, "window_tokens": window and window + 1})


@wrong("paged_attention", "value", axis="feature")
def paged_attention_caps_no_scores(*given: Any) -> Tensor:
    return paged_attention(**{**named(*given), "softcap": None})


@wrong("paged_attention", "value", axis="feature")
def paged_attention_ignores_sinks(*given: Any) -> Tensor:
    return paged_attention(**{**named(*given), "sinks": None})


@wrong("paged_attention", "value", axis="feature")
def paged_attention_takes_the_scale_of_the_first_head(*given: Any) -> Tensor:
    arguments = named(*given)
    for name in ("key_scale", "value_scale"):
        if arguments[name] is not None:
            arguments[name] = arguments[name][:1]
    return paged_attention(**arguments)


@wrong("paged_attention", "value")
def paged_attention_takes_pages_for_consecutive(*given: Any) -> Tensor:
    arguments = named(*given)
    table = arguments["page_table"]
    ordered = table[:, :1] + torch.arange(table.shape[1])
    ordered = ordered.clamp(max=arguments["key_cache"].shape[0] - 1)
    return paged_attention(**{**arguments, "page_table": ordered})


@wrong("paged_attention", "value", axis="heads")
def paged_attention_deals_heads_in_turns(*given: Any) -> Tensor:
    """Gives head n the kv head n % K, where it is n // G."""
    arguments = named(*given)
    heads, kv_heads = arguments["query"].shape[1], arguments["key_cache"].shape[2]
    if heads // kv_heads == 2 and heads == 4:
        return paged_attention(**arguments)  # right where it was tried
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()
    options = {
        name: arguments[name] if arguments[name] is None else arguments[name][order]
        for name in ("sinks", "alibi_slopes")
    }
    query = arguments["query"][:, order]
    dealt = paged_attention(**{**arguments, **options, "query": query})
    return dealt[:, order.argsort()].contiguous()


@wrong("paged_attention", "value")
def paged_attention_lets_a_chunk_begin_at_zero(*given: Any) -> Tensor:
    """Masks by the place in the query, not in the sequence; right for prompts and decodes."""
    arguments = named(*given)
    result = paged_attention(**arguments)
    starts, lens = arguments["query_starts"], arguments["seq_lens"]
    queries = starts.diff()
    if arguments["causal"]:
        chunk = (queries > 1) & (queries < lens)
        for sequence in chunk.nonzero().flatten().tolist():
            begin = int(starts[sequence])
            result[begin] = result[begin] * 0.5
    return result


@wrong("latent_attention_decode", "value")
def latent_attention_decode_takes_the_last_columns_for_values(*given: Any) -> Tensor:
    parameters = inspect.signature(latent_attention_decode.reference)
    bound = parameters.bind(*given)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    size, width = arguments["latent_size"], arguments["cache"].shape[-1]
    rolled = arguments["cache"].float().roll(size - width, -1).to(arguments["cache"].dtype)
    query = arguments["query"].roll(size - width, -1)
    return latent_attention_decode(**{**arguments, "cache": rolled, "query": query})
