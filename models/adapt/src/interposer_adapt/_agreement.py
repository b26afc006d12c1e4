"""Bounds on the rounding error by which a kernel's result may differ from the module's.

``check_agreement`` bounds the results of one op. ``error_bound`` bounds the logits of a decoder,
from the measured effect of one rounding.

Dimensions: T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Case, Tolerance, Verdict

MAGNITUDES = (1e-2, 1.0, 50.0)
_SEED = 1


def random_signs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers of 1 and -1, the same at every call.

    Every dtype represents 1 and -1 exactly. The dot product of a row of weights with signs is at
    most the row's sum of magnitudes.
    """
    generator = torch.Generator().manual_seed(_SEED)
    bits = torch.randint(0, 2, shape, generator=generator)
    return (2 * bits - 1).to(dtype).to(device)


def random_normals(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random normal numbers with the mean 1/3, the same at every call."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) + 1 / 3
    return numbers.to(dtype).to(device)


def check_agreement(
    tolerance: Tolerance,
    expected: Tensor,
    actual: Tensor,
    reduction: int,
    magnitude: float,
    rounded: float = 0.0,
) -> Verdict:
    """Refuse results that differ from ``expected`` by more than twice the op's tolerance.

    Each result may deviate from the exact one by the op's tolerance.

    Args:
        reduction, magnitude, rounded: the fields of a ``Case`` with these names.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Verdict.refuse(
            f"returns {tuple(actual.shape)} {actual.dtype}, "
            f"the module {tuple(expected.shape)} {expected.dtype}"
        )
    reference = expected.double()
    distance = (actual.double() - reference).abs()
    case = Case("", {}, reduction=reduction, magnitude=magnitude, rounded=rounded)
    max_distance = 2 * tolerance.bound(reference, expected.dtype, case)
    if bool((distance <= max_distance).all()):
        return Verdict.accept()
    excess = float(
        (distance / max_distance.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num().max()
    )
    return Verdict.refuse(f"its error is {excess:.1f} times as large as rounding explains")


def check_calls(
    tolerance: Tolerance,
    original: Callable[[Tensor], Tensor],
    replacement: Callable[[Tensor], Tensor],
    inputs: Tensor,
    reduction: int,
    magnitude: float,
    rounded: float = 0.0,
) -> Verdict:
    """Refuse a replacement forward that fails, or disagrees with the original on ``inputs``."""
    with torch.no_grad():
        expected = original(inputs)
        actual = replacement(inputs)
    if not isinstance(expected, Tensor):
        return Verdict.refuse(f"returns a tensor, the module a {type(expected).__name__}")
    return check_agreement(tolerance, expected, actual, reduction, magnitude, rounded)


# Roundings in one block: projections, norms, the gate's multiplication, attention, residual sums.
ROUNDINGS = 10


def error_bound(model: nn.Module, expected: Tensor, perturbed: Tensor, num_layers: int) -> float:
    """Return the largest relative distance from ``expected`` that rounding explains.

    Each block has ``ROUNDINGS`` independent roundings, in either run. The bound is twice the root
    of the sum of squares.

    Args:
        perturbed: the result of ``perturbed_logits``.
        num_layers: the number of attending layers, if more than the model's blocks.
    """
    one_rounding = max(distance(perturbed, expected), torch.finfo(expected.dtype).eps / 2)
    return 2 * math.sqrt(2 * ROUNDINGS * max(num_layers, num_blocks(model))) * one_rounding


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of ``actual - expected``, relative to the norm of ``expected``."""
    reference = expected.double()
    norm = max(float(reference.norm()), torch.finfo(torch.float64).tiny)
    return float((actual.double() - reference).norm()) / norm


def plain_logits(model: nn.Module, prompt: list[int], device: str) -> Tensor:
    """Return the logits ``[T, V]`` of the model, computed without a KV cache."""
    ids = torch.tensor([prompt], device=device)
    out = model(input_ids=ids, use_cache=False, return_dict=True)
    return logits_of(out)


def logits_of(out: Any) -> Tensor:
    """Return the logits ``[T, V]`` of one sequence; without an LM head, the hidden states."""
    logits: Tensor = out.last_hidden_state if getattr(out, "logits", None) is None else out.logits
    return logits[0]


def perturbed_logits(model: nn.Module, prompt: list[int], device: str) -> Tensor:
    """Return the logits ``[T, V]`` after one additional rounding of the embeddings."""
    with perturbed_embeddings(model):
        return plain_logits(model, prompt, device)


@contextmanager
def perturbed_embeddings(model: nn.Module) -> Iterator[None]:
    """Round the token embeddings of a model once more within a ``with`` block."""
    holder: Any = model

    def perturb(_: nn.Module, __: object, out: Tensor) -> Tensor:
        return perturb_once(out)

    hook = holder.get_input_embeddings().register_forward_hook(perturb)
    try:
        yield
    finally:
        hook.remove()


def perturb_once(x: Tensor) -> Tensor:
    """Return ``x`` with half of its elements moved to an adjacent float, as one rounding may do."""
    change = random_signs(tuple(x.shape), x.dtype, x.device) * (torch.finfo(x.dtype).eps / 2)
    # A whole step to the next number: half a step would be rounded away.
    return torch.where(change > 0, x * (1 + 2 * change), x)


def num_blocks(model: nn.Module) -> int:
    """Return the number of decoder blocks: the length of the model's longest ModuleList."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return max((len(modules) for modules in lists), default=1)
