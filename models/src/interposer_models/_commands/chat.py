"""The subcommand ``interposer chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interposer_models._commands.run import load_with_progress, speed
from interposer_tools.options import (
    Dtype,
    ExpertParallel,
    Kernels,
    Locked,
    PlatformName,
    Quantization,
    TensorParallel,
    policy,
)

if TYPE_CHECKING:
    from interposer_models._language_model import LanguageModel

_HELP = """\
/clear         forget the conversation
/system TEXT   set the system message, and forget the conversation
/exit          end; so does Ctrl-D
Ctrl-C stops an answer; the part shown so far stays in the conversation."""


def chat(
    model_dir: Annotated[
        Path, typer.Argument(help="A model directory, a name, or a file that a plugin reads.")
    ],
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 2048,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy; the default is that of generation_config.json."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    template: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A file with a chat template, instead of the model's.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    tensor_parallel: TensorParallel = 1,
    expert_parallel: ExpertParallel = False,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
) -> None:
    """Talk with the model in the terminal."""
    from interposer_models._parallel.launching import launched

    template_text = None if template is None else template.read_text(encoding="utf-8")
    config = policy(kernel, platform, locked)
    with launched(tensor_parallel, config) as load:
        lm = load_with_progress(
            load, model_dir, dtype, quantization, config, expert_parallel=expert_parallel
        )
        settings = {**lm.suggested, "max_new_tokens": max_new_tokens, "seed": seed}
        if temperature is not None:
            settings["temperature"] = temperature
        conversation = _Conversation(lm, system, settings, template_text)
        conversation.prompt("")  # fails early for a model without a template
        context = lm.engine.model.config.max_position_embeddings
        _say(f"{model_dir}: {context} tokens of context. /help")
        _talk(conversation)


def _talk(conversation: _Conversation) -> None:
    """Answer the user's lines until the end of the input."""
    from interposer.errors import RequestError

    for line in _lines():
        command, _, argument = line.partition(" ")
        if command == "/exit":
            break
        if command == "/help":
            _say(_HELP)
        elif command in ("/clear", "/system"):
            conversation.begin(argument.strip() if command == "/system" else conversation.system)
        elif command.startswith("/"):
            _say(f"Unknown command {command}.\n{_HELP}")
        elif line.strip():
            try:
                _say(conversation.answer(line, lambda text: print(text, end="", flush=True)))
            except RequestError as error:
                _say(f"error: {error}\nThe conversation is unchanged. Try: /clear")


class _Conversation:
    """The messages so far, and the settings of the next answer."""

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
        self._messages = [{"role": "system", "content": system}] if system else []

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of the conversation with ``text`` as the next user message."""
        messages = [*self._messages, {"role": "user", "content": text}]
        return self._lm.chat_prompt(messages, template=self._template)

    def answer(self, text: str, show: Callable[[str], None]) -> str:
        """Stream an answer to ``show``, remember question and answer, and return statistics."""
        prompt = self.prompt(text)
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
            {"role": "user", "content": text},
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
            f"{len(prompt) + len(arrivals)} of {context} tokens of context"
        )


def _lines() -> Iterator[str]:
    """Yield the user's lines until the end of the input or an interrupt."""
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
