"""The subcommand ``interposer bench``, which measures the speed of a model.

Heavy modules are imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interposer_engine.options import Values, load_options, takes
from interposer_tools.imports import frozen_imports
from interposer_tools.options import AsJson, Kernels, Locked, PlatformName, TensorParallel, policy

if TYPE_CHECKING:
    from interposer_engine._bench.report import Progress


_MEASURED_SIZES = (
    "cache_tokens",
    "max_sequences",
    "max_step_tokens",
    "memory_fraction",
    "prefix_cache",
)


@takes(options=load_options(without=_MEASURED_SIZES))
def bench(
    model_dir: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, name on the hub such as Qwen/Qwen3-0.6B, or file of a plugin's "
            "format, such as GGUF.",
        ),
    ],
    *,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt in the prefill row.")] = 512,
    contexts: Annotated[
        str, typer.Option(help="Context lengths of the decode rows in tokens, separated by commas.")
    ] = "128,1024,4096",
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode in each row.")] = 32,
    batch: Annotated[int, typer.Option(help="Requests of the batch row; 1 omits the row.")] = 8,
    rounds: Annotated[
        int, typer.Option(help="Measured runs of each row, after one warm-up run.")
    ] = 3,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Add rows with this LoRA adapter.")
    ] = None,
    shared_prefix: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Add rows for prompts that share this many tokens."),
    ] = 0,
    options: Values,
    tensor_parallel: TensorParallel = 1,
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads for torch.")] = None,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    read_mib: Annotated[
        int | None,
        typer.Option(help="MiB that a bandwidth measurement reads; must exceed the CPU caches."),
    ] = None,
    as_json: AsJson = False,
    llama_bench: Annotated[
        bool, typer.Option("--llama-bench", help="Print the table in llama-bench's format.")
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the rows as bars below the table.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the rows as bars into this SVG file.")
    ] = None,
) -> None:
    """Measure the speed of a model on this machine, and the speed that the hardware allows."""
    from interposer.errors import ConfigError
    from interposer_engine._commands.run import discover_plugins, load_with_progress, peak_memory

    config = policy(kernel, platform, locked)
    with frozen_imports():
        discover_plugins(config)
        import torch

        from interposer_engine._bench.kinds import END_TOKENS, Sizes, kinds_of, parsed_contexts
        from interposer_engine._bench.report import (
            Benchmark,
            bars,
            benchmark_rows,
            measured_runs,
            roofs_of,
            svg_chart,
        )
        from interposer_engine._bench.roofline import ModelWork
        from interposer_engine._distributed.launcher import launched
        from interposer_engine._encoder_inputs import has_encoder_inputs
        from interposer_engine._kv_cache import is_prefix_lm
        from interposer_engine._planning import plan

    counts = {"--rounds": rounds, "--threads": threads, "--read-mib": read_mib}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be an integer of at least 1")
    if svg is not None and not svg.absolute().parent.is_dir():
        raise ConfigError(f"--svg is {str(svg)!r}, and its folder does not exist")
    if threads is not None:
        torch.set_num_threads(threads)
    dtype, quantization = options["dtype"], options["quantization"]
    planned = plan(model_dir, dtype, config=config, quantization=quantization)
    if has_encoder_inputs(planned.model):
        raise ConfigError(
            f"{model_dir} has an encoder, but bench measures only decoders. Try: interposer run"
        )
    context = planned.decoder.max_position_embeddings
    context_lengths = parsed_contexts(contexts)
    sizes = Sizes.within(context, prompt, context_lengths, new_tokens, batch, shared_prefix)
    has_prefix_lm = is_prefix_lm(planned.model)
    compute, longest = planned.dtype, max(*sizes.contexts, sizes.shared + END_TOKENS)
    # The plan was only for the context length; its modules must not stay in memory.
    del planned
    with launched(tensor_parallel, config) as load:
        started = time.perf_counter()
        lm = load_with_progress(
            load,
            model_dir,
            config=config,
            **options,
            max_sequences=sizes.max_sequences,
            # A prefix LM computes a prompt in one step, which must hold the longest prompt.
            max_step_tokens=max(sizes.cached_prefix, longest)
            if has_prefix_lm
            else sizes.cached_prefix,
            cache_tokens=sizes.cache_tokens(),
            prefix_cache=bool(sizes.shared),
        )
        load_s = time.perf_counter() - started
        kinds = list(
            kinds_of(
                sizes,
                speculates=options["speculation"] is not None,
                adapter=adapter is not None,
                whole_prompts=has_prefix_lm,
            )
        )
        with _progress() as progress:
            runs = measured_runs(lm, kinds, rounds, adapter, progress)
            peak = peak_memory(lm)  # before the bandwidth is measured, which needs more memory
            progress("measuring bandwidth and arithmetic")
            roofs = roofs_of(
                lm, compute, sizes.prompt, None if read_mib is None else read_mib << 20
            )
        work = ModelWork.of(lm.engine.model)
    benchmark = Benchmark(
        model=str(model_dir),
        platform=lm.placement.platform.name,
        device=lm.placement.device.name,
        dtype=str(compute).removeprefix("torch."),
        quantization=quantization,
        rounds=rounds,
        weights=work.numbers,
        weight_bytes=work.weight_bytes(1),
        load_s=load_s,
        peak_memory_bytes=peak,
        roofs=roofs,
        rows=benchmark_rows(kinds, runs, work, roofs),
        notes=(*sizes.notes, *_notes(has_prefix_lm, tensor_parallel)),
    )
    if svg is not None:
        svg.write_text(svg_chart(benchmark), encoding="utf-8")
    print(benchmark.to_json() if as_json else benchmark.llama_bench() if llama_bench else benchmark)
    if plot and not as_json:
        print(f"\n{bars(benchmark)}")


def _notes(has_prefix_lm: bool, ranks: int) -> Iterator[str]:
    if has_prefix_lm:
        yield "prompts are computed in one step, so no row extends a cached prompt"
    if ranks > 1:
        yield f"{ranks} ranks: weights, memory and rooflines are those of rank 0"


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show the current benchmark row, if stderr is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield status.update
