"""The subcommand ``interposer run``.

What is heavy is imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interposer_tools.options import (
    AsJson,
    Dtype,
    ExpertParallel,
    Kernels,
    Locked,
    PlatformName,
    Quantization,
    Speculate,
    TensorParallel,
    policy,
)

if TYPE_CHECKING:
    from interposer import Config
    from interposer_models._language_model import LanguageModel


def run(
    model_dir: Annotated[
        Path,
        typer.Argument(
            help="A model directory, a name as Qwen/Qwen3-0.6B, or a file that a plugin reads."
        ),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Where to end at the latest.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a warm temperature repeatable.")] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A LoRA adapter, or its name on the hub.")
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    speculate: Speculate = None,
    tensor_parallel: TensorParallel = 1,
    expert_parallel: ExpertParallel = False,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Weights that stay in memory, as 8GiB or 50%; others come in turn."
        ),
    ] = None,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with the model, and say how fast it went."""
    from interposer_models._engine.sampling_params import SamplingParams
    from interposer_models._parallel.launching import launched

    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, adapter=adapter
    )
    config = policy(kernel, platform, locked)
    with launched(tensor_parallel, config) as load:
        started = time.perf_counter()
        lm = load_with_progress(
            load,
            model_dir,
            dtype,
            quantization,
            config,
            speculate,
            offload=offload,
            expert_parallel=expert_parallel,
        )
        if adapter is not None:
            lm.load_adapter(adapter, adapter)
        load_s = time.perf_counter() - started

        text: list[str] = []
        arrivals: list[float] = []
        token_ids: list[int] = []
        reason: str | None = None
        started = time.perf_counter()
        for delta in lm.stream(prompt, params):
            arrivals.append(time.perf_counter() - started)
            text.append(delta.text)
            token_ids.append(delta.token_id)
            reason = delta.finish_reason
            if not as_json:
                print(delta.text, end="", flush=True)

        figures = {"load_s": load_s, **speed(arrivals), **_memory(lm), **_guesses(lm)}
    if as_json:
        facts = {"text": "".join(text), "token_ids": token_ids, "finish_reason": reason, **figures}
        print(json.dumps(facts, indent=2))
    else:
        print()
        if reason == "length" and len(token_ids) < max_new_tokens:
            reason = (
                f"length: the context of {lm.engine.model.config.max_position_embeddings} is full"
            )
        print(_summary(len(token_ids), reason, figures), file=sys.stderr)


def load_with_progress(
    load: Callable[..., LanguageModel],
    path: Path,
    dtype: str,
    quantization: str | None,
    config: Config,
    speculation: str | None = None,
    **sizes: Any,
) -> LanguageModel:
    """Load a model for one request at a time, and show how far that is on a terminal.

    Args:
        load: of ``interposer_models``, or of ranks that were launched.
        sizes: further options of ``load``, for more requests for example.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("loading", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return load(
            path,
            dtype,
            config=config,
            quantization=quantization,
            speculation=speculation,
            progress=advance,
            **{"max_sequences": 1, **sizes},
        )


def speed(arrivals: list[float]) -> dict[str, float]:
    """Return seconds to the first token and tokens per second after it."""
    span = arrivals[-1] - arrivals[0]
    rate = (len(arrivals) - 1) / span if span > 0 else 0.0
    return {"time_to_first_token_s": arrivals[0], "tokens_per_second": rate}


def peak_memory(lm: LanguageModel) -> int | None:
    """Return the most bytes that this process has held; None where the platform does not tell."""
    placement = lm.placement
    if not placement.platform.provides("peak_memory_bytes"):
        return None
    return placement.platform.peak_memory_bytes(placement.device.torch_device)


def _memory(lm: LanguageModel) -> dict[str, int]:
    peak = peak_memory(lm)
    return {} if peak is None else {"peak_memory_bytes": peak}


def _guesses(lm: LanguageModel) -> dict[str, int]:
    if (counts := lm.speculation) is None:
        return {}
    return {"drafted_tokens": counts.drafted_tokens, "accepted_tokens": counts.accepted_tokens}


def _summary(count: int, reason: object, figures: dict[str, Any]) -> str:
    parts = [
        f"{count} tokens ({reason})",
        f"loaded in {figures['load_s']:.2f} s",
        f"first token after {figures['time_to_first_token_s'] * 1e3:.0f} ms",
        f"then {figures['tokens_per_second']:.1f} tokens/s",
    ]
    if "peak_memory_bytes" in figures:
        parts.append(f"peak memory {figures['peak_memory_bytes'] / 2**20:.0f} MiB")
    if "drafted_tokens" in figures:
        parts.append("{accepted_tokens} of {drafted_tokens} guesses accepted".format(**figures))
    return ", ".join(parts)
