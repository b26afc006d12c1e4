"""The subcommand ``interposer eval``, which runs lm-evaluation-harness on a model.

Heavy modules are imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from interposer_engine.options import Values, load_options, takes
from interposer_tools.options import Kernels, Locked, PlatformName, TensorParallel

_DEFAULTS = {option.name: option.default for option in load_options()}


@takes(options=load_options())
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, name on the hub such as Qwen/Qwen3-0.6B, or file of a plugin's "
            "format, such as GGUF.",
        ),
    ],
    lm_eval_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="--tasks TASK,... [LM_EVAL OPTIONS]",
            help="Options of `lm_eval run`, such as --limit 100 or --output_path results.",
        ),
    ] = None,
    *,
    options: Values,
    tensor_parallel: TensorParallel = 1,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A LoRA adapter, or its name on the hub.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Longest input in tokens; the default is the model's context."),
    ] = None,
) -> None:
    """Measure the quality of a model on tasks of EleutherAI's lm-evaluation-harness.

    Needs the extra interposer-engine[eval]. Options that are not listed here go to `lm_eval run`.
    """
    from interposer.errors import ConfigError

    if model.startswith("-"):
        raise ConfigError(
            f"{model} stands before the model. Try: interposer eval MODEL --tasks TASK,..."
        )
    # RULER's tasks read the tokenizer of ``pretrained``.
    arguments: dict[str, Any] = {"pretrained": model}
    settings = {
        **options,
        "tensor_parallel": tensor_parallel,
        "platform": platform,
        "kernel": kernel,
        "locked": locked,
        "adapter": adapter,
        "max_length": max_length,
    }
    defaults = {**_DEFAULTS, "tensor_parallel": 1, "locked": False}
    arguments |= {name: value for name, value in settings.items() if value != defaults.get(name)}
    run(arguments, lm_eval_options or ())


# ``main`` of interposer_tools reads this attribute.
evaluate.context_settings = {"ignore_unknown_options": True}  # type: ignore[attr-defined]


def run(arguments: dict[str, Any], lm_eval_options: list[str] | tuple[str, ...]) -> None:
    """Run ``lm_eval`` with arguments for the model, and its own options.

    Raises: ConfigError: lm_eval is not installed, or cannot be imported.
    """
    from interposer.errors import ConfigError

    try:
        from lm_eval.__main__ import cli_evaluate

        from interposer_engine.evaluation import NAME
    except ImportError as error:
        raise ConfigError(
            f"An evaluation needs lm_eval, which cannot be imported: {error}.\n"
            "Try: pip install 'interposer-engine[eval]'"
        ) from error
    # lm_eval reports the batch size, which the engine chooses.
    model = ["--model", NAME, "--batch_size", "auto", "--model_args", json.dumps(arguments)]
    former, sys.argv = sys.argv, ["lm_eval", "run", *model, *lm_eval_options]
    try:
        cli_evaluate()
    finally:
        sys.argv = former
