"""The chat in the terminal, against a live server and against servers that fail."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.cli import app
from moesaic.config import EngineConfig
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig
from moesaic.terminal import ChatError, ChatServer, Conversation, talk
from moesaic.testing.http import running


@pytest.fixture(scope="module")
def url(tiny_dir: Path) -> Iterator[str]:
    settings = ServerConfig(served_model_name=("tiny",), api_key=("secret",))
    with running(load_app(str(tiny_dir), EngineConfig(num_kv_blocks=64), settings)[0]) as address:
        yield address


def conversation(url: str, **settings: object) -> Conversation:
    server = ChatServer(url=url, api_key="secret", timeout_s=20)
    return Conversation(server=server, model="tiny", settings={"max_tokens": 8, "temperature": 0, **settings})


def reader(*lines: str) -> Callable[[], str]:
    left = iter(lines)

    def read() -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_models_are_listed_whatever_the_address_ends_with(url: str, suffix: str) -> None:
    assert ChatServer(url=url + suffix, api_key="secret").models() == ["tiny"]


def test_answers_are_streamed_and_remembered(url: str) -> None:
    talked, parts = conversation(url, ignore_eos=True), list[str]()
    talk(talked, reader("hello", "", "again"), parts.append, keeps_going=False)
    roles = [message["role"] for message in talked.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert "".join(parts) == f"{talked.messages[1]['content']}\n{talked.messages[3]['content']}\n"
    assert len(parts) > 4, "the answer came in one piece"


def test_commands_of_the_conversation(url: str) -> None:
    talked, parts = conversation(url), list[str]()
    talk(talked, reader("hello", "/new", "/help", "/exit", "never sent"), parts.append, keeps_going=False)
    assert talked.messages == []
    assert "Ctrl-C" in parts[-1]


def test_an_interrupt_stops_the_answer_and_keeps_what_came(url: str) -> None:
    talked, parts = conversation(url, max_tokens=900, ignore_eos=True), list[str]()

    def write(text: str) -> None:
        parts.append(text)
        if len(parts) == 3:
            raise KeyboardInterrupt

    talk(talked, reader("count"), write, keeps_going=True)
    assert parts[-1] == " [stopped]\n"
    assert talked.messages[1]["content"] == "".join(parts[:3])


def test_errors_are_one_block_with_a_remedy(url: str) -> None:
    with pytest.raises(ChatError, match=r"answers 401: .*key"):
        ChatServer(url=url, api_key="wrong").models()
    with pytest.raises(ChatError, match=r"cannot be reached .*moesaic serve"):
        ChatServer(url="http://127.0.0.1:9", timeout_s=5).models()
    with pytest.raises(ChatError, match="cannot be reached"):
        ChatServer(url="no address").models()
    talked, parts = conversation(url), list[str]()
    talked.model = "other"
    talk(talked, reader("hello"), parts.append, keeps_going=True)
    assert "ChatError: " in parts[0]
    assert "'other' does not exist" in parts[0]
    assert talked.messages == []
    with pytest.raises(ChatError, match="'other' does not exist"):
        talk(talked, reader("hello"), parts.append, keeps_going=False)


@contextmanager
def answering(lines: list[str]) -> Iterator[str]:
    """A server that answers every request with these lines."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"{line}\n\n" for line in lines).encode())

        do_GET = do_POST  # noqa: N815  # the library names it so

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_other_servers_streams_are_read_too() -> None:
    delta = {"choices": [{"delta": {"reasoning_content": "so ", "content": None}}]}
    lines = [
        ": ping",
        "data: " + json.dumps(delta),
        'data: {"choices": []}',
        'data:{"choices":[{"delta":{"content":"é"}}]}',
    ]
    with answering([*lines, "data: [DONE]", "data: never read"]) as url:
        assert list(ChatServer(url=url).answer({})) == ["so ", "é"]
    with answering([*lines, 'data: {"error": {"message": "out of luck"}}']) as url:
        with pytest.raises(ChatError, match="ended the answer: out of luck"):
            list(ChatServer(url=url).answer({}))
        with pytest.raises(ChatError, match="lists no models"):
            ChatServer(url=url).models()


def test_lines_of_an_input_are_questions(url: str) -> None:
    options = ["chat", url, "--api-key", "secret", "--max-tokens", "4", "--temperature", "0", "--system", "be brief"]
    result = CliRunner().invoke(app, options, input="hello\nagain\n")
    assert result.exit_code == 0
    assert result.output.count("\n") >= 2
