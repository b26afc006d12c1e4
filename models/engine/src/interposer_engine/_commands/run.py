"""The subcommand ``interposer run``, which continues a prompt or chats in the terminal.

Heavy modules are imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interposer_engine.options import Values, load_options, sampling_options, takes
from interposer_tools.imports import frozen_imports
from interposer_tools.options import AsJson, Kernels, Locked, PlatformName, TensorParallel, policy

if TYPE_CHECKING:
    from interposer import Config
    from interposer_engine._embedded_input import EmbeddedInput
    from interposer_engine._language_model import LanguageModel, Prompt
    from interposer_engine._media import Media


# One request has no other to share a prefix with.
@takes(
    sampling=sampling_options(),
    options=load_options(without=("max_sequences", "prefix_cache")),
)
def run(
    model_dir: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, name on the hub such as Qwen/Qwen3-0.6B, or file of a plugin's "
            "format, such as GGUF.",
        ),
    ],
    *,
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue; - reads standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file in UTF-8 with the text to continue.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A picture before the prompt, which is then a message for the model's chat "
            "template. Repeatable.",
        ),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A sound before the prompt, which is then a message for the model's chat "
            "template. Repeatable.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 64,
    sampling: Values,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A LoRA adapter, or its name on the hub.")
    ] = None,
    options: Values,
    tensor_parallel: TensorParallel = 1,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with the model, and report the speed.

    Decoding is greedy unless you set --temperature.
    """
    text_prompt = _prompt_text(prompt, prompt_file)
    config = policy(kernel, platform, locked)
    with frozen_imports():
        discover_plugins(config)
        from interposer_engine._distributed.launcher import launched
        from interposer_engine._sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, adapter=adapter, **_given(sampling))
    with launched(tensor_parallel, config) as load:
        started = time.perf_counter()
        lm = load_with_progress(load, model_dir, config=config, **options)
        if adapter is not None:
            lm.load_adapter(adapter, adapter)
        load_s = time.perf_counter() - started

        prompt_tokens: Prompt = text_prompt
        if media := [*_media("image", image), *_media("audio", audio)]:
            prompt_tokens = lm.chat_prompt([_user_message(text_prompt, media)])
        text: list[str] = []
        arrivals: list[float] = []
        token_ids: list[int] = []
        reason: str | None = None
        started = time.perf_counter()
        for delta in lm.stream(prompt_tokens, params):
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
        # The engine reports "length" for both limits; name the limit that was reached.
        if reason == "length" and len(token_ids) < max_new_tokens:
            reason = (
                f"length: the context of {lm.engine.model.config.max_position_embeddings} is full"
            )
        print(_summary(len(token_ids), reason, statistics), file=sys.stderr)


def discover_plugins(config: Config | None) -> None:
    """Discover the plugins before this process imports torch, which takes seconds.

    The first start examines the plugins in another process, which imports torch as well. Then both
    processes import torch at the same time.
    """
    from interposer import current_registry

    current_registry(config)


def _media(kind: Literal["image", "audio"], paths: Sequence[Path] | None) -> list[Media]:
    """Return files of pictures or sounds as media."""
    from interposer_engine._media import Media

    return [Media(kind, path.expanduser(), str(path)) for path in paths or ()]


def _user_message(text: str, media: Sequence[Media]) -> dict[str, Any]:
    """Return a message with media before its text."""
    return {"role": "user", "content": [*media, {"type": "text", "text": text}]}


def _given(sampling: Values) -> Values:
    """Return the sampling options that the user set on the command line."""
    return {name: value for name, value in sampling.items() if value is not None}


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the command line, standard input or a file.

    One newline at the end of an input is not part of the prompt: editors and ``echo`` add it.

    Raises: ConfigError: the prompt is given twice, or cannot be read.
    """
    from interposer.errors import ConfigError

    if prompt is not None and file is not None:
        raise ConfigError("--prompt and --prompt-file both give the prompt. Try: only one of them")
    if file is None and prompt is None:
        raise typer.BadParameter("no prompt is given. Try: --prompt TEXT, or --prompt-file FILE")
    if file is None and prompt != "-":
        return prompt or ""
    name = "standard input" if file is None else f"--prompt-file {file}"
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        text = data.decode()
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read: {error.strerror}. Try: a file with the prompt"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is no text in UTF-8: {error.reason} at byte {error.start}. "
            "Try: convert it, for example with iconv -t UTF-8"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def load_with_progress(
    load: Callable[..., LanguageModel], path: Path, **options: Any
) -> LanguageModel:
    """Load a model for one request at a time, with a progress bar if stderr is a terminal.

    Args:
        load: ``interposer_engine.load``, or that of launched ranks.
        options: arguments of ``load``.
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

        return load(path, progress=advance, **{"max_sequences": 1, **options})


def speed(arrivals: list[float]) -> dict[str, float]:
    """Return the seconds to the first token, and the tokens per second after the first token."""
    span = arrivals[-1] - arrivals[0]
    # The first token has the prefill's latency, so the rate counts the tokens after it.
    rate = (len(arrivals) - 1) / span if span > 0 else 0.0
    return {"time_to_first_token_s": arrivals[0], "tokens_per_second": rate}


def peak_memory(lm: LanguageModel) -> int | None:
    """Return the peak memory of this process in bytes; None if the platform reports none."""
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
        f"{count} token{'s' if count != 1 else ''} ({reason})",
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


_HELP = """\
/clear         forget the conversation
/system TEXT   set the system message, and forget the conversation
/image FILE    add a picture to the next message
/audio FILE    add a sound to the next message
/exit          end; so does Ctrl-D
Ctrl-C stops an answer; the part shown so far stays in the conversation."""


