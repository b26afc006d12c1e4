"""The memory that adapters take, told before they have it.

Dimensions: A adapters, E experts, R the largest rank of a layer, P parts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from interposer_models._adapters.files import Adapter
from interposer_models._adapters.places import Adaptable
from interposer_ops.layers.experts import Experts

# The present matrices are held until those that take their place are there.
_SETS = 2
# Kernels of a host hold matrices in an order of their own, beside those that the next change reads.
_HOST_FORMS = 2


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The memory of adapters that a model is loaded with; its text is for people.

    Attributes:
        num_bytes: that they take while another version takes the place of one, which is the most.
        count: A.
    """

    num_bytes: int = 0
    count: int = 0

    @classmethod
    def of(cls, adapters: Collection[Adapter], itemsize: int, on_host: bool) -> AdapterRoom:
        """Return the room of these adapters together.

        Args:
            itemsize: bytes of a number of the model.
        """
        layers: dict[Adaptable, None] = {
            place.layer: None for adapter in adapters for place in adapter
        }
        numbers = sum(_matrices(layer, adapters) for layer in layers)
        forms = _HOST_FORMS if on_host else 1
        if on_host:
            # Experts in parts read plain matrices, which are held once more there.
            numbers += sum(_experts(layer) for layer in layers if isinstance(layer, Experts))
        return cls(_SETS * forms * itemsize * numbers, len(adapters))

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 2**20:.1f} MiB are kept for {self.count} adapters, as much as they "
            "take while one is replaced"
        )


def _matrices(layer: Adaptable, adapters: Collection[Adapter]) -> int:
    """Return the numbers in the matrices of all adapters for a layer, filled up to one rank."""
    members = [
        (place, matrices)
        for adapter in adapters
        for place, matrices in adapter.items()
        if place.layer is layer
    ]
    rank = max(matrices.rank for _, matrices in members)
    places = {place: None for place, _ in members}
    each = sum((place.experts or 1) * rank * (place.inputs + place.outputs) for place in places)
    return len(adapters) * each


def _experts(layer: Experts) -> int:
    spec = layer.spec
    return 3 * spec.num_experts * spec.hidden_size * spec.intermediate_size
