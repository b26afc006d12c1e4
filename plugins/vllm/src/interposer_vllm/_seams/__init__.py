"""All seams, each in a module of its own with the name ``SEAM``. None imports vLLM by itself."""

from __future__ import annotations

from interposer_vllm._seam import Seam
from interposer_vllm._seams import attention, elementwise, experts, head, linear, report

__all__ = ["SEAMS"]

SEAMS: tuple[Seam, ...] = (
    linear.SEAM,
    head.SEAM,
    experts.SEAM,
    attention.SEAM,
    elementwise.SEAM,
    report.SEAM,
)
