"""Mistral: Llama with sliding-window attention.

Source: arXiv:2310.06825.
"""

from __future__ import annotations

from interposer_models._families.llama import Llama


class Mistral(Llama):
    """Mistral; later releases have no ``sliding_window`` and use full attention."""

    def slides(self, index: int) -> bool:
        """Return True: every layer has the window."""
        return True
