"""Memory that the weights of a model need, and memory of the device, before loading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer import Config, place
from interposer.errors import UnsupportedModelError
from interposer_engine._checkpoint.opening import open_checkpoint
from interposer_engine._load_options import policy_in_force
from interposer_engine._planning import plan


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Size of a model's weights, and the memory of the device that would hold them.

    Attributes:
        weight_bytes: Size of the weights in memory; of the files, if only another loader can read
            the checkpoint. The size of weights that are quantized or packed is an estimate.
        free_bytes: Free memory of the device, including what the system can free at any time.
        total_bytes: All memory of the device.
        device: Name of the device for torch.
    """

    weight_bytes: int
    free_bytes: int
    total_bytes: int
    device: str

    @classmethod
    def of(cls, path: str | Path, *, config: Config | None = None, **options: Any) -> MemoryNeed:
        """Compute the need of a checkpoint without reading its weights.

        Args:
            path: As for ``load``.
            config: As for ``load``.
            options: The arguments ``dtype`` and ``quantization`` of ``load``; others are ignored.
        Raises: errors of ``plan``.
        """
        effective = policy_in_force(config, None)
        placement = place(effective)
        chosen = {name: options[name] for name in ("dtype", "quantization") if name in options}
        try:
            planned = plan(path, config=effective, placement=placement, offload=False, **chosen)
            num_bytes = sum(parameter.nbytes for parameter in planned.model.parameters())
        except UnsupportedModelError:
            checkpoint, _ = open_checkpoint(path, effective)
            num_bytes = checkpoint.num_bytes
        device = placement.device.torch_device
        memory = placement.platform.memory(device)
        return cls(num_bytes, memory.free_bytes, memory.total_bytes, device)
