"""Mistral: Llama, each token of which sees a window of those before it.

Source: arXiv:2310.06825.
"""

from __future__ import annotations

from interposer_models._families.llama import Llama


class Mistral(Llama):
    """Mistral; later releases have no ``sliding_window``, and see everything."""

    def slides(self, index: int) -> bool:
        """Say that every layer has the window."""
        return True
