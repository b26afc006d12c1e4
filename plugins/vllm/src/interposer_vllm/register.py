"""The entry point of ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes."""

from __future__ import annotations

import logging

from interposer.errors import described, foreign_errors

__all__ = ["register"]


def register() -> None:
    """Take the first seams if this vLLM looks as expected; again, it does nothing.

    Those of layers are taken when a model is loaded.

    Nothing is raised. ``VLLM_PLUGINS`` without ``interposer`` keeps vLLM from calling it.
    """
    try:
        import vllm

        from interposer_vllm._seams import FIRST
        from interposer_vllm._taking import take_seams

        take_seams(FIRST, vllm.__version__)
    except foreign_errors() as error:
        logging.getLogger("vllm.interposer").warning(
            "interposer: nothing is taken over: %s", described(error)
        )
