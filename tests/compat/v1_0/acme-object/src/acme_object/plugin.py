"""An object whose methods are the hooks; the entry point names it by attribute."""

from __future__ import annotations

from collections.abc import Iterator

from interposer import Choice, Kernel, hookimpl


class Acme:
    """Provides one kernel and counts choices."""

    INTERPOSER_API = ">=1.0,<2"

    def __init__(self) -> None:
        self.num_choices = 0

    @hookimpl
    def interposer_records(self) -> Iterator[Kernel]:
        """Yield a kernel that wins by its score."""
        yield Kernel("embedding", "embedding_acme", "acme_object.kernels:embedding", score=1000.0)

    @hookimpl
    def interposer_selected(self, choice: Choice) -> None:
        """Count it."""
        self.num_choices += 1


acme = Acme()
