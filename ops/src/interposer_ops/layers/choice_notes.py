"""Notes that layers add to the recorded choices of their kernels."""

from __future__ import annotations

from dataclasses import replace

from interposer import Site

__all__ = ["annotate_place"]


def annotate_place(
    site: Site, note: str, *, op: str = "", idle: bool = False, waits: bool = False
) -> None:
    """Add a note to the latest kernel choices of the layer at ``site``.

    Args:
        op: annotate only the choice for this op; empty: all ops of the layer.
        idle: the chosen kernel is never called.
        waits: the layer reads results on the host between calls of the kernel.
    """
    # Values are (choice, prefixes that share the choice), in the order of requests.
    choices = site.resolver.choices
    for key, (choice, prefixes) in choices.items():
        request = choice.request
        is_meant = request.kind == "kernel" and op in ("", request.name)
        if is_meant and prefixes[-1:] == [site.prefix] and note not in choice.notes:
            annotated = replace(
                choice,
                notes=(*choice.notes, note),
                idle=idle or choice.idle,
                waits=waits or choice.waits,
            )
            choices[key] = (annotated, prefixes)
