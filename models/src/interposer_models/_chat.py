"""Chat templates: render messages as the prompt format that a model was trained with.

A template is a program of the model's publisher. transformers renders templates in a sandbox.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from interposer.errors import RequestError
from interposer_models._calls import call_constraint
from interposer_models._constraint import Constraint
from interposer_models._messages import Message, check_roles, plain_messages


class ChatRenderer:
    """Renders messages as a prompt, and parses answers as messages.

    Args:
        tokenizer: Tokenizer of transformers, which holds the template.
        path: Path of the model, for error texts.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self._tokenizer = tokenizer
        self._path = path

    def token_ids(
        self,
        messages: Iterable[Message],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
        template: str | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Return the token ids of the prompt for the next message of the assistant.

        Texts of control tokens inside messages are tokenized as normal text, so that no message can
        end itself and begin another one; transformers does so from 5.23 on.

        Raises: RequestError: a message is malformed; there is no template; the template refuses the
            messages; or the template does not name an unusual role.
        """
        read_template = self._template_text(template)
        plain = plain_messages(messages, read_template)
        if template is None and not self._tokenizer.chat_template:
            raise RequestError(
                f"{self._path} holds no chat template, so that messages cannot be written as the "
                "prompt that it was trained with. Try: generate() with a text, or template=..."
            )
        render = self._tokenizer.apply_chat_template
        # Options become keyword arguments, so they must not shadow parameters of transformers.
        parameters = inspect.signature(render).parameters.keys() - {"documents", "self"}
        if reserved := sorted(parameters & options.keys()):
            # One of these settings would let messages end themselves.
            raise RequestError(
                f"{reserved[0]!r} is a setting of transformers and no variable of a chat template. "
                "Try: leave it out"
            )
        sanitizing = (
            {"sanitize_control_tokens": True} if "sanitize_control_tokens" in parameters else {}
        )
        try:
            prompt_ids = render(
                plain,
                tools=None if tools is None else list(tools),
                chat_template=template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **sanitizing,
                **options,
            )
        except Exception as error:  # templates can raise any error, and call functions in options
            raise RequestError(
                f"The chat template of {self._path} refuses these messages: "
                f"{type(error).__name__}: {error}"
            ) from error
        check_roles(plain, read_template)
        # A template that ignores tools renders the same prompt without tools.
        if tools and list(prompt_ids) == self.token_ids(plain, None, template, options):
            raise RequestError(
                f"The chat template of {self._path} does not write tools, so that the model would "
                "not know of them. Try: leave tools out, or template=... that writes them"
            )
        return list(prompt_ids)

    def plain(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Return messages as plain dicts with texts as contents, for the checkpoint's template.

        Raises: RequestError: a message is malformed.
        """
        return plain_messages(messages, self._template_text(None))

    def _template_text(self, template: str | None) -> str:
        """Return ``template``, or the text of all templates of the checkpoint."""
        templates = self._tokenizer.chat_template if template is None else template
        return "\n".join(templates.values()) if isinstance(templates, Mapping) else templates or ""

    def parsed(
        self,
        token_ids: Sequence[int],
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    ) -> dict[str, Any] | None:
        """Parse an answer as a message, with the response template of the checkpoint.

        Args:
            token_ids: Tokens of the answer, including an end token.
            prompt: Tokens of the prompt.
            tools: Tools of the prompt; the schemas give the types of call arguments.
        Returns: ``content`` and other parts that the template distinguishes, such as
            ``tool_calls``; None if the checkpoint has no response template.
        Raises: RequestError: the answer does not match the template.
        """
        if getattr(self._tokenizer, "response_template", None) is None:
            return None
        try:
            message = self._tokenizer.parse_response(
                list(token_ids), prefix=list(prompt), tools=None if tools is None else list(tools)
            )
        except Exception as error:  # the template is untrusted data of the model's publisher
            raise RequestError(
                f"The response template of {self._path} does not read the answer: "
                f"{type(error).__name__}: {error}"
            ) from error
        return dict(message)

    def call_constraint(self, tools: Sequence[Mapping[str, Any]]) -> Constraint:
        """Return the constraint that allows exactly one call of one of ``tools``.

        Raises: RequestError: the response template does not define how calls are written.
        """
        added_tokens = self._tokenizer.added_tokens_decoder
        special_ids = {
            token.content: index for index, token in added_tokens.items() if token.special
        }
        template = getattr(self._tokenizer, "response_template", None)
        return call_constraint(template, tools, special_ids)
