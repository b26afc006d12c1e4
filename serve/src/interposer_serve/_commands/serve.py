"""The subcommand ``interposer serve``, which serves a model over HTTP.

Slow modules are imported inside the command, so that ``--help`` is fast.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Collection, Iterable
from enum import StrEnum
from pathlib import Path
from socket import SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket
from typing import TYPE_CHECKING, Annotated

import typer

from interposer_engine.options import Values, load_options, takes
from interposer_tools.options import Kernels, Locked, PlatformName, TensorParallel, policy

if TYPE_CHECKING:
    from ssl import SSLContext

    from interposer_serve._proxies import TrustedProxies

_BACKLOG = 2048
_OTHER_FILES = 128  # open files of the process that are not connections
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class _LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


@takes(options=load_options())
def serve(
    model_dir: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, name on the hub such as Qwen/Qwen3-0.6B, or file of a plugin's "
            "format, such as GGUF.",
        ),
    ],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model for clients; the default is the name of its folder."),
    ] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Load an encoder and serve vectors, scores or classes.")
    ] = False,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File with one API key per line; # starts a comment."
        ),
    ] = None,
    management_keys: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with keys for the endpoints that load and unload adapters, one per line; "
            "without the file, there are no such endpoints.",
        ),
    ] = None,
    without_keys: Annotated[
        bool,
        typer.Option("--without-keys", help="Allow requests from other machines without a key."),
    ] = False,
    queue: Annotated[
        int,
        typer.Option(
            min=0, help="Maximum number of waiting answers; further requests get status 429."
        ),
    ] = 256,
    deadline: Annotated[
        float, typer.Option(min=1, help="Time limit of a request in seconds.")
    ] = 600,
    drain: Annotated[
        int,
        typer.Option(
            min=0, help="Seconds that running answers have to finish after Ctrl-C or SIGTERM."
        ),
    ] = 30,
    log_level: Annotated[
        _LogLevel,
        typer.Option(
            help="Lowest level of the lines on standard error; info includes one line per request: "
            "client, method, path, status, milliseconds, tokens of prompts and answers."
        ),
    ] = _LogLevel.INFO,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request body in bytes.")] = 4
    * 2**20,
    max_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Largest prompt in tokens; the default is the model's context."),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Maximum number of open connections.")
    ] = 1024,
    connections_per_address: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of open connections from one address, such as a proxy."
        ),
    ] = 256,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose web pages may use the server, such as https://app.example.org; "
            "'*' allows all and needs --api-keys. Repeatable.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name that requests may have in the Host header, in addition to loopback names; "
            "the server refuses all other names. Repeatable.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM file of the certificate chain, to serve HTTPS."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of the certificate's private key.")
    ] = None,
    proxy_headers: Annotated[
        bool,
        typer.Option(
            "--proxy-headers",
            help="Read the client's address from X-Forwarded-For in requests of the proxies that "
            "--trusted-proxy names.",
        ),
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="IP address or network of a proxy, such as 127.0.0.1 or 10.0.0.0/8. Repeatable.",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="LoRA adapter that clients request as the model NAME. Repeatable.",
        ),
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Format of tool calls, such as hermes, or none; the default follows from the chat "
            "template.",
        ),
    ] = None,
    reasoning_format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Format of reasoning, such as think, or none; the default follows from the chat "
            "template.",
        ),
    ] = None,
    response_template: Annotated[
        bool,
        typer.Option(
            "--response-template",
            help="Read answers by the checkpoint's response template instead of a format, once "
            "they are complete.",
        ),
    ] = False,
    options: Values,
    tensor_parallel: TensorParallel = 1,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API and a chat page."""
    from interposer.errors import ConfigError
    from interposer_serve._origins import check_origins

    keys, manager_keys = _keys(api_keys), _keys(management_keys)
    is_local = host in _LOOPBACK or _is_loopback(host)
    if not (is_local or keys or without_keys):
        raise ConfigError(
            f"Other machines could send requests to {host} without a key. "
            "Try: --api-keys FILE, or --without-keys if you want that"
        )

    # Check all options before loading the model, which can take minutes.
    origins = check_origins(cors_origin or (), has_keys=bool(keys))
    allowed_names = _host_names(allowed_host or ())
    tls = _tls(tls_certificate, tls_key)
    proxies = _proxies(proxy_headers, trusted_proxy or ())
    adapters = _adapters(adapter or (), embed)
    if embed:
        _check_embed(options, tensor_parallel)
    listening = _listen(host, port)  # first, because loading the model can take minutes

    from interposer_adapt import Encoder, load_encoder
    from interposer_engine import LanguageModel, launched
    from interposer_serve import ConnectionLimits, Limits, application
    from interposer_serve._server import Server

    limits = Limits(queue, deadline, max_body, max_prompt)
    connection_limits = ConnectionLimits(
        _allowed_connections(max_connections), connections_per_address
    )
    config = policy(kernel, platform, locked)
    _print_error(f"loading {model_dir}")
    with launched(tensor_parallel, config) as load:
        model: LanguageModel | Encoder
        if embed:
            model = load_encoder(
                model_dir, options["dtype"], config, quantization=options["quantization"]
            )
        else:
            model = load(model_dir, config=config, adapters=adapters, **options)
            if tool_format or reasoning_format or response_template:
                model.tokenizer.chat.use_formats(
                    tool_format, reasoning_format, response_template=response_template
                )
        model_name = name or model_dir.resolve().name
        # Without keys on a loopback address, check the Host header against DNS rebinding.
        checks_hosts = bool(allowed_names) or (is_local and not keys)
        hosts = {*_LOOPBACK, host, *allowed_names} if checks_hosts else None
        app = application(
            model,
            model_name,
            limits=limits,
            keys=keys,
            hosts=hosts,
            origins=origins,
            management_keys=manager_keys,
        )

        server = Server(
            app,
            listening,
            connection_limits,
            tls=tls,
            proxies=proxies,
            drain_seconds=drain,
            log_level=log_level.name,
            name=model_name,
            print_line=_print_error,
        )
        server.serve_until_stopped()
    if server.is_forced:
        raise typer.Exit(130)  # the exit code of a program that Ctrl-C ended


