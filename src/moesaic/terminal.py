"""A chat in the terminal with any server of OpenAI's API; the standard library is all it needs."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any

from moesaic.errors import MoesaicError

HELP = "Ctrl-C stops an answer, /new forgets the conversation, /exit or Ctrl-D leaves."

Read = Callable[[], str]
"""Returns the next line of the user; raises ``EOFError`` when there is none."""
Write = Callable[[str], None]


class ChatError(MoesaicError):
    """The server cannot be reached or refused; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatServer:
    """A server of OpenAI's API by its address, with or without ``/v1``."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    """Longest silence, in seconds."""

    def models(self) -> list[str]:
        """Return the names of the models that the server has. Raises: ``ChatError``."""
        with closing(self._open("models", None)) as response:
            try:
                return [str(entry["id"]) for entry in json.load(response)["data"]]
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(f"{self.url} lists no models; check that it is a server of OpenAI's API") from error

    def answer(self, body: dict[str, Any]) -> Generator[str, None, None]:
        """Yield the text of a streamed chat completion (Any: JSON values) as it comes; closing it cancels.

        Raises: ``ChatError``, also for an error within the stream.
        """
        with closing(self._open("chat/completions", {**body, "stream": True})) as response:
            try:
                yield from filter(None, map(_text, _events(response)))
            except (OSError, HTTPException) as error:
                raise ChatError(f"the connection to {self.url} broke ({_cause(error)}); ask again") from error

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        address = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(address, data=data, headers=headers)  # the user's own URL
            response: HTTPResponse = urllib.request.urlopen(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            raise ChatError(f"{address} answers {error.code}: {_message(error.read())}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise ChatError(
                f"{address} cannot be reached ({_cause(error)}); check the address, and that a server runs there: "
                "moesaic serve MODEL"
            ) from error
        return response


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was said, and how the model is asked to go on."""

    server: ChatServer
    model: str
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of each request (Any: JSON values)."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, write: Write) -> bool:
        """Send ``text``, write the answer as it comes; return False if Ctrl-C stopped it. What came is kept.

        Raises: ``ChatError``; the conversation is then as before.
        """
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*before, *self.messages, question], **self.settings}
        parts: list[str] = []
        is_whole = True
        with closing(self.server.answer(body)) as answer:
            try:
                for part in answer:
                    parts.append(part)
                    write(part)
            except KeyboardInterrupt:
                is_whole = False
        self.messages += [question, {"role": "assistant", "content": "".join(parts)}]
        return is_whole


def talk(conversation: Conversation, read: Read, write: Write, *, keeps_going: bool) -> None:
    """Take lines until there are no more; with ``keeps_going`` an error is written and the next line taken.

    Raises: ``ChatError`` otherwise.
    """
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line == "/new":
            conversation.messages.clear()
        elif line in ("/help", "/?"):
            write(f"{HELP}\n")
        elif line:
            _say(conversation, line, write, keeps_going=keeps_going)


def _say(conversation: Conversation, line: str, write: Write, *, keeps_going: bool) -> None:
    try:
        is_whole = conversation.ask(line, write)
    except ChatError as error:
        if not keeps_going:
            raise
        write(f"{type(error).__name__}: {error}\n")
    else:
        write("\n" if is_whole else " [stopped]\n")


def _events(response: HTTPResponse) -> Iterator[Any]:  # Any: JSON values
    """Yield the data of each server-sent event up to ``[DONE]``."""
    for raw in response:
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _text(event: Any) -> str:  # Any: JSON values
    """Return what an event adds. Raises: ``ChatError`` if it is an error."""
    if "error" in event:
        raise ChatError(f"the server ended the answer: {_message(json.dumps(event).encode())}")
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return str(delta.get("reasoning_content") or "") + str(delta.get("content") or "")


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's shape, or the beginning of whatever it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace").strip()[:200] or "no message"


def _cause(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error) or type(error).__name__
