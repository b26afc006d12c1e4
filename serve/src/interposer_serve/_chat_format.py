"""The response format of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interposer.errors import RequestError
from interposer_engine import Delta
from interposer_serve._formats import Answer, Format, Spell
from interposer_serve._messages import answer_message

_PARTIAL = "\N{REPLACEMENT CHARACTER}"


class ChatFormat(Format):
    """Formatter for the responses of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        spell: Spell,
        tells_logprobs: bool,
        parse: Callable[[list[int]], dict[str, Any] | None] | None,
    ) -> None:
        """Create the formatter of one request.

        Args:
            model: Name of the model in responses.
            spell: Returns the text of one token.
            tells_logprobs: Whether the response has log probabilities.
            parse: Parses the tokens of a complete answer that may call tools. A stream then sends
                such an answer only at the end. None if the request offers no tools.
        """
        super().__init__(model, spell, tells_logprobs)
        self._parse = parse

    def choice(self, answer: Answer) -> dict[str, Any]:
        """Return the choice object of a complete answer."""
        message = answer_message(answer.text, self._parsed(answer))
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.deltas),
            "finish_reason": _reason(answer, message),
        }

    def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the chunks for the newest token: role, text, and finish reason at the end."""
        newest, has_ended = answer.deltas[-1], answer.reason is not None
        deltas: list[dict[str, Any]] = []
        reason = answer.reason
        if len(answer.deltas) == 1:
            deltas.append({"role": "assistant", "content": ""})
        if self._parse is None:
            if newest.text or self.tells_logprobs:
                deltas.append({"content": newest.text})
        # Only a complete answer can be parsed, so send text or calls at the end.
        elif has_ended:
            message = self.choice(answer)["message"]
            reason = _reason(answer, message)
            calls = message.get("tool_calls", [])
            indexed_calls = [{"index": index, **call} for index, call in enumerate(calls)]
            del message["role"]  # sent in the first chunk
            deltas.append({**message, "tool_calls": indexed_calls} if indexed_calls else message)
        chunks = [self._chunk(answer.index, delta, None) for delta in deltas]
        if self.tells_logprobs and chunks:
            chunks[-1]["logprobs"] = self._logprobs(
                [newest] if self._parse is None else answer.deltas
            )
        return [*chunks, self._chunk(answer.index, {}, reason)] if has_ended else chunks

    def _parsed(self, answer: Answer) -> dict[str, Any] | None:
        try:
            return None if self._parse is None else self._parse(answer.token_ids)
        except RequestError:
            return None  # the answer does not match the response template, so send it as text

    @staticmethod
    def _chunk(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        if not self.tells_logprobs:
            return None
        return {"content": [self._token(delta) for delta in deltas], "refusal": None}

    def _token(self, delta: Delta) -> dict[str, Any]:
        likely = [self._entry(*entry) for entry in delta.top_logprobs]
        return {**self._entry(delta.token_id, delta.logprob), "top_logprobs": likely}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token_id)
        # U+FFFD stands for an incomplete character, whose bytes are unknown here.
        token_bytes = None if _PARTIAL in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": token_bytes}


def _reason(answer: Answer, message: dict[str, Any]) -> str | None:
    calls = answer.reason == "stop" and message.get("tool_calls")
    return "tool_calls" if calls else answer.reason
