"""The subcommand ``interposer serve``.

What is heavy is imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable
from pathlib import Path
from socket import SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket
from typing import Annotated

import typer

from interposer_tools.options import (
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

_BACKLOG = 2048
_OTHER_FILES = 128  # that the process opens besides connections
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model_dir: Annotated[
        Path,
        typer.Argument(
            help="A model directory, a name as Qwen/Qwen3-0.6B, or a file that a plugin reads."
        ),
    ],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="By which clients ask for the model; else its folder's.")
    ] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Serve vectors of texts, by an encoder.")
    ] = False,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A file with a key on each line; # is a comment."
        ),
    ] = None,
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="Let other machines ask without a key.")
    ] = False,
    queue: Annotated[
        int, typer.Option(min=0, help="How many answers may wait; further requests get 429.")
    ] = 256,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that an answer may take.")] = 600,
    drain: Annotated[
        int, typer.Option(min=0, help="Seconds that answers may still take at the end.")
    ] = 30,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 4 * 2**20,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt; else the model's context.")
    ] = None,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections that are open at once.")
    ] = 1024,
    connections_per_address: Annotated[
        int, typer.Option(min=1, help="Of these, from one address, as that of a proxy.")
    ] = 256,
    max_sequences: Annotated[int, typer.Option(min=1, help="Answers that run at once.")] = 64,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER", help="A LoRA adapter, which clients ask for by NAME; repeatable."
        ),
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the cache holds; else what fits.")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Compute the common beginning of prompts once.")
    ] = False,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    speculate: Speculate = None,
    tensor_parallel: TensorParallel = 1,
    expert_parallel: ExpertParallel = False,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
) -> None:
    """Serve the model over HTTP, with OpenAI's endpoints and a page to chat."""
    from interposer.errors import ConfigError

    keys = _keys(api_keys)
    is_local = host in _LOOPBACK or _is_loopback(host)
    if not (is_local or keys or without_keys):
        raise ConfigError(
            f"Other machines could ask at {host} without a key. "
            "Try: --api-keys FILE, or --without-keys where that is meant"
        )

    adapters = _adapters(adapter or (), embed)
    if speculate is not None and embed:
        raise ConfigError(f"--speculate {speculate!r} is given with --embed. Try: one of them")
    if (tensor_parallel > 1 or expert_parallel) and embed:
        given = "--expert-parallel" if expert_parallel else f"--tensor-parallel {tensor_parallel}"
        raise ConfigError(f"{given} is given with --embed. Try: without")
    listening = _bound(host, port)  # before minutes are spent on loading

    from interposer_models import Encoder, LanguageModel, launched, load_encoder
    from interposer_serve import ConnectionLimits, Limits, application
    from interposer_serve._server import Server

    limits = Limits(queue, deadline, max_body, max_prompt)
    bounds = ConnectionLimits(_most_connections(max_connections), connections_per_address)
    config = policy(kernel, platform, locked)
    _say(f"loading {model_dir}")
    with launched(tensor_parallel, config) as load:
        model: LanguageModel | Encoder
        if embed:
            model = load_encoder(model_dir, dtype, config, quantization=quantization)
        else:
            model = load(
                model_dir,
                dtype,
                config=config,
                quantization=quantization,
                expert_parallel=expert_parallel,
                cache_tokens=cache_tokens,
                max_sequences=max_sequences,
                prefix_cache=prefix_cache,
                adapters=adapters,
                speculation=speculate,
            )
        named = name or model_dir.resolve().name
        hosts = {*_LOOPBACK, host} if is_local and not keys else None
        app = application(model, named, limits=limits, keys=keys, hosts=hosts)

        server = Server(app, listening, bounds, drain_seconds=drain, name=named, print_line=_say)
        server.serve_until_stopped()
    if server.is_forced:
        raise typer.Exit(130)  # as a shell tells of a program that Ctrl-C ended


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _most_connections(wanted: int) -> int:
    """Return how many connections the process may have open, up to ``wanted``.

    The limit of its file descriptors is raised as far as that is allowed.

    Raises: ConfigError: there are too few for any.
    """
    import resource

    from interposer.errors import ConfigError

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - _OTHER_FILES)
    if allowed < 1:
        raise ConfigError(
            f"The process may open {soft} files, too few to serve. Try: ulimit -n {needed}"
        )
    return allowed


def _bound(host: str, port: int) -> socket:
    """Return a socket with the address, at which nobody listens yet.

    Raises: ConfigError: there is no such address, or somebody else has it.
    """
    from interposer.errors import ConfigError

    try:
        family, kind, number, _, address = getaddrinfo(host, port, type=SOCK_STREAM)[0]
        found = socket(family, kind, number)
        found.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        found.bind(address)
        # Another server would be let have the same address until one of them listens.
        found.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"The server cannot listen at {host} port {port}: {error.strerror}. "
            "Try: --port 0, which takes a free one"
        ) from None
    return found


def _adapters(options: Iterable[str], embed: bool) -> dict[str, str]:
    """Return the folders of adapters by name.

    Raises: ConfigError: an option is malformed, names an adapter again, or is given to an encoder.
    """
    from interposer.errors import ConfigError

    adapters: dict[str, str] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not (name and folder):
            raise ConfigError(f"--adapter {option!r} is not NAME=FOLDER. Try: --adapter sql=./sql")
        if name in adapters:
            raise ConfigError(f"--adapter names {name!r} twice. Try: another name for one of them")
        if embed:
            raise ConfigError(f"--adapter {option!r} is given with --embed. Try: one of them")
        adapters[name] = folder
    return adapters


def _keys(file: Path | None) -> frozenset[str]:
    """Return the keys in a file.

    Raises: ConfigError: there are none in it.
    """
    from interposer.errors import ConfigError

    if file is None:
        return frozenset()
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{file} holds no key. Try: a line with one, or leave --api-keys out")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
