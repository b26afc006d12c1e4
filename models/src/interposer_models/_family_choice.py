"""Choice of the model family for a checkpoint, and reporting of errors in a family's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from interposer import CausalModel, Choice, ModelFamily, Resolver
from interposer.errors import (
    CheckpointError,
    InterposerError,
    PluginError,
    UnknownNameError,
    UnsupportedModelError,
    described,
    foreign_errors,
    near_names,
)
from interposer.records import ModelEntry
from interposer_models._decoder.settings import UNKNOWN_MEND


class UnknownDecoderError(UnsupportedModelError):
    """The decoder that config.json nests is of no family, but a loader may run the whole model."""


def choose_family(resolver: Resolver, config: Mapping[str, Any], source: object) -> ModelFamily:
    """Select the model family for a checkpoint, and parse config.json into its settings.

    Args:
        source: where ``config`` comes from, for error messages.
    Raises:
        CheckpointError: no architecture is named, or the family refuses a field.
        UnsupportedModelError: no installed family is for any of the architectures.
        NoCandidateError: all families for the architecture were refused.
    """
    architectures, supported = config.get("architectures"), resolver.registry.subjects("model")
    if not isinstance(architectures, list) or not architectures:
        reason = "the field 'architectures' is missing, so the model is unknown"
        raise CheckpointError(source, reason)
    architecture = str(
        # The first supported one; else the first one, for the error text.
        next((name for name in architectures if name in supported), architectures[0])
    )
    try:
        family = resolver.choose_model(architecture, config, source)
    except UnknownNameError as error:
        # Another unknown name, for example one of the user's rules.
        if error.kind != "architecture":
            raise
        near = near_names(architecture, error.known)
        raise UnsupportedModelError(
            source,
            f"architecture {architecture!r} is not supported; similar ones are {near}: "
            "`interposer explain` lists all",
            "interposer_engine.load or `interposer run`, which adapt the model of transformers, "
            f"or a plugin with a family for it{error.hint and f'. {error.hint}'}",
        ) from None
    _note_unread(resolver, config)
    return family


def checked_model(model: object) -> CausalModel:
    """Return the model that a family built, after checking that it is a ``CausalModel``."""
    if not isinstance(model, CausalModel):
        raise TypeError(f"{model!r:.100} is not a CausalModel")
    return model


@contextmanager
def family_errors(resolver: Resolver, member: str) -> Iterator[None]:
    """Convert errors in the selected family's code to PluginError, within a ``with`` block."""
    try:
        yield
    except InterposerError:
        raise
    except foreign_errors() as error:
        _, choice = _choice_of(resolver)
        chosen = choice.chosen
        # A rule that the user can copy to forbid the failing family.
        rule = f"{{{choice.request.name!r}: Rule(forbid=[{chosen.name!r}])}}"
        raise PluginError(
            chosen.name,
            chosen.origin,
            f"its model family failed in {member}: {described(error)}",
            f"correct it, or use another: Config(models={rule})",
        ) from error


@contextmanager
def with_location(config: Mapping[str, Any], source: object) -> Iterator[None]:
    """Add file and field to an UnknownNameError within a ``with`` block, if a field names it.

    Raises: UnknownNameError: the same error, with the location.
    """
    try:
        yield
    except UnknownNameError as error:
        field = next((name for name, value in config.items() if value == error.name), None)
        if error.where or field is None:
            raise
        where, hint = f"in {field} of {source}", error.hint or UNKNOWN_MEND
        raise UnknownNameError(error.kind, error.name, error.known, hint, where) from error


def _note_unread(resolver: Resolver, config: Mapping[str, Any]) -> None:
    """Note config fields that the selected family does not read, but that other families do."""
    key, choice = _choice_of(resolver)
    family_fields = getattr(choice.chosen.record, "reads", ())
    all_fields = {
        name for _, entry in resolver.registry.records(ModelEntry) for name in entry.reads
    }
    # Fields with a false or empty value change nothing.
    unread = sorted(
        {name for name, value in config.items() if value} & all_fields - {*family_fields}
    )
    if family_fields and unread:
        unread_names = ", ".join(unread)
        note = f"config.json states {unread_names}, which other families read and this one does not"
        resolver.annotate(key, note)


def _choice_of(resolver: Resolver) -> tuple[tuple[object, ...], Choice]:
    """Return the key and the choice of the selected model family."""
    choices = ((key, choice) for key, (choice, _) in resolver.choices.items())
    return next((key, choice) for key, choice in choices if choice.request.kind == "model")
