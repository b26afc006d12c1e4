"""Choice of the model family for a checkpoint, with the error if there is none."""

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
)
from interposer.records import ModelEntry
from interposer_models._decoder.field_error import UNKNOWN_MEND


def choose_family(resolver: Resolver, config: Mapping[str, Any], source: object) -> ModelFamily:
    """Return what the family for a checkpoint makes of its config.json.

    Args:
        source: of ``config``, which errors name.
    Raises:
        CheckpointError: no architecture is named, or the family does not take what is stated.
        UnsupportedModelError: no installed family is for any of the architectures.
        NoCandidateError: all families for it were refused.
    """
    named, known = config.get("architectures"), resolver.registry.subjects("model")
    if not isinstance(named, list) or not named:
        reason = "the field 'architectures' is missing, so the model is unknown"
        raise CheckpointError(source, reason)
    architecture = str(next((name for name in named if name in known), named[0]))
    try:
        family = resolver.choose_model(architecture, config, source)
    except UnknownNameError as error:
        if error.kind != "architecture":
            raise
        listed = ", ".join(error.known) or "none"
        raise UnsupportedModelError(
            source,
            f"architecture {architecture!r} is not supported; supported are {listed}",
            "interposer_models.load or `interposer run`, which adapt the model of transformers, "
            f"or a plugin with a family for it{error.hint and f'. {error.hint}'}",
        ) from None
    _note_unread(resolver, config)
    return family


def checked_model(model: object) -> CausalModel:
    """Return what a family built, or raise TypeError where that is no model."""
    if not isinstance(model, CausalModel):
        raise TypeError(f"{model!r:.100} is not a CausalModel")
    return model


@contextmanager
def blamed_on_family(resolver: Resolver, member: str) -> Iterator[None]:
    """Raise PluginError for what the chosen family's own code raises within a ``with`` block."""
    try:
        yield
    except InterposerError:
        raise
    except foreign_errors() as error:
        _, choice = _choice_of(resolver)
        chosen = choice.chosen
        rule = f"{{{choice.request.name!r}: Rule(forbid=[{chosen.name!r}])}}"
        raise PluginError(
            chosen.name,
            chosen.origin,
            f"its model family failed in {member}: {described(error)}",
            f"mend it, or take another: Config(models={rule})",
        ) from error


@contextmanager
def located(config: Mapping[str, Any], source: object) -> Iterator[None]:
    """Add file and field to an UnknownNameError within a ``with`` block, if a field has the name.

    Raises: UnknownNameError: as within the block.
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
    """Note the fields that say something to other families, but not to the chosen one."""
    key, choice = _choice_of(resolver)
    own = getattr(choice.chosen.record, "reads", ())
    others = {name for _, entry in resolver.registry.records(ModelEntry) for name in entry.reads}
    unread = sorted({name for name, value in config.items() if value} & others - {*own})
    if own and unread:
        stated = ", ".join(unread)
        note = f"config.json states {stated}, which other families read and this one does not"
        resolver.annotate(key, note)


def _choice_of(resolver: Resolver) -> tuple[tuple[object, ...], Choice]:
    """Return the choice of the family, and its key."""
    choices = ((key, choice) for key, (choice, _) in resolver.choices.items())
    return next((key, choice) for key, choice in choices if choice.request.kind == "model")
