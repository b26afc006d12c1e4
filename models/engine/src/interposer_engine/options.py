"""Command-line options for commands that load a model or generate text.

The options come from the fields of ``LoadOptions`` and ``SamplingParams``. This module imports no
torch, so that ``--help`` is fast.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_origin

import typer

from interposer_engine._load_options import CommandOption, LoadOptions
from interposer_engine._sampling_fields import CommandField
from interposer_engine._sampling_params import SamplingParams, marked_fields
from interposer_tools.options import Dtype, ExpertParallel, Quantization

__all__ = ["Values", "check_load_options", "load_options", "sampling_options", "takes"]

Values = dict[str, Any]
"""The values of a group of options, by name."""
Command = Callable[..., None]

_SHARED_WITH_EXPLAIN = {
    "dtype": Dtype,
    "quantization": Quantization,
    "expert_parallel": ExpertParallel,
}


def takes(**groups: Sequence[inspect.Parameter]) -> Callable[[Command], Command]:
    """Let a command accept groups of options, each passed as one argument of type ``Values``.

    Args:
        **groups: options by the name of the argument, which the options replace in the signature.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def grouped(**arguments: Any) -> None:
            for name, options in groups.items():
                arguments[name] = {option.name: arguments.pop(option.name) for option in options}
            command(**arguments)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += groups.get(
                parameter.name, [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            )
        grouped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        grouped.__annotations__ = {each.name: each.annotation for each in parameters}
        return grouped

    return decorate


def load_options(
    *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> list[inspect.Parameter]:
    """Return command-line options for arguments of ``load``, with the defaults of ``load``.

    Args:
        only: names of the arguments; None for all that commands can take.
        without: arguments that the command sets itself.
    """
    options = []
    for field in fields(LoadOptions):
        name, option = field.name, CommandOption.of(field.name)
        if name in without or (only is not None and name not in only):
            continue
        if name in _SHARED_WITH_EXPLAIN:
            options.append(_parameter(name, _SHARED_WITH_EXPLAIN[name], field.default))
        elif option is not None:
            kind: Any = option.kind if field.default is not None else option.kind | None
            names = () if option.flag is None else (option.flag,)
            info = typer.Option(*names, help=option.help, metavar=option.metavar, min=option.min)
            options.append(_parameter(name, Annotated[kind, info], field.default))
    return options


def check_load_options(arguments: Mapping[str, Any]) -> None:
    """Check arguments of ``load`` as far as that needs no model.

    Args:
        arguments: values by name, without the configuration.
    Raises: ConfigError: a size is no positive integer, a fraction is not between 0 and 1, or the
        settings of a prefix cache or of speculative decoding are invalid.
    """
    from interposer import Config

    LoadOptions(config=Config(), **arguments).check()


def sampling_options() -> list[inspect.Parameter]:
    """Return command-line options for fields of ``SamplingParams``; omitted options are None.

    ``SamplingParams`` checks the values.
    """
    descriptions = _descriptions(SamplingParams)
    options = []
    for name in marked_fields(CommandField):
        field = SamplingParams.model_fields[name]
        is_repeatable = get_origin(field.annotation) is tuple
        # Of ``X | None``, the option takes X; of ``tuple[str, ...]``, it takes a text at a time.
        kind: Any = list[str] if is_repeatable else field.annotation
        info = typer.Option(help=descriptions.get(name, ""))
        if is_repeatable:
            info = typer.Option(help=f"{descriptions.get(name, '')} Repeatable.", metavar="TEXT")
        options.append(_parameter(name, Annotated[kind | None, info], None))
    return options


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _descriptions(documented: type) -> dict[str, str]:
    """Return the descriptions of attributes in a class's docstring, by attribute name."""
    text = inspect.getdoc(documented) or ""
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}
