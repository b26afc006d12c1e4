"""The subcommand ``interposer run``.

Heavy modules are imported inside the command, so that ``--help`` answers at once.
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
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
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
            metavar="SIZE", help="Weights to keep in memory, as 8GiB or 50%; the rest is streamed."
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

        statistics = {"load_s": load_s, **speed(arrivals), **_memory(lm), **_draft_counts(lm)}
    if as_json:
        facts = {
            "text": "".join(text),
            "token_ids": token_ids,
            "finish_reason": reason,
            **statistics,
        }
        print(json.dumps(facts, indent=2))
    else:
        print()
        # The engine reports "length" for both limits; tell the user which one it was.
        if reason == "length" and len(token_ids) < max_new_tokens:
            reason = (
                f"length: the context of {lm.engine.model.config.max_position_embeddings} is full"
            )
        print(_summary(len(token_ids), reason, statistics), file=sys.stderr)


def load_with_progress(
    load: Callable[..., LanguageModel],
    path: Path,
    dtype: str,
    quantization: str | None,
    config: Config,
    speculation: str | None = None,
    **sizes: Any,
) -> LanguageModel:
    """Load a model for one request at a time, with a progress bar if stderr is a terminal.

    Args:
        load: ``interposer_models.load``, or that of launched ranks.
        sizes: more options of ``load``, for example ``max_sequences``.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("loading", total=None)

        def advance(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

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
    """Return the seconds to the first token, and tokens per second after that."""
    span = arrivals[-1] - arrivals[0]
    # The first token has the prefill's latency, so the rate counts the tokens after it.
    rate = (len(arrivals) - 1) / span if span > 0 else 0.0
    return {"time_to_first_token_s": arrivals[0], "tokens_per_second": rate}


def peak_memory(lm: LanguageModel) -> int | None:
    """Return the most bytes that this process has used; None if the platform has no figure."""
    placement = lm.placement
    if not placement.platform.provides("peak_memory_bytes"):
        return None
    return placement.platform.peak_memory_bytes(placement.device.torch_device)


def _memory(lm: LanguageModel) -> dict[str, int]:
    peak = peak_memory(lm)
    return {} if peak is None else {"peak_memory_bytes": peak}


def _draft_counts(lm: LanguageModel) -> dict[str, int]:
    if (counts := lm.speculation) is None:
        return {}
    return {"drafted_tokens": counts.drafted_tokens, "accepted_tokens": counts.accepted_tokens}


def _summary(count: int, reason: object, statistics: dict[str, Any]) -> str:
    parts = [
        f"{count} tokens ({reason})",
        f"loaded in {statistics['load_s']:.2f} s",
        f"first token after {statistics['time_to_first_token_s'] * 1e3:.0f} ms",
        f"then {statistics['tokens_per_second']:.1f} tokens/s",
    ]
    if "peak_memory_bytes" in statistics:
        parts.append(f"peak memory {statistics['peak_memory_bytes'] / 2**20:.0f} MiB")
    if "drafted_tokens" in statistics:
        parts.append(
            "{accepted_tokens} of {drafted_tokens} draft tokens accepted".format(**statistics)
        )
    return ", ".join(parts)
