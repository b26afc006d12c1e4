"""Compare servers on one model file: tokens in a second, and the time to the first one.

    python benchmarks/serve_peers.py DIR [--shape llama-100m] [--type q8_0] [--clients 8] \\
        [--also 'llama.cpp=llama-server -m {model} --port {port} -np {clients} -c {tokens}']

DIR gets a model of random weights as a GGUF file, which every server reads. The server of
llama-cpp-python is installed into an environment in the cache folder if need be, or taken from
``--llama-python``; it answers one request after the other. ``--also`` adds any server with OpenAI's
completions. With ``--type hf`` the model is a folder of Hugging Face in bfloat16, which
llama-cpp-python does not read; so only ours and those of ``--also`` run, such as

    --also 'vllm=python -m vllm.entrypoints.openai.api_server --model {model} --port {port}
            --served-model-name model --max-num-seqs {clients} --max-model-len {context}'

Needs interposer-serve, interposer-gguf and gguf. In each round the servers run one
after the other, each alone; figures are medians over the rounds, ratios those within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpu_models import config_of, write_hugging_face
from cpu_peers import ENVIRONMENTS, Unavailable, cache_folder, environment_python
from serve import NAME, ask

OURS = "interposer"
LLAMA = "llama-cpp-python"
FOLDER = "hf"
COMMANDS = {
    OURS: f"{sys.executable} -m interposer_tools serve {{model}} --port={{port}} --name={NAME} "
    "--cache-tokens={tokens} --max-sequences={clients}",
    # It would cut an answer as soon as another request comes, and tell nobody.
    LLAMA: "{python} -m llama_cpp.server --model {model} --port {port} --host 127.0.0.1 "
    f"--model_alias {NAME} --n_ctx {{context}} --n_threads {{threads}} "
    "--n_threads_batch {threads} --interrupt_requests false --disable_ping_events true "
    "--verbose false",
}


def written(folder: Path, shape: str, kind: str) -> Path:
    """Return the model; it stays for the next time."""
    if kind == FOLDER:
        target = folder / shape
        if not target.exists():
            write_hugging_face(config_of(shape), target)
            _add_merge(target / "tokenizer.json")
        return target
    target = folder / f"{shape}-{kind}.gguf"
    if not target.exists():
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        import write_gguf

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as plain:
            write_hugging_face(config_of(shape), Path(plain))
            _add_merge(Path(plain) / "tokenizer.json")
            write_gguf.write_gguf(Path(plain), target, kind)
    return target


def _add_merge(file: Path) -> None:
    """Make one token that of two spaces: llama.cpp wants at least one merge."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ĠĠ"] = vocabulary.pop("<256>")
    tokenizer["model"]["merges"] = [["Ġ", "Ġ"]]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


@contextmanager
def running(command: str, port: int, threads: int) -> Iterator[None]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(shlex.split(command), stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            upto = time.monotonic() + 300
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > upto:
                    log.seek(0)
                    sys.exit(f"{command}\ndoes not serve: {log.read()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def asked(port: int, options: argparse.Namespace) -> dict[str, float]:
    """Let each client ask one thing after the other, and return what came."""
    first: list[float] = []

    async def client(dice: random.Random, num_requests: int) -> None:
        for _ in range(num_requests):
            # A token each, since the model knows no longer ones.
            prompt = "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=options.prompt))
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": options.tokens}
            answer = await ask(port, {**body, "temperature": 0.0, "stream": True})
            assert answer is not None
            if (answer.status, answer.reason) != (200, "length") or answer.first_s is None:
                sys.exit(f"an answer of another length than asked for: {answer}")
            first.append(answer.first_s)

    await client(random.Random(-1), 1)  # what is made on first use
    first.clear()
    started = time.perf_counter()
    clients = [client(random.Random(seed), options.requests) for seed in range(options.clients)]
    await asyncio.gather(*clients)
    seconds = time.perf_counter() - started
    ordered = sorted(first)
    return {
        "tokens_per_second": options.clients * options.requests * options.tokens / seconds,
        "first_token_p50_ms": 1e3 * statistics.median(ordered),
        "first_token_p95_ms": 1e3 * ordered[math.ceil(0.95 * len(ordered)) - 1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-100m", help="of random_model.py")
    parser.add_argument("--type", default="q8_0", help="f16, bf16, q8_0, q4_0, ..., or hf")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python[server]")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=COMMAND")
    for name, value in (
        *(("clients", 8), ("requests", 4), ("prompt", 64), ("tokens", 64)),
        *(("rounds", 5), ("threads", os.cpu_count() or 1)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    model = written(options.folder, options.shape, options.type)
    context = options.prompt + options.tokens + 8
    commands = {**COMMANDS, **dict(one.split("=", 1) for one in options.also)}
    python = options.llama_python
    if options.type == FOLDER:
        del commands[LLAMA]
    elif python is None:
        try:
            python = _llama_python()
        except Unavailable as error:
            sys.exit(f"{LLAMA}: {error}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name in random.sample([*commands], len(commands)):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            command = commands[name].format(
                python=python,
                model=model,
                port=port,
                context=context,
                tokens=max(4096, options.clients * context),
                clients=options.clients,
                threads=options.threads,
            )
            with running(command, port, options.threads):
                found[name].append(asyncio.run(asked(port, options)))
    facts: dict[str, Any] = {
        name: {key: round(_median(runs, key), 1) for key in runs[0]} for name, runs in found.items()
    }
    for peer, runs in found.items():
        if peer != OURS:
            facts[f"{OURS} over {peer}"] = {
                key: round(
                    statistics.median(
                        a[key] / b[key] for a, b in zip(found[OURS], runs, strict=True)
                    ),
                    2,
                )
                for key in runs[0]
            }
    told = {"model": model.name, "load_average": os.getloadavg(), **vars(options)}
    print(json.dumps({**told, "folder": str(options.folder), **facts}, indent=2))


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _llama_python() -> Path:
    plain = ENVIRONMENTS["llama_cpp"]
    # A folder of its own, as the server needs more than the library.
    wanted = replace(
        plain,
        name="llama_cpp_server",
        module="llama_cpp.server",
        requirements=("llama-cpp-python[server]==0.3.36",),
    )
    return environment_python(wanted, cache_folder())


if __name__ == "__main__":
    main()
