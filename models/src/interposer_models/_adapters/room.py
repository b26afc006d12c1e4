"""The memory that adapters need, computed before matrices are allocated.

Dimensions: A adapters, E experts, R the largest rank of a layer, P parts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from interposer_models._adapters.files import Adapter
from interposer_models._adapters.places import Adaptable
from interposer_ops.layers.experts import Experts

# The current matrices are freed after their replacements are complete.
_NUM_SETS = 2
# Kernels of a host use packed matrices, next to the plain ones that the next change reads.
_NUM_HOST_FORMS = 2


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The memory that is reserved for the adapters with which a model is loaded.

    Attributes:
        num_bytes: memory while one version replaces another, which is the maximum.
        count: A.
    """

    num_bytes: int = 0
    count: int = 0

    @classmethod
    def of(cls, adapters: Collection[Adapter], itemsize: int, on_host: bool) -> AdapterRoom:
        """Compute the memory of all adapters together.

        Args:
            itemsize: bytes of a number in the model's dtype.
            on_host: the model computes on the host.
        """
        layers: dict[Adaptable, None] = {
            place.layer: None for adapter in adapters for place in adapter
        }
        num_elements = sum(_matrices(layer, adapters) for layer in layers)
        forms = _NUM_HOST_FORMS if on_host else 1
        if on_host:
            # Layers of experts with adapters need their plain matrices next to the packed ones.
            num_elements += sum(_experts(layer) for layer in layers if isinstance(layer, Experts))
        return cls(_NUM_SETS * forms * itemsize * num_elements, len(adapters))

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 2**20:.1f} MiB are kept for {self.count} adapters, as much as they "
            "take while one is replaced"
        )


def _matrices(layer: Adaptable, adapters: Collection[Adapter]) -> int:
    """Return the number of elements of all adapters' matrices for a layer, padded to one rank."""
    members = [
        (place, matrices)
        for adapter in adapters
        for place, matrices in adapter.items()
        if place.layer is layer
    ]
    rank = max(matrices.rank for _, matrices in members)
    # All adapters have matrices for each place: missing ones are zeros.
    places = {place: None for place, _ in members}
    per_adapter = sum(
        (place.experts or 1) * rank * (place.inputs + place.outputs) for place in places
    )
    return len(adapters) * per_adapter


def _experts(layer: Experts) -> int:
    spec = layer.spec
    return 3 * spec.num_experts * spec.hidden_size * spec.intermediate_size
