"""Everything that is installed, through the suite of the core: quickly here, in full when slow."""

from __future__ import annotations

from collections.abc import Container, Iterable
from importlib.metadata import entry_points
from random import Random
from typing import Literal, get_args, get_type_hints

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


def check(
    op: str,
    *,
    quick: bool,
    seed: int = 0,
    aspects: Container[str] = ASPECTS,
    without_dtype: str = "",
    gradients_every: int = 1,
) -> None:
    """Run the trials of an op; fail with the faults, named by their trials."""
    wrong, num_run, num_gradients = {}, 0, 0
    for trial in conformance(REGISTRY, DEVICE, op=op, quick=quick, seed=seed):
        if trial.aspect not in aspects or trial.request.dtype == without_dtype:
            continue
        if trial.aspect == "gradients":
            num_gradients += 1
            if (num_gradients - 1) % gradients_every:
                continue
        num_run += bool(trial.verdict) and not trial.not_run
        faults = [str(fault) for fault in trial.run()]
        if faults:
            wrong[str(trial)] = faults
    assert wrong == {}
    assert num_run


@pytest.mark.parametrize("op", OPS)
def test_references_and_kernels_conform(op: str) -> None:
    """Leave out what takes most of the time, and is in the slow test of every case.

    That is compiling, one of two 16-bit types, and three of four backward passes.
    """
    aspects = {aspect for aspect in ASPECTS if not aspect.startswith("compile")}
    check(op, quick=True, aspects=aspects, without_dtype="float16", gradients_every=4)


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


def run_all(trials: Iterable[Trial]) -> None:
    """Run the accepted trials; fail with the faults, named by their trials."""
    accepted = [trial for trial in trials if trial.verdict]
    assert accepted
    found = {str(trial): [str(fault) for fault in trial.run()] for trial in accepted}
    assert {trial: faults for trial, faults in found.items() if faults} == {}


def providers(kind: Literal["attention", "scheme"]) -> list[str]:
    """Return the distributions that have candidates of the kind which can run on this device."""
    names = REGISTRY.subjects(kind) if kind == "scheme" else [""]
    runs = {*REGISTRY.runs(DEVICE.platform), ""}
    return sorted(
        {
            candidate.provider
            for name in names
            for candidate in REGISTRY.candidates(kind, name)
            if getattr(candidate.record, "platform", "") in runs
        }
    )


# Trials are found while the test runs: their predicates take seconds, which each collection paid.
@pytest.mark.parametrize("provider", providers("attention"))
def test_attention_backends_conform(provider: str) -> None:
    run_all(attention_trials(REGISTRY, DEVICE, provider, 0, quick=True))


@pytest.mark.slow
@pytest.mark.parametrize("provider", providers("attention"))
def test_attention_backends_conform_on_every_specification(provider: str) -> None:
    run_all(attention_trials(REGISTRY, DEVICE, provider, 0))


@pytest.mark.parametrize("layer", REGISTRY.subjects("layer"))
def test_layers_conform(layer: str) -> None:
    """A third of the trials, which covers each candidate."""
    trials = list(layer_trials(REGISTRY, DEVICE, "", 0, layer))
    run_all(Random(0).sample(trials, -(-len(trials) // 3)))


@pytest.mark.slow
@pytest.mark.parametrize("layer", REGISTRY.subjects("layer"))
def test_layers_conform_on_every_case(layer: str) -> None:
    run_all(layer_trials(REGISTRY, DEVICE, "", 0, layer))


@pytest.mark.parametrize("provider", providers("scheme"))
def test_schemes_conform(provider: str) -> None:
    run_all(scheme_trials(REGISTRY, DEVICE, provider, 0))


@pytest.mark.process
@pytest.mark.parametrize("module", sorted(point.module for point in entry_points(group=GROUP)))
def test_a_plugin_module_is_light(module: str) -> None:
    assert check_lightness(module) == []
