"""Optional keyword arguments that modules of transformers pass to the attention function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# These select the model's outputs, or repeat facts of the mask for other attention functions.
_IGNORED = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    }
)
_SUPPORTED = frozenset({"softcap", "s_aux"})


def unknown_option(options: Mapping[str, Any]) -> str:
    """Return the first keyword that may change the result and that no kernel supports, or ""."""
    for name in options:
        if name in _IGNORED or name in _SUPPORTED:
            continue
        if options[name] is not None and options[name] is not False:
            return name
    return ""
