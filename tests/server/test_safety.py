"""What keeps strangers out, bounds what one request can take, and keeps one user's words from another."""

import http.client
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

from moesaic import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.engine.thread_client import ThreadEngineClient
from moesaic.errors import ConfigError
from moesaic.models.files import load_tokenizer
from moesaic.models.hf import HFCausalLM
from moesaic.models.loader import load_model
from moesaic.server.app import create_app
from moesaic.server.served_model import ServedModel
from moesaic.server.settings import ServerConfig
from moesaic.testing.http import running

CONFIG = EngineConfig(device="cpu", num_kv_blocks=64, max_model_len=256)
COMPLETION = {"prompt": "Hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
KEY = "sk-the-first-key"
OTHER = "sk-the-other-key"

MakeApp = Callable[..., FastAPI]


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HFCausalLM:
    return load_model(tiny_dir)


@pytest.fixture(scope="module")
def make_app(model: HFCausalLM, tiny_dir: Path) -> MakeApp:
    def make(**settings: Any) -> FastAPI:
        tokenizer = load_tokenizer(tiny_dir)
        served = ServedModel(names=("tiny",), root="tiny", max_model_len=256, tokenizer=tokenizer)
        client = ThreadEngineClient(EngineCore(model, CONFIG), load_tokenizer(tiny_dir))
        return create_app(client, served, CONFIG, ServerConfig(**settings))

    return make


@pytest.fixture(scope="module")
def client(make_app: MakeApp) -> Iterator[TestClient]:
    """A server with two keys and small limits."""
    with ExitStack() as stack:
        app = make_app(api_key=(KEY, OTHER), max_body_bytes=20_000, max_prompts_per_request=8)
        yield stack.enter_context(TestClient(app))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"X-Api-Key": KEY},
        {"Authorization": "Bearer schlüssel".encode("latin-1")},
    ],
)
def test_without_a_key_only_health_answers(client: TestClient, headers: Any) -> None:
    for path in ("/v1/models", "/v1/config", "/v1/stats", "/version", "/openapi.json", "/nothing"):
        response = client.get(path, headers=headers)
        assert response.status_code == 401, path
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 401
    assert client.get("/health", headers=headers).status_code == 200


def test_every_route_but_health_and_the_page_needs_a_key(make_app: MakeApp) -> None:
    app = make_app(api_key=(KEY,), ui=True)
    with TestClient(app) as client:
        for route in app.routes:
            path = getattr(route, "path", "").replace("{name:path}", "tiny")
            for method in getattr(route, "methods", None) or ():
                is_refused = client.request(method, path).status_code == 401
                assert is_refused == (path not in ("/health", "/ui")), path


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("key", [KEY, OTHER])
def test_each_key_opens_the_server(client: TestClient, key: str, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {key}"}
    assert client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200


def test_keys_come_from_a_file_too(make_app: MakeApp, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n\n  second-line  \n")
    with TestClient(make_app(api_key=(KEY,), api_key_file=str(file))) as client:
        for key in (KEY, "from-file", "second-line"):
            assert client.get("/v1/models", headers=bearer(key)).status_code == 200
        assert client.get("/v1/models", headers=bearer("")).status_code == 401


@pytest.mark.parametrize(("text", "words"), [("", "holds no key"), ("\n \n", "holds no key"), ("a b", "key 1")])
def test_a_file_without_sound_keys_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        ServerConfig(api_key_file=str(file)).keys()
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "none")).keys()


