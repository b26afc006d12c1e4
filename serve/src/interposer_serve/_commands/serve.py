"""The subcommand ``interposer serve``, which serves models over HTTP.

Slow modules are imported inside the command, so that ``--help`` is fast.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from socket import SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interposer_engine.options import Values, load_options, takes
from interposer_serve._model_settings import ModelSettings, ModelsFile
from interposer_tools.imports import frozen_imports
from interposer_tools.options import Kernels, Locked, PlatformName, TensorParallel, policy

if TYPE_CHECKING:
    from ssl import SSLContext

    from interposer import Config
    from interposer_engine import LanguageModel
    from interposer_serve._model_source import Model, ModelSource
    from interposer_serve._proxies import TrustedProxies

_BACKLOG = 2048
_OTHER_FILES = 128  # open files of the process that are not connections
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SIZE = re.compile(r"(\d+)([KMGT]iB)")
_UNITS = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class _LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


@takes(options=load_options())
def serve(
    model_dirs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Model directory, name on the hub such as Qwen/Qwen3-0.6B, or file of a plugin's "
            "format, such as GGUF. Of several models, the server loads the default one; the "
            "others are loaded on demand.",
        ),
    ] = None,
    *,
    models: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="TOML file with a table models.NAME for each model; other options hold for all.",
        ),
    ] = None,
    default: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model for requests that name none; the default is the first."
        ),
    ] = None,
    max_loaded: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of models that are loaded at once; the default is no limit."
        ),
    ] = None,
    idle_minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Minutes without requests after which a model is unloaded."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(help="Name of a single model; the default is the name of its folder."),
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
            help="File with keys for the endpoints that load models and adapters and change "
            "weights, one per line; without the file, there are no such endpoints.",
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
    max_audio: Annotated[
        int, typer.Option(min=1, help="Largest request body with an audio file in bytes.")
    ] = 25 * 2**20,
    max_audio_seconds: Annotated[
        float, typer.Option(min=1, help="Longest audio file in seconds.")
    ] = 3600,
    max_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Largest prompt in tokens; the default is the model's context."),
    ] = None,
    media_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Host from which the server may fetch pictures and sounds that requests name by "
            "HTTP addresses, such as images.example.org or images.example.org:8443. Repeatable.",
        ),
    ] = None,
    max_media: Annotated[
        int, typer.Option(min=1, help="Maximum number of pictures and sounds in one request.")
    ] = 16,
    max_media_bytes: Annotated[
        int, typer.Option(min=1, help="Largest file of a picture or sound in bytes.")
    ] = 20 * 2**20,
    max_pixels: Annotated[int, typer.Option(min=1, help="Largest picture in pixels.")] = 32 * 2**20,
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
    packed: Annotated[
        str | None,
        typer.Option(
            metavar="auto|on|off",
            help="Map packed weights from a file: for large models, for all, or never.",
        ),
    ] = None,
    prefix_offload: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for pages that the prefix cache evicts, such as 8GiB; on a processor, a "
            "size of --prefix-offload-dir.",
        ),
    ] = None,
    prefix_offload_dir: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder for a file of --prefix-offload, which is deleted with the process.",
        ),
    ] = None,
    options: Values,
    tensor_parallel: TensorParallel = 1,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
) -> None:
    """Serve models over HTTP with OpenAI's and Anthropic's APIs and a chat page."""
    from interposer import current_registry
    from interposer.errors import ConfigError
    from interposer_serve._media_addresses import check_media_hosts
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
    check_media_hosts(media_host or ())
    allowed_names = _host_names(allowed_host or ())
    tls = _tls(tls_certificate, tls_key)
    proxies = _proxies(proxy_headers, trusted_proxy or ())
    common = ModelSettings(
        name="",
        path="",
        embed=embed,
        options={**options, **_prefix_settings(options, prefix_offload, prefix_offload_dir)},
        config={} if packed is None else {"packed": packed},
        adapters=_adapters(adapter or ()),
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        response_template=response_template,
        idle_minutes=idle_minutes,
    )
    chosen = _chosen_models(model_dirs or (), models, name, common)
    default = default or chosen.default or chosen.models[0].name
    max_loaded = max_loaded or chosen.max_loaded
    config = policy(kernel, platform, locked)
    with frozen_imports():
        # Before torch is imported, so that an examining process imports it at the same time.
        current_registry(config)
        from interposer_engine import launched
        from interposer_serve import ConnectionLimits, Limits, application
        from interposer_serve._server import Server

    for settings in chosen.models:
        settings.check()
        if settings.embed and tensor_parallel > 1:
            raise ConfigError(
                f"--tensor-parallel {tensor_parallel} is given for {settings.name!r}, which is an "
                "encoder. Try: without"
            )
    if len(chosen.models) > 1 or idle_minutes is not None:
        _check_one_process(tensor_parallel, options)

    limits = Limits(
        queue,
        deadline,
        max_body,
        max_prompt,
        media=max_media,
        media_bytes=max_media_bytes,
        image_pixels=max_pixels,
        audio_bytes=max_audio,
        audio_seconds=max_audio_seconds,
    )
    connection_limits = ConnectionLimits(
        _allowed_connections(max_connections), connections_per_address
    )
    # The server listens before it loads the model, because loading can take minutes.
    with _listen(host, port) as listening, launched(tensor_parallel, config) as load:
        sources = _sources(chosen, default, max_loaded, config, load)
        # Without keys on a loopback address, check the Host header against DNS rebinding.
        checks_hosts = bool(allowed_names) or (is_local and not keys)
        hosts = {*_LOOPBACK, host, *allowed_names} if checks_hosts else None
        app = application(
            sources,
            default=default,
            max_loaded=max_loaded,
            limits=limits,
            keys=keys,
            hosts=hosts,
            origins=origins,
            management_keys=manager_keys,
            media_hosts=media_host or (),
        )

        server = Server(
            app,
            listening,
            connection_limits,
            tls=tls,
            proxies=proxies,
            drain_seconds=drain,
            log_level=log_level.name,
            name=", ".join(source.name for source in sources),
            print_line=_print_error,
        )
        server.serve_until_stopped()
    if server.is_forced:
        raise typer.Exit(130)  # the exit code of a program that Ctrl-C ended


def _chosen_models(
    paths: Sequence[Path], file: Path | None, name: str | None, common: ModelSettings
) -> ModelsFile:
    """Return the settings of the models of the command.

    Args:
        paths: The models that the command names.
        file: File with further models.
        name: Name for a single model.
        common: Settings of all models.
    Raises: ConfigError: no model is named, the file is invalid, or an option for a single model is
        given for several.
    """
    from interposer.errors import ConfigError

    if not paths and file is None:
        raise ConfigError("No model is named. Try: interposer serve FOLDER, or --models FILE")
    if len(paths) > 1 or file is not None:
        for option, value in (("--name", name), ("--adapter", common.adapters)):
            if value:
                raise ConfigError(
                    f"{option} is given with several models. Try: a file of --models, which names "
                    "each model and its adapters"
                )
    settings = [replace(common, name=name or path.resolve().name, path=str(path)) for path in paths]
    if file is None:
        return ModelsFile(settings)
    content = ModelsFile.read(file, common)
    return replace(content, models=[*settings, *content.models])


def _sources(
    chosen: ModelsFile,
    default: str,
    max_loaded: int | None,
    config: Config,
    load: Callable[..., LanguageModel],
) -> list[ModelSource]:
    """Return the sources of the models; the default model is loaded already.

    Raises:
        ConfigError: The models contradict each other.
        InterposerError: The default model cannot be loaded.
    """
    from interposer_serve import ModelSource
    from interposer_serve._model_source import check_sources

    sources = [settings.source(config) for settings in chosen.models]
    check_sources(sources, default, max_loaded)
    _print_error(f"loading {next(source.path for source in sources if source.name == default)}")
    first = chosen.models[0]
    if len(sources) == 1 and first.idle_minutes is None:
        model = first.load(config, load)
        return [ModelSource(name=first.name, model=model, path=first.path, adapters=first.adapters)]
    for index, source in enumerate(sources):
        if source.name == default and source.load is not None:
            # Now, so that an error ends the command instead of a running server.
            sources[index] = replace(source, load=_Preloaded(source.load))
    return sources


class _Preloaded:
    """Loader whose first call returns a model that was loaded at construction."""

    def __init__(self, load: Callable[[], Model]) -> None:
        self._load = load
        self._model: Model | None = load()

    def __call__(self) -> Model:
        model, self._model = self._model, None
        return self._load() if model is None else model


def _check_one_process(tensor_parallel: int, options: Values) -> None:
    """Raise ConfigError if a model that may be unloaded would run in several processes."""
    from interposer.errors import ConfigError

    if tensor_parallel > 1 or options["expert_parallel"]:
        option = "--tensor-parallel" if tensor_parallel > 1 else "--expert-parallel"
        raise ConfigError(
            f"{option} is given with several models or with --idle-minutes, but the processes of a "
            "model cannot be started again. Try: one server for each such model"
        )


def _prefix_settings(options: Values, size: str | None, folder: Path | None) -> dict[str, Any]:
    """Return the table ``prefix_cache`` of the options; empty without these options.

    Raises: ConfigError: the size is malformed, or an option lacks the one that it belongs to.
    """
    from interposer.errors import ConfigError

    if size is None:
        if folder is not None:
            raise ConfigError(
                f"--prefix-offload-dir {folder} is given alone. Try: also --prefix-offload 8GiB"
            )
        return {}
    if not options["prefix_cache"]:
        raise ConfigError(f"--prefix-offload {size} is given alone. Try: also --prefix-cache")
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigError(f"--prefix-offload {size!r} is no size. Try: 8GiB, or 500MiB")
    table: dict[str, Any] = {"offload_bytes": int(match[1]) << _UNITS[match[2]]}
    return {"prefix_cache": table if folder is None else {**table, "offload_dir": str(folder)}}


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

    with ExitStack() as opened:
        try:
            family, kind, number, _, address = getaddrinfo(host, port, type=SOCK_STREAM)[0]
            listening = opened.enter_context(socket(family, kind, number))
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
        opened.pop_all()
    return listening


def _adapters(options: Iterable[str]) -> dict[str, str]:
    """Parse ``NAME=FOLDER`` options, and return the adapter folders by name.

    Raises: ConfigError: an option is malformed, or a name is repeated.
    """
    from interposer.errors import ConfigError

    adapters: dict[str, str] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not (name and folder):
            raise ConfigError(f"--adapter {option!r} is not NAME=FOLDER. Try: --adapter sql=./sql")
        if name in adapters:
            raise ConfigError(f"--adapter names {name!r} twice. Try: another name for one of them")
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
