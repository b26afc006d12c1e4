"""The entry point in ``vllm.general_plugins``: vLLM calls ``register`` in each process."""

from __future__ import annotations

import logging

from interposer.errors import described, foreign_errors

__all__ = ["register"]


def register() -> None:
    """Apply the early patches if this version of vLLM is supported; repeated calls do nothing.

    The patches of layers are applied when vLLM loads a model. No error is raised: a failure is
    logged and vLLM runs unchanged. Set ``VLLM_PLUGINS`` without ``interposer`` to turn this off.
    """
    try:
        import vllm

        from interposer_vllm._patches import EARLY_PATCHES
        from interposer_vllm._patching import apply_patches

        apply_patches(EARLY_PATCHES, vllm.__version__)
    except foreign_errors() as error:
        logging.getLogger("vllm.interposer").warning(
            "interposer: nothing is taken over: %s", described(error)
        )
