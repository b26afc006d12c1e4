"""Errors state what failed, the alternatives and the next action, and keep their facts."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer._contract.verdict import Refusal
from interposer.errors import (
    CheckpointError,
    ConfigError,
    InterposerError,
    MissingMemberError,
    NoCandidateError,
    PlatformUnavailableError,
    PluginConflictError,
    PluginError,
    UnknownNameError,
    install_command,
    nearest_first,
)

REFUSALS = (
    Refusal("fast", "acme 1.2", "needs sm_80"),
    Refusal("slow", "acme 1.2", "is slow", "Traceback"),
)


def test_unknown_name_lists_the_known_nearest_first() -> None:
    error = UnknownNameError("op", "rms_nrom", ["linear", "rms_norm", "embedding"], "Look around.")
    assert (error.kind, error.name, error.hint) == ("op", "rms_nrom", "Look around.")
    assert error.known[0] == "rms_norm"
    assert str(error) == (
        "Unknown op 'rms_nrom'. Known, nearest first: 'rms_norm', 'embedding', 'linear'.\n"
        "Look around."
    )


def test_an_unknown_name_gets_three_suggestions_and_the_command_that_lists_all() -> None:
    known = [f"norm_{number}" for number in range(9)]
    error = UnknownNameError("op", "norm_x", known)
    assert error.known == known
    assert str(error) == (
        "Unknown op 'norm_x'. Known, nearest first: 'norm_0', 'norm_1', 'norm_2', and 6 more: "
        "`interposer ops` lists all."
    )
    assert str(UnknownNameError("field", "norm_x", known)).endswith("'norm_2', and 6 more.")


def test_unknown_name_without_any_known() -> None:
    assert str(UnknownNameError("op", "x", [])) == "Unknown op 'x'. There is no op."


@given(st.text(max_size=8), st.lists(st.text(max_size=8), max_size=8))
def test_nearest_first_is_a_permutation_that_does_not_depend_on_order(
    name: str, known: list[str]
) -> None:
    ordered = nearest_first(name, known)
    assert sorted(ordered) == sorted(set(known))
    assert ordered == nearest_first(name, reversed(known))
    if name in known:
        assert ordered[0].lower() == name.lower()


def test_plugin_error_names_plugin_distribution_and_mend() -> None:
    error = PluginError("norms", "acme", "it is broken", "mend it")
    assert str(error) == "Plugin 'norms' of acme: it is broken\nTry: mend it"
    assert (error.plugin, error.distribution) == ("norms", "acme")
    assert (error.reason, error.mend) == ("it is broken", "mend it")
    assert "Try" not in str(PluginError("norms", "acme", "it is broken"))


def test_no_candidate_lists_every_refusal_and_the_action() -> None:
    error = NoCandidateError("kernel for 'linear'", REFUSALS, "requantize")
    assert str(error) == (
        "No kernel for 'linear'.\n"
        "  fast (acme 1.2): needs sm_80\n"
        "  slow (acme 1.2): is slow\n"
        "Try: requantize"
    )
    assert (error.what, error.refusals, error.action) == (
        "kernel for 'linear'",
        REFUSALS,
        "requantize",
    )


def test_an_error_without_candidates_says_that_none_is_declared() -> None:
    assert str(NoCandidateError("scheme", [])) == "No scheme.\n  No installed plugin declares one."


def test_checkpoint_error_names_the_path() -> None:
    error = CheckpointError("models/x", "no config.json", "download it")
    assert str(error) == "models/x: no config.json\nTry: download it"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (UnknownNameError, ConfigError),
        (MissingMemberError, NotImplementedError),
        (PlatformUnavailableError, NoCandidateError),
        (PluginConflictError, PluginError),
    ],
)
def test_errors_can_be_caught_by_their_builtin_classes(
    kind: type[InterposerError], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, InterposerError)


@pytest.mark.parametrize(
    "error",
    [
        UnknownNameError("op", "a", ["b"], "hint"),
        PluginConflictError("norms", "acme", "claimed twice", "uninstall one"),
        PlatformUnavailableError("platform", REFUSALS, "install one"),
        CheckpointError("x", "y"),
        ConfigError("plain"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error: InterposerError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_only_packages_of_the_sdk_are_installed_from_wheels() -> None:
    place = "(`make wheels` builds dist; see docs/install.md)"
    for package, quoted in [
        ("interposer-cuda", "interposer-cuda"),
        ("interposer-tools[new]", "'interposer-tools[new]'"),
    ]:
        assert install_command(package) == f"pip install --find-links dist {quoted} {place}"
    assert install_command("acme", "--force-reinstall") == "pip install --force-reinstall acme"
