"""Chats: messages as the prompt that a model was trained with, by its chat template.

Templates are programs of whoever published the model. transformers renders them in its sandbox.
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
    """Writes messages as a prompt.

    Args:
        tokenizer: one of transformers, which holds the template.
        path: of the model, for the text of errors.
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
        """Return the prompt that asks for the next message of the assistant.

        Texts of control tokens inside of messages are encoded as any other text, so that no message
        can end itself and begin another; transformers does so from 5.23 on.

        Raises: RequestError: a message is malformed, or there is no template, or it refuses them,
            or does not name an unusual role.
        """
        read_template = self._template_text(template)
        plain = plain_messages(messages, read_template)
        if template is None and not self._tokenizer.chat_template:
            raise RequestError(
                f"{self._path} holds no chat template, so that messages cannot be written as the "
                "prompt that it was trained with. Try: generate() with a text, or template=..."
            )
        render = self._tokenizer.apply_chat_template
        own = inspect.signature(render).parameters.keys() - {"documents", "self"}
        if taken := sorted(own & options.keys()):
            # One of them would let messages end themselves.
            raise RequestError(
                f"{taken[0]!r} is a setting of transformers and no variable of a chat template. "
                "Try: leave it out"
            )
        fixed = {"sanitize_control_tokens": True} if "sanitize_control_tokens" in own else {}
        try:
            found = render(
                plain,
                tools=None if tools is None else list(tools),
                chat_template=template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **fixed,
                **options,
            )
        except Exception as error:  # a template raises what it likes, and calls what it is given
            raise RequestError(
                f"The chat template of {self._path} refuses these messages: "
                f"{type(error).__name__}: {error}"
            ) from error
        check_roles(plain, read_template)
        if tools and list(found) == self.token_ids(plain, None, template, options):
            raise RequestError(
                f"The chat template of {self._path} does not write tools, so that the model would "
                "not know of them. Try: leave tools out, or template=... that writes them"
            )
        return list(found)

    def plain(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Return messages as the checkpoint's template reads them, whose contents are texts.

        Raises: RequestError: a message is malformed.
        """
        return plain_messages(messages, self._template_text(None))

    def _template_text(self, template: str | None) -> str:
        """Return ``template``, or all templates of the checkpoint."""
        own = self._tokenizer.chat_template if template is None else template
        return "\n".join(own.values()) if isinstance(own, Mapping) else own or ""

    def parsed(
        self,
        token_ids: Sequence[int],
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    ) -> dict[str, Any] | None:
        """Return an answer as a message, by the response template of the checkpoint.

        Args:
            token_ids: the answer's, an ending one included.
            prompt: what it answers.
            tools: those of the prompt, by whose schemas arguments of calls get their types.
        Returns: ``content``, and what else the template tells apart, such as ``tool_calls``; None
            where the checkpoint has no such template.
        Raises: RequestError: the answer is not of the form that the template describes.
        """
        if getattr(self._tokenizer, "response_template", None) is None:
            return None
        try:
            found = self._tokenizer.parse_response(
                list(token_ids), prefix=list(prompt), tools=None if tools is None else list(tools)
            )
        except Exception as error:  # the template is data of whoever published the model
            raise RequestError(
                f"The response template of {self._path} does not read the answer: "
                f"{type(error).__name__}: {error}"
            ) from error
        return dict(found)

    def call_constraint(self, tools: Sequence[Mapping[str, Any]]) -> Constraint:
        """Return the constraint to one call of one of ``tools``, by the response template.

        Raises: RequestError: how the model writes calls is not known.
        """
        added = self._tokenizer.added_tokens_decoder
        specials = {token.content: index for index, token in added.items() if token.special}
        template = getattr(self._tokenizer, "response_template", None)
        return call_constraint(template, tools, specials)
