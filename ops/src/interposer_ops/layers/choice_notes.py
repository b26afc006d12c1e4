"""Notes of layers at the choices of the kernels that they call."""

from __future__ import annotations

from dataclasses import replace

from interposer import Site

__all__ = ["annotate_place"]


def annotate_place(
    site: Site, note: str, *, op: str = "", idle: bool = False, waits: bool = False
) -> None:
    """Add a note to the choices of kernels that were made last for the place of ``site``.

    Args:
        op: its alone; empty for all.
        idle: its kernel is never called.
        waits: the layer there reads results on the host between its calls.
    """
    choices = site.resolver.choices
    for key, (choice, prefixes) in choices.items():
        request = choice.request
        is_meant = request.kind == "kernel" and op in ("", request.name)
        if is_meant and prefixes[-1:] == [site.prefix] and note not in choice.notes:
            told = replace(
                choice,
                notes=(*choice.notes, note),
                idle=idle or choice.idle,
                waits=waits or choice.waits,
            )
            choices[key] = (told, prefixes)
