"""The error for a checkpoint tensor that the model has no place for."""

from __future__ import annotations

import re

from interposer.errors import CheckpointError
from interposer_models._checkpoint.checkpoint import file_of

# Probable cause and next action, by a pattern of the tensor's name.
_CAUSES = {
    r"\.lora_(A|B|embedding)": (
        "an adapter was saved with the model",
        "merge it by PEFT's merge_and_unload() before saving, or give its folder as an adapter",
    ),
    r"^base_model\.model\.": (
        "the names are those of a model that PEFT wraps",
        "merge it by PEFT's merge_and_unload() and save the result",
    ),
    r"^(module|_orig_mod|_fsdp_wrapped_module)\.": (
        "the names are those of a model that a trainer or torch.compile wraps",
        "save the model inside of the wrapper: model.module or model._orig_mod",
    ),
    r"\.(qweight|qzeros|g_idx|scales|absmax|quant_map|SCB|weight_format|pre_quant_scale)$"
    r"|\.weight_(scale(_inv|_2)?|packed|shape|zero_point|global_scale|g_idx)$"
    r"|\.(input|activation)_(scale|zero_point|global_scale)$"
    r"|_(blocks|scales)$|\.quant_state\.": (
        "it belongs to a quantized layer, but the settings of the checkpoint state no such "
        "quantization of that layer",
        "restore the quantization_config that the checkpoint was published with",
    ),
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.": (
        "it belongs to an encoder of images or sounds, and the architecture is one of texts alone",
        "restore the architectures of the published config.json",
    ),
    r"(^|\.)mtp[._]": (
        "it predicts further tokens, and the family reads no such layers",
        "remove the tensors that the name begins",
    ),
}
_MEND = "check that architectures and num_hidden_layers of config.json are those of the weights"


def unplaced(stored: str, name: str, path: object) -> CheckpointError:
    """Return the error for a tensor without a place, with file and probable cause.

    Args:
        stored: the tensor's name in the checkpoint.
        name: the tensor's name in the model.
        path: path of the checkpoint.
    """
    # The name in the model helps if the family renames tensors.
    alias = "" if stored == name else f" (here {name!r})"
    reason = f"holds the tensor {stored!r}{alias}, which the model has no place for"
    for pattern, (cause, mend) in _CAUSES.items():
        if re.search(pattern, stored):
            return CheckpointError(file_of(stored, path), f"{reason}: {cause}", mend)
    return CheckpointError(file_of(stored, path), reason, _MEND)