def _check_embed(options: Values, tensor_parallel: int) -> None:
    """Raise ConfigError if an option is set that only applies to models that generate."""
    from interposer.errors import ConfigError

    if options["speculation"] is not None:
        raise ConfigError(
            f"--speculate {options['speculation']!r} is given with --embed. Try: one of them"
        )
    if options["offload"] is not None:
        raise ConfigError(
            f"--offload {options['offload']!r} is given with --embed. Try: one of them"
        )
    if options["expert_parallel"]:
        raise ConfigError("--expert-parallel is given with --embed. Try: without")
    if tensor_parallel > 1:
        raise ConfigError(
            f"--tensor-parallel {tensor_parallel} is given with --embed. Try: without"
        )


def _host_names(options: Iterable[str]) -> set[str]:
    """Return the names of ``--allowed-host``.

    Raises: ConfigError: a name has a scheme, a port, a path or a wildcard.
    """
    from interposer.errors import ConfigError

    names = set()
    for option in options:
        name = option.removeprefix("[").removesuffix("]")
        if not (_HOST_NAME.fullmatch(name) or _is_address(name)):
            raise ConfigError(
                f"--allowed-host {option!r:.100} is no host name. "
                "Try: the name alone, such as models.example.org, without scheme and port"
            )
        names.add(name)
    return names


def _tls(certificate: Path | None, key: Path | None) -> SSLContext | None:
    """Return the TLS context of the options; None without them.

    Raises: ConfigError: only one of both files is given, or one is unusable.
    """
    from interposer.errors import ConfigError
    from interposer_serve._tls import tls_context

    if certificate is None and key is None:
        return None
    if certificate is None:
        raise ConfigError(f"--tls-key {key} is given alone. Try: also --tls-certificate FILE")
    if key is None:
        raise ConfigError(
            f"--tls-certificate {certificate} is given alone. Try: also --tls-key FILE"
        )
    return tls_context(certificate, key)


def _proxies(reads_headers: bool, addresses: Collection[str]) -> TrustedProxies | None:
    """Return the proxies whose headers the server reads; None if it reads none.

    Raises: ConfigError: one of both options is missing, or an address is malformed.
    """
    from interposer.errors import ConfigError

    if reads_headers and not addresses:
        raise ConfigError(
            "--proxy-headers needs the addresses of the proxies, because any other client could "
            "invent its address. Try: also --trusted-proxy 127.0.0.1"
        )
    if addresses and not reads_headers:
        first = next(iter(addresses))
        raise ConfigError(f"--trusted-proxy {first} is given alone. Try: also --proxy-headers")
    if not reads_headers:
        return None
    from interposer_serve._proxies import TrustedProxies

    return TrustedProxies(addresses)


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _allowed_connections(requested: int) -> int:
    """Raise the process's limit of open files, and return how many connections fit.

    Raises: InterposerError: the limit allows no connections.
    """
    import resource

    from interposer.errors import InterposerError

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = requested if soft == resource.RLIM_INFINITY else min(requested, soft - _OTHER_FILES)
    if allowed < 1:
        raise InterposerError(
            f"The process may open {soft} files, too few to serve. Try: ulimit -n {needed}"
        )
    return allowed


def _listen(host: str, port: int) -> socket:
    """Open a socket that listens on the server's address.

    Raises: InterposerError: the address is invalid or in use.
    """
    from interposer.errors import InterposerError

    try:
        family, kind, number, _, address = getaddrinfo(host, port, type=SOCK_STREAM)[0]
        listening = socket(family, kind, number)
        # A restarted server need not wait until the system forgets the old connections.
        listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listening.bind(address)
        # With SO_REUSEADDR, another server could bind the same address until this one listens.
        listening.listen(_BACKLOG)
    except OSError as error:
        raise InterposerError(
            f"The server cannot listen at {host} port {port}: {error.strerror}. "
            "Try: --port 0, which selects a free port"
        ) from None
    return listening


def _adapters(options: Iterable[str], embed: bool) -> dict[str, str]:
    """Parse ``NAME=FOLDER`` options, and return the adapter folders by name.

    Raises: ConfigError: an option is malformed, a name is repeated, or the model is an encoder.
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
    """Read the API keys from a file; return none without a file.

    Raises: ConfigError: the file contains no key.
    """
    from interposer.errors import ConfigError

    if file is None:
        return frozenset()
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{file} holds no key. Try: a line with one, or leave the option out")
    return keys


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
