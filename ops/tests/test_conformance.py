"""Everything that is installed, through the suite of the core: quickly here, in full when slow."""

from __future__ import annotations

from collections.abc import Container, Iterable
from importlib.metadata import entry_points
from typing import get_args, get_type_hints

import pytest

from interposer import Config, Device, current_registry, place
from interposer.hookspecs import GROUP
from interposer_testing import (
    Trial,
    attention_trials,
    check_lightness,
    conformance,
    layer_trials,
    scheme_trials,
)

# How plugins are examined before they are asked is the core's own promise; here it costs a process
# for every condition and case.
REGISTRY, DEVICE = current_registry(Config(isolation="off")), place().device
OPS = sorted(REGISTRY.ops)
ASPECTS = get_args(get_type_hints(Trial)["aspect"])


@pytest.fixture
def accelerator() -> Device:
    """Return the device in force, if it is no processor."""
    if DEVICE.platform == "cpu":
        pytest.skip("needs an accelerator and the plugin of its platform")
    return DEVICE


def check(op: str, *, quick: bool, seed: int = 0, aspects: Container[str] = ASPECTS) -> None:
    """Run all trials of an op; fail with what is wrong, named by its trial."""
    wrong, num_run = {}, 0
    for trial in conformance(REGISTRY, DEVICE, op=op, quick=quick, seed=seed):
        if trial.aspect not in aspects:
            continue
        num_run += bool(trial.verdict) and not trial.not_run
        faults = [str(fault) for fault in trial.run()]
        if faults:
            wrong[str(trial)] = faults
    assert wrong == {}
    assert num_run


@pytest.mark.parametrize("op", OPS)
def test_references_and_kernels_conform(op: str) -> None:
    """All but compiling, which takes as long as all else and runs for every case below."""
    check(op, quick=True, aspects={a for a in ASPECTS if not a.startswith("compile")})


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_references_and_kernels_conform_on_every_case(op: str) -> None:
    check(op, quick=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("op", OPS)
def test_nothing_right_is_blamed_for_another_seed(op: str, seed: int) -> None:
    check(op, quick=True, seed=seed, aspects={"numerics"})  # no other has to do with numbers


@pytest.mark.gpu
@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("op", OPS)
def test_an_accelerator_conforms_on_every_case(op: str) -> None:
    check(op, quick=False)


def each(trials: Iterable[Trial]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trial", [t for t in trials if t.verdict], ids=str)


@each(attention_trials(REGISTRY, DEVICE, "", 0, quick=True))
def test_attention_backends_conform(trial: Trial) -> None:
    assert trial.run() == []


@pytest.mark.slow
@each(attention_trials(REGISTRY, DEVICE, "", 0))
def test_attention_backends_conform_on_every_specification(trial: Trial) -> None:
    assert trial.run() == []


@each([*layer_trials(REGISTRY, DEVICE, "", 0), *scheme_trials(REGISTRY, DEVICE, "", 0)])
def test_layers_and_schemes_conform(trial: Trial) -> None:
    assert trial.run() == []


@pytest.mark.process
@pytest.mark.parametrize("module", sorted(point.module for point in entry_points(group=GROUP)))
def test_a_plugin_module_is_light(module: str) -> None:
    assert check_lightness(module) == []