@takes(sampling=sampling_options(), options=load_options(without=("max_sequences",)))
def chat(
    model_dir: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, name on the hub such as Qwen/Qwen3-0.6B, or file of a plugin's "
            "format, such as GGUF.",
        ),
    ],
    *,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens per answer.")
    ] = 2048,
    sampling: Values,
    template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file with a chat template, instead of the model's.",
        ),
    ] = None,
    options: Values,
    tensor_parallel: TensorParallel = 1,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
) -> None:
    """Talk with the model in the terminal.

    The default of each sampling option is the value in the model's generation_config.json.
    """
    config = policy(kernel, platform, locked)
    with frozen_imports():
        discover_plugins(config)
        from interposer_engine._distributed.launcher import launched
        from interposer_engine._sampling_params import SamplingParams

    settings = {**_given(sampling), "max_new_tokens": max_new_tokens}
    SamplingParams(**settings)  # refuses wrong values before the model is loaded
    template_text = None if template is None else template.read_text(encoding="utf-8")
    with launched(tensor_parallel, config) as load:
        lm = load_with_progress(load, model_dir, config=config, **options)
        settings = {**lm.suggested, **settings}
        conversation = _Conversation(lm, system, settings, template_text)
        conversation.check()
        context = lm.engine.model.config.max_position_embeddings
        _say(f"{model_dir}: {context} tokens of context. /help")
        _talk(conversation)


def _talk(conversation: _Conversation) -> None:
    """Answer the user's messages until the end of the input."""
    from interposer.errors import RequestError

    for line in _lines():
        command, _, argument = line.partition(" ")
        if command == "/exit":
            break
        if command == "/help":
            _say(_HELP)
        elif command in ("/clear", "/system"):
            conversation.begin(argument.strip() if command == "/system" else conversation.system)
        elif command in ("/image", "/audio"):
            try:
                kind: Literal["image", "audio"] = "image" if command == "/image" else "audio"
                conversation.attach(kind, Path(argument.strip()))
            except RequestError as error:
                _say(f"error: {error}")
        elif command.startswith("/"):
            _say(f"Unknown command {command}.\n{_HELP}")
        elif line.strip():
            try:
                _say(conversation.answer(line, lambda text: print(text, end="", flush=True)))
            except RequestError as error:
                _say(f"error: {error}\nThe conversation is unchanged. Try: /clear")


class _Conversation:
    """The messages of a terminal chat, and the settings of the next answer."""

    def __init__(
        self,
        lm: LanguageModel,
        system: str | None,
        settings: dict[str, Any],
        template: str | None,
    ) -> None:
        self._lm = lm
        self._settings = settings
        self._template = template
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forget all messages and set the system message."""
        self.system = system
        self._media: list[Media] = []
        self._messages: list[dict[str, Any]] = (
            [{"role": "system", "content": system}] if system else []
        )

    def attach(self, kind: Literal["image", "audio"], path: Path) -> None:
        """Add a picture or a sound to the next message.

        Raises: RequestError: the model takes no such media, or there is no such file.
        """
        from interposer.errors import RequestError

        if kind not in self._lm.media_kinds:
            noun = {"image": "pictures", "audio": "sounds"}[kind]
            advice = self._lm.media_advice or "Try: another model"
            raise RequestError(f"{self._lm.path} has no encoder for {noun}. {advice}")
        (medium,) = _media(kind, [path])
        if not medium.content.is_file():
            raise RequestError(f"{str(medium.content)!r} is no file. Try: /{kind} FILE")
        self._media.append(medium)

    def check(self) -> None:
        """Raise RequestError if the model has no usable chat template."""
        self.prompt({"role": "user", "content": ""})

    def prompt(self, message: dict[str, Any]) -> list[int | EmbeddedInput]:
        """Return the prompt of the conversation with ``message`` as the next one."""
        return self._lm.chat_prompt([*self._messages, message], template=self._template)

    def answer(self, text: str, show: Callable[[str], None]) -> str:
        """Stream an answer to ``show``, append question and answer, and return statistics."""
        from interposer_engine._embedded_input import num_tokens

        media, self._media = self._media, []
        message = _user_message(text, media) if media else {"role": "user", "content": text}
        prompt = self.prompt(message)
        started = time.perf_counter()
        parts: list[str] = []
        arrivals: list[float] = []
        reason: str | None = "stopped"
        stream = self._lm.stream(prompt, **self._settings)
        with suppress(KeyboardInterrupt):
            for delta in stream:
                arrivals.append(time.perf_counter() - started)
                parts.append(delta.text)
                show(delta.text)
                reason = delta.finish_reason
        # After Ctrl-C, frees the request's pages in the engine.
        stream.close()  # type: ignore[attr-defined]
        show("\n")
        # An interrupted answer stays in the conversation as far as it was shown.
        self._messages += [
            message,
            {"role": "assistant", "content": "".join(parts)},
        ]
        if not arrivals:
            return f"no token ({reason})"
        rates = speed(arrivals)
        context = self._lm.engine.model.config.max_position_embeddings
        return (
            f"{len(arrivals)} tokens ({reason or 'stopped'}), "
            f"first after {rates['time_to_first_token_s'] * 1e3:.0f} ms, "
            f"then {rates['tokens_per_second']:.1f} tokens/s, "
            f"{num_tokens(prompt) + len(arrivals)} of {context} tokens of context"
        )


def _lines() -> Iterator[str]:
    """Yield the lines that the user enters, until the end of the input or an interrupt."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        with suppress(ImportError):
            import readline  # noqa: F401  importing it gives input() editing and history
    while True:
        try:
            yield input("> " if is_typed else "")
        except (EOFError, KeyboardInterrupt):
            if is_typed:
                print()
            return


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
