"""Patch of model loading: patches vLLM's layer classes before, writes a report after loading.

By then all plugins of vLLM have registered, in any order. So the patches see the classes that other
plugins have replaced, and no other plugin finds a class already replaced by interposer.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from interposer import Verdict
from interposer.errors import InterposerError
from interposer.tooling import HostMember
from interposer_vllm._patch import Patch
from interposer_vllm._patches import attention, elementwise, experts, head, linear
from interposer_vllm._patching import apply_patches
from interposer_vllm._report import Report
from interposer_vllm._session import session

__all__ = ["LAYER_PATCHES", "PATCH", "patch_layers"]

LAYER_PATCHES: tuple[Patch, ...] = (
    linear.PATCH,
    head.PATCH,
    experts.PATCH,
    attention.PATCH,
    elementwise.PATCH,
)
"""Patches that are applied before the first model is loaded."""

_LOADER = HostMember(
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
    "(self, vllm_config, model_config, prefix='')",
)
_log = logging.getLogger("vllm.interposer")


def patch_layers() -> None:
    """Apply the patches of vLLM's layer classes; repeated calls do nothing."""
    import vllm

    apply_patches(LAYER_PATCHES, vllm.__version__)


def _apply() -> Verdict:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model

    @functools.wraps(original)
    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        patch_layers()
        model = original(self, vllm_config, model_config, prefix)
        _report_choices()
        return model

    BaseModelLoader.load_model = load_model
    return Verdict.accept()


def _report_choices() -> None:
    """Write the report of this worker, and log the path."""
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


PATCH = Patch(
    name="loading", members=(_LOADER,), apply=_apply, scope="All layers", needs=("compiled",)
)
