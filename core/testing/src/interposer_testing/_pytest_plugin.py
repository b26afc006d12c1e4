"""The pytest plugin: ``@pytest.mark.conformance("acme-kernels")`` generates conformance tests.

pytest imports this module in every project of an environment. So slow modules are imported only
when a test uses the marker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from interposer_testing._trials.trial_group import TrialGroup

_MARKER = (
    "conformance(distribution, op='', quick=True, seed=0): test every record of a distribution "
    "against the reference of its op; the test takes `trial` and calls `trial.verify()`"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the pytest options of conformance tests."""
    group = parser.getgroup("conformance", "conformance of interposer plugins")
    group.addoption(
        "--conformance-full",
        action="store_true",
        help="run all cases of each op; overrides quick=",
    )
    group.addoption("--conformance-platform", default="", metavar="NAME", help="platform to run on")
    group.addoption(
        "--conformance-seed",
        type=int,
        metavar="N",
        help="random seed of the cases; overrides seed=",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the pytest marker ``conformance``."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one test per candidate, aspect and dtype from a marked test."""
    marker = metafunc.definition.get_closest_marker("conformance")
    if marker is None:
        return
    name = metafunc.definition.nodeid
    if "trial" not in metafunc.fixturenames:
        raise pytest.Collector.CollectError(
            f"{name} is marked with conformance, but has no argument `trial`. "
            f"Try: def {metafunc.function.__name__}(trial): trial.verify()"
        )
    groups = _groups(metafunc.config, marker)
    metafunc.parametrize("trial", groups, ids=[*map(str, groups)])


def _groups(config: pytest.Config, marker: pytest.Mark) -> list[TrialGroup]:
    from interposer.errors import InterposerError
    from interposer_testing._trials.trial_group import trial_groups

    keywords = dict(marker.kwargs)
    if config.getoption("conformance_full"):
        keywords["quick"] = False
    if config.getoption("conformance_seed") is not None:
        keywords["seed"] = config.getoption("conformance_seed")
    platform = config.getoption("conformance_platform")
    try:
        groups = trial_groups(*marker.args, **keywords, platform=platform)
    except (InterposerError, TypeError) as error:
        raise pytest.Collector.CollectError(f"{marker.name} of {marker.args}: {error}") from error
    if not groups:
        raise pytest.Collector.CollectError(
            f"conformance: {marker.args[0]} declares nothing that can be verified"
        )
    return groups
