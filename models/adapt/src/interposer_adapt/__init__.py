"""Run the modules of a transformers model on the kernels that fit this machine.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from interposer.tooling import lazy_attributes
except ImportError as error:
    import interposer

    raise ImportError(
        f"{error}: 'interposer' is imported from {interposer.__file__}. "
        "Try: rename, remove or take off PYTHONPATH what stands in place of interposer"
    ) from error

if TYPE_CHECKING:
    from interposer_adapt._adaptation import Place
    from interposer_adapt._api import Adapted, adapt
    from interposer_adapt._encoder import Encoder, load_encoder
    from interposer_adapt._language_model import language_model

__all__ = ["Adapted", "Encoder", "Place", "adapt", "language_model", "load_encoder"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_adapt._adaptation": "Place",
        "interposer_adapt._api": "Adapted adapt",
        "interposer_adapt._encoder": "Encoder load_encoder",
        "interposer_adapt._language_model": "language_model",
    },
)


def __dir__() -> list[str]:
    return __all__
