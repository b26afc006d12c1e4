"""HTTP server for a model, with OpenAI's endpoints.

Every name is imported on first use, so that the command prints help without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_serve._app import application
    from interposer_serve._limits import ConnectionLimits, Limits
    from interposer_serve._model_source import ModelSource

__all__ = ["ConnectionLimits", "Limits", "ModelSource", "application"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_serve._app": "application",
        "interposer_serve._limits": "ConnectionLimits Limits",
        "interposer_serve._model_source": "ModelSource",
    },
)


def __dir__() -> list[str]:
    return __all__
