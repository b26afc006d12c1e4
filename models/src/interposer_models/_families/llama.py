"""Llama: pre-norm RMSNorm, rotary embedding, grouped-query attention, a gated SiLU MLP.

Source: arXiv:2302.13971; grouped queries arXiv:2307.09288; long contexts arXiv:2407.21783.
"""

from __future__ import annotations

from interposer_models._decoder.family import DecoderFamily


class Llama(DecoderFamily):
    """Llama 1 to 3, and every model that is stored in the same format."""
