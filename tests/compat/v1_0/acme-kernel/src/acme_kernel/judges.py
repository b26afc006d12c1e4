"""What cannot be declared."""

from __future__ import annotations

from interposer import Request, Verdict


def judge_norm(request: Request) -> Verdict:
    """Accept rows of an even size."""
    size = request.dims["hidden_size"]
    if int(size) % 2:
        return Verdict.refuse(f"hidden_size {size} is odd")
    return Verdict.accept()
