"""The subcommands ``interposer run`` and ``interposer explain``.

What is heavy is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interposer.errors import ConfigError

if TYPE_CHECKING:
    from interposer import Config, Explanation
    from interposer_models.language_model import LanguageModel

__all__ = ["explain", "run"]

ModelDir = Annotated[Path, typer.Argument(help="A Hugging Face model directory.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
PlatformName = Annotated[str | None, typer.Option("--platform", help="Where to run.")]
Kernels = Annotated[
    list[str] | None,
    typer.Option("--kernel", metavar="OP=NAME", help="Pin a kernel; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run(
    model_dir: ModelDir,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Where to end at the latest.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a warm temperature repeatable.")] = None,
    dtype: Dtype = "auto",
    platform: PlatformName = None,
    kernel: Kernels = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with the model, and say how fast it went."""
    from interposer_models.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    started = time.perf_counter()
    lm = _load(model_dir, dtype, platform, _pins(kernel))
    load_s = time.perf_counter() - started

    text: list[str] = []
    arrivals: list[float] = []
    token_ids: list[int] = []
    reason = None
    started = time.perf_counter()
    for delta in lm.stream(prompt, params):
        arrivals.append(time.perf_counter() - started)
        text.append(delta.text)
        token_ids.append(delta.token_id)
        reason = delta.finish_reason
        if not as_json:
            print(delta.text, end="", flush=True)

    figures = {"load_s": load_s, **_speed(arrivals), **_memory(lm)}
    if as_json:
        facts = {"text": "".join(text), "token_ids": token_ids, "finish_reason": reason, **figures}
        print(json.dumps(facts, indent=2))
    else:
        print()
        print(_summary(len(token_ids), reason, figures), file=sys.stderr)


def explain(
    model_dir: ModelDir,
    dtype: Dtype = "auto",
    platform: PlatformName = None,
    kernel: Kernels = None,
    as_json: AsJson = False,
) -> None:
    """Say what would be chosen for every part of the model, and why everything else would not."""
    import interposer
    from interposer_models.loader import plan

    explanation = interposer.explain(plan(model_dir, dtype, platform, _pins(kernel)))
    if as_json:
        print(explanation.to_json())
    elif sys.stdout.isatty():
        print_table(explanation)
    else:
        print(explanation)


def print_table(explanation: Explanation, width: int | None = None) -> None:
    """Print an explanation as a table, ``width`` columns wide or as wide as the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("request", "places", "chosen", "provider", "why", "not chosen")
    table.title = explanation.device
    for row in explanation.rows:
        choice = row.choice
        refused = "\n".join(f"{r.candidate}: {r.reason}" for r in choice.refusals) or "-"
        places = str(len(row.prefixes))
        chosen = choice.chosen
        cells = (str(choice.request), places, chosen.name, chosen.origin, choice.why, refused)
        # As Text, because a request's brackets would be read as markup.
        table.add_row(*(Text(cell) for cell in cells), end_section=True)
    Console(width=width).print(table)


def _load(path: Path, dtype: str, platform: str | None, config: Config) -> LanguageModel:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from interposer_models.loader import load

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("loading", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return load(path, dtype, platform, config, max_sequences=1, progress=advance)


def _pins(kernels: list[str] | None) -> Config:
    from interposer import Config

    pins = {}
    for text in kernels or []:
        op, equals, name = text.partition("=")
        if not (op and equals and name):
            raise ConfigError(
                f"--kernel {text!r} is not of the form OP=NAME, as rms_norm=reference"
            )
        pins[op] = name
    return Config(kernels=pins)


def _speed(arrivals: list[float]) -> dict[str, float]:
    """Return seconds to the first token and tokens per second after it."""
    span = arrivals[-1] - arrivals[0]
    rate = (len(arrivals) - 1) / span if span > 0 else 0.0
    return {"time_to_first_token_s": arrivals[0], "tokens_per_second": rate}


def _memory(lm: LanguageModel) -> dict[str, int]:
    placement = lm.placement
    if not placement.platform.provides("peak_memory_bytes"):
        return {}
    peak = placement.platform.peak_memory_bytes(placement.device.torch_device)
    return {"peak_memory_bytes": peak}


def _summary(count: int, reason: object, figures: dict[str, Any]) -> str:
    parts = [
        f"{count} tokens ({reason})",
        f"loaded in {figures['load_s']:.2f} s",
        f"first token after {figures['time_to_first_token_s'] * 1e3:.0f} ms",
        f"then {figures['tokens_per_second']:.1f} tokens/s",
    ]
    if "peak_memory_bytes" in figures:
        parts.append(f"peak memory {figures['peak_memory_bytes'] / 2**20:.0f} MiB")
    return ", ".join(parts)
