"""Loading: layers are replaced before it, and a worker logs what was chosen after it.

All plugins of vLLM have registered by then, whatever their order: what another one replaced is
seen, and nobody finds a class taken that he wants to replace.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from interposer import Verdict
from interposer.errors import InterposerError
from interposer_vllm._report import Report
from interposer_vllm._seam import Member, Seam
from interposer_vllm._seams import attention, elementwise, experts, head, linear
from interposer_vllm._session import session
from interposer_vllm._taking import take_seams

__all__ = ["LAYERS", "SEAM", "take_layers"]

LAYERS: tuple[Seam, ...] = (
    linear.SEAM,
    head.SEAM,
    experts.SEAM,
    attention.SEAM,
    elementwise.SEAM,
)
"""Those that are taken before the first model is loaded."""

_LOADER = Member(
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
    "(self, vllm_config, model_config, prefix='')",
)
_log = logging.getLogger("vllm.interposer")


def take_layers() -> None:
    """Take the seams of layers; again, it does nothing."""
    import vllm

    take_seams(LAYERS, vllm.__version__)


def _take() -> Verdict:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    own = BaseModelLoader.load_model

    @functools.wraps(own)
    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        take_layers()
        model = own(self, vllm_config, model_config, prefix)
        _tell()
        return model

    BaseModelLoader.load_model = load_model
    return Verdict.accept()


def _tell() -> None:
    """Write the report of this worker, and log where it lies."""
    try:
        report = Report.of(session())
        path = report.write()
    except InterposerError as error:
        _log.warning("interposer: no report is written: %s", error)
        return
    _log.info(
        "interposer: %d layers run on kernels that were chosen here, %d stay vLLM's own. "
        "Why: interposer vllm-report %s",
        len(report.taken),
        len(report.kept),
        path,
    )


SEAM = Seam(name="loading", members=(_LOADER,), take=_take, stays="All layers", needs=("compiled",))
