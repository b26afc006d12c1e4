"""Last step of a platform's probe: whether torch can use a GPU that the process sees."""

from __future__ import annotations

from collections.abc import Sequence

from interposer import Verdict

__all__ = ["judge_gpus", "refuse_hidden"]


def refuse_hidden(total: int, note: str, runtime: str = "") -> Verdict:
    """Refuse a machine whose GPUs are all hidden from this process.

    Args:
        total: number of GPUs of the machine.
        note: how they are hidden.
        runtime: software that hides them, if the driver shows them.
    """
    gpus_text = f"{total} GPUs" if total > 1 else "1 GPU"
    return Verdict.refuse(
        f"none of {gpus_text} is visible{f' to {runtime}' if runtime else ''}: {note}"
    )


def judge_gpus(counts: str, gpus: Sequence[tuple[str, Verdict]], *notes: str) -> Verdict:
    """Accept if torch has kernels for at least one visible GPU, and describe the GPUs.

    Args:
        counts: how many GPUs are visible.
        gpus: name of each visible GPU, and whether torch has kernels for the GPU.
        notes: further parts of the description; empty ones are left out.
    """
    if not any(verdict for _, verdict in gpus):
        return gpus[0][1]
    names = ", ".join(sorted({name for name, _ in gpus}))
    return Verdict.accept("; ".join(filter(None, [f"{counts}: {names}", *notes])))