def test_a_key_is_shown_nowhere(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (KEY, "wrong-key"):
            client.get("/v1/models", headers=bearer(key))
        shown = client.get("/v1/config", headers=bearer(KEY))
    assert shown.json()["server"]["requires_api_key"] is True
    settings = ServerConfig(api_key=(KEY, OTHER))
    for text in (shown.text, repr(settings), str(settings.shown()), caplog.text):
        assert not any(key in text for key in (KEY, OTHER, "wrong-key"))


@pytest.mark.parametrize("keys", [KEY, (KEY, ""), (KEY, "two words"), (KEY, "tab\t"), (KEY, "ü"), [KEY]])
def test_a_key_that_no_header_can_carry_is_refused_unnamed(keys: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(api_key=keys)
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    "field",
    [
        {"max_body_bytes": 0},
        {"max_header_bytes": 100},
        {"max_prompts_per_request": 0},
        {"allowed_origins": ("example.org",)},
        {"port": 70_000},
    ],
)
def test_an_impossible_setting_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        ServerConfig(**field)


def test_a_body_over_the_limit_is_refused_with_the_limit(client: TestClient) -> None:
    response = client.post("/v1/completions", json={**COMPLETION, "user": "x" * 20_000}, headers=bearer(KEY))
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("ContentTooLargeError", 413)
    assert "20000 bytes (max_body_bytes)" in error["message"]
    below = client.post("/v1/completions", json={**COMPLETION, "user": "x" * 19_000}, headers=bearer(KEY))
    assert below.status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_100_megabytes_are_refused_long_before_they_are_sent(make_app: MakeApp, key: str, is_chunked: bool) -> None:
    """The answer comes while the client has sent no more than the limit: the server keeps none of the rest."""
    piece, limit = b"x" * 2**16, 2**20
    with running(make_app(api_key=(KEY,), max_body_bytes=limit)) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Authorization", f"Bearer {key}")
        connection.putheader(*(("Transfer-Encoding", "chunked") if is_chunked else ("Content-Length", str(10**8))))
        connection.endheaders()
        is_seen_by_length = key != KEY or not is_chunked
        for _ in range(1 if is_seen_by_length else 1 + limit // len(piece)):
            connection.send(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
        assert connection.getresponse().status == (413 if key == KEY else 401)
        connection.close()


def test_a_list_of_100_000_prompts_is_refused_before_any_is_tokenised(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[object] = []
    encode = ServedModel.encode

    async def counted(self: ServedModel, prompt: Any, **options: Any) -> Any:
        tokenised.append(prompt)
        return await encode(self, prompt, **options)

    monkeypatch.setattr(ServedModel, "encode", counted)
    for body in ({"prompt": ["x"] * 3000}, {"prompt": [[1]] * 3000}, {"prompt": ["x"] * 3, "n": 3}):
        response = client.post("/v1/completions", json={**COMPLETION, **body}, headers=bearer(KEY))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "prompt"
        assert "(max_prompts_per_request)" in error["message"]
    assert tokenised == []
    within = client.post("/v1/completions", json={**COMPLETION, "prompt": ["x"] * 4, "n": 2}, headers=bearer(KEY))
    assert len(within.json()["choices"]) == 8


def test_browsers_are_let_in_by_origin_only(make_app: MakeApp, client: TestClient) -> None:
    origin, preflight = "https://chat.example.org", {"Access-Control-Request-Method": "POST"}
    asked = {"Origin": origin, **preflight, "Access-Control-Request-Headers": "authorization,content-type"}
    assert "access-control-allow-origin" not in client.options("/v1/completions", headers=asked).headers
    with TestClient(make_app(api_key=(KEY,), allowed_origins=(origin,))) as open_one:
        allowed = open_one.options("/v1/completions", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == origin
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = open_one.options("/v1/completions", headers={**asked, "Origin": "https://evil.example.org"})
        assert "access-control-allow-origin" not in refused.headers
        # A page must be able to read why it was refused.
        without_key = open_one.get("/v1/models", headers={"Origin": origin})
        assert (without_key.status_code, without_key.headers["access-control-allow-origin"]) == (401, origin)
        reply = open_one.get("/v1/models", headers={"Origin": origin, **bearer(KEY)})
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


def test_a_label_comes_back_and_is_no_key(client: TestClient) -> None:
    label = {"X-Request-Id": "team-7/run:1", **bearer(KEY)}
    replies = [client.post("/v1/completions", json=COMPLETION, headers=label) for _ in range(2)]
    assert [reply.headers["X-Request-Id"] for reply in replies] == ["team-7/run:1"] * 2
    assert replies[0].json()["id"] != replies[1].json()["id"]
    for given in ("", "x" * 129, "two words", "a\tb", "ü".encode().decode("latin-1")):
        reply = client.get("/health", headers={"X-Request-Id": given.encode("latin-1")})  # type: ignore[dict-item]
        assert reply.headers["X-Request-Id"].isalnum()
        assert reply.headers["X-Request-Id"] != given
    assert client.get("/v1/models").headers["X-Request-Id"]  # refusals have one


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_prompt_is_in_what_others_see(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """A secret is sent in every place that takes text, soundly and not; logs, stats and others' errors have none."""
    secret = "xyzzy-secret"
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**COMPLETION, "prompt": secret, "stream": stream}),
        ("/v1/completions", {**COMPLETION, "prompt": secret * 100, "stream": stream}),
        ("/v1/completions", {**COMPLETION, "prompt": [secret, 1], "stream": stream}),
        ("/v1/completions", {**COMPLETION, "prompt": secret, "temperature": secret}),
        ("/v1/completions", {**COMPLETION, "prompt": secret, "stop": secret, "user": secret}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": secret, "content": [{"type": secret}]}]}),
    ]
    with TestClient(make_app()) as client, caplog.at_level(logging.INFO):
        for path, body in bodies:
            client.post(path, json=body)
        client.post("/v1/completions", content=secret, headers={"Content-Type": "application/json"})
        seen = [client.get(path).text for path in ("/v1/stats", "/v1/config", "/health", "/v1/models")]
        seen += [client.post("/v1/completions", json={**COMPLETION, "temperature": -1}).text]
    assert not any(secret in text for text in [*seen, caplog.text])


def test_no_route_writes_anything_but_answers(make_app: MakeApp) -> None:
    writing = {
        (method, route.path)
        for route in make_app().routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"GET", "HEAD", "OPTIONS"}
    }
    answers = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    assert writing <= {("POST", path) for path in answers}


def test_two_requests_with_one_label_both_complete(make_app: MakeApp) -> None:
    with running(make_app()) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        body = json.dumps({**COMPLETION, "max_tokens": 50}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: same\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        with ExitStack() as stack:
            pair = [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(2)]
            for one in pair:
                one.sendall(head.encode() + body)
            replies = [b"".join(iter(lambda one=one: one.recv(2**16), b"")) for one in pair]
    assert all(reply.startswith(b"HTTP/1.1 200") and b'"completion_tokens":50' in reply for reply in replies)
