"""What breaks a server, done to one whose engine is a process: bad bodies, failing steps, a full queue, its death."""

import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moesaic import EngineConfig
from moesaic.engine.process import ProcessEngineClient
from moesaic.models.files import load_tokenizer
from moesaic.server.app import create_app
from moesaic.server.main import served_model
from moesaic.server.settings import ServerConfig
from moesaic.testing import raw
from moesaic.testing.faults import UNLUCKY_SEED, load_stumbling
from moesaic.testing.http import running

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(device="cpu", num_kv_blocks=600, max_batch_size=2, max_waiting_requests=4)
COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
ENDLESS = {**COMPLETION, "max_tokens": 4000}
HUGE = (2**63, 2**64, -(2**70), 10**400)
HALF = "@half@"
"""Stands for a lone surrogate, which JSON can spell and UTF-8 cannot."""
NESTED = "@nested@"
"""Stands for a deep value."""


@contextmanager
def serving(tiny_dir: Path) -> Iterator[tuple[str, ProcessEngineClient]]:
    engine = ProcessEngineClient(tiny_dir, CONFIG, partial(load_tokenizer, tiny_dir), make_core=load_stumbling)
    settings = ServerConfig(served_model_name=("tiny",), max_prompts_per_request=64)
    served = served_model("tiny", tiny_dir, engine.launch()["max_model_len"], settings)
    with running(create_app(engine, served, CONFIG, settings)) as url:
        yield url, engine


@pytest.fixture(scope="module")
def url(tiny_dir: Path) -> Iterator[str]:
    with serving(tiny_dir) as (address, engine):
        yield address
        assert engine.is_healthy


def wait_for(url: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_so(found := raw.ask(url, raw.get("/v1/stats")).json()):
        assert time.monotonic() < end_s, found
        time.sleep(0.01)


def fill(url: str, stack: ExitStack) -> list[socket.socket]:
    """Begin as many requests as run, and then as many as may wait; every other one streams."""
    waiters = []
    for i in range(6):
        waiters.append(stack.enter_context(raw.connected(url)))
        waiters[i].sendall(raw.post("/v1/completions", ENDLESS | {"stream": i % 2 == 0}))
        if i == 1:
            wait_for(url, lambda found: found["num_running"] == 2)
    wait_for(url, lambda found: found["num_waiting"] == 4)
    return waiters


@pytest.fixture(autouse=True)
def _serves_on(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "url" in request.fixturenames:
        url = request.getfixturevalue("url")
        wait_for(url, lambda found: not found["num_requests_by_status"])
        assert raw.ask(url, raw.post("/v1/completions", COMPLETION)).status == 200


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield routes and bodies; what is refused and what is served is not the question here."""
    for field in ("seed", "max_tokens", "min_tokens", "top_k", "priority", "n", "logprobs", "truncate_prompt_tokens"):
        yield from (("/v1/completions", written(COMPLETION | {field: value})) for value in HUGE)
    for field in ("temperature", "top_p", "timeout_s", "presence_penalty", "logit_bias", "seed"):
        for number in (b"NaN", b"-Infinity", b"1e999", b"9" * 5000):
            yield "/v1/completions", written(COMPLETION | {field: HALF}).replace(b'"\\ud800"', number)
    for field in ("stop_token_ids", "allowed_token_ids", "prompt"):
        yield from (("/v1/completions", written(COMPLETION | {field: [1, value]})) for value in HUGE)
    yield "/v1/completions", written(COMPLETION | {"logit_bias": {str(2**70): 1}})
    yield "/detokenize", written({"model": "tiny", "tokens": [2**70]})
    for field in ("model", "prompt", "user", "stop", "guided_regex", "guided_grammar", "nonsense", HALF):
        yield "/v1/completions", written(COMPLETION | {field: HALF})
    for field in ("stop", "guided_choice"):
        yield "/v1/completions", written(COMPLETION | {field: [HALF]})
    yield "/v1/completions", written(COMPLETION | {"guided_json": {"const": HALF}})
    yield "/v1/chat/completions", written(CHAT | {"chat_template_kwargs": {HALF: HALF}})
    yield "/v1/chat/completions", written(CHAT | {"messages": [{"role": HALF, "content": HALF, "name": HALF}]})
    for depth in (50, 900, 100_000):
        yield "/v1/completions", b"[" * depth + b"]" * depth
        for field in ("prompt", "nonsense", "guided_json", "stop", "logit_bias", "response_format", "stream_options"):
            yield "/v1/completions", nested(COMPLETION | {field: NESTED}, depth)
        for field in ("messages", "tools", "chat_template_kwargs", "tool_choice"):
            yield "/v1/chat/completions", nested(CHAT | {field: NESTED}, depth)
        yield "/v1/completions", written(COMPLETION | {"guided_regex": "(" * depth + "a" + ")" * depth})
    for body in (b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"prompt":"\xff"}', b"\0" * 99, "{}".encode("utf-16")):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            yield path, body
    for prompts in (["x"] * 10**5, [[1]] * 10**5, [1] * 10**5, []):
        yield "/v1/completions", written(COMPLETION | {"prompt": prompts})


def written(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode().replace(HALF.encode(), b"\\ud800")


def nested(body: dict[str, Any], depth: int) -> bytes:
    return written(body).replace(f'"{NESTED}"'.encode(), b'{"a":' * depth + b"1" + b"}" * depth)


def test_no_body_is_answered_with_an_error_of_the_server_s(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each gets a reply of 200 or an error of the 400s in the one shape."""
    bodies = list(hostile_bodies())
    with ThreadPoolExecutor(4) as pool:  # the queue holds four
        replies = list(pool.map(lambda one: raw.ask(url, raw.post(*one)), bodies))
    faults = []
    for (path, body), reply in zip(bodies, replies, strict=True):
        is_sound = reply.status == 200 or (400 <= reply.status < 500 and reply.json()["error"]["message"])
        if not is_sound or reply.status == 429:
            faults.append((path, body[:150], reply.status, reply.body[:200]))
    assert faults == []
    assert len(replies) > 150
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("is_chunked", [False, True])
def test_100_megabytes_are_read_without_being_kept(url: str, is_chunked: bool) -> None:
    """A client that sends on after its refusal: what it sends is thrown away, and the next request is served."""
    piece = b"x" * 10**5
    head = raw.post("/v1/completions", b"").partition(b"Content-Length")[0]
    head += b"Transfer-Encoding: chunked\r\n\r\n" if is_chunked else b"Content-Length: 100000000\r\n\r\n"
    with raw.connected(url) as connection:
        connection.sendall(head.replace(b"Connection: close\r\n", b""))
        before, grown = memory_bytes(), 0
        for i in range(1000):
            connection.sendall(b"186a0\r\n%b\r\n" % piece if is_chunked else piece)
            if i % 50 == 0:
                grown = max(grown, memory_bytes() - before)
        assert b"HTTP/1.1 413 " in connection.recv(2**16)
    assert grown < 80e6, "32 MiB may be kept until the limit is passed"


def memory_bytes() -> int:
    """Return the memory of this process, which the server is part of."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_raises_ends_its_request_with_an_error_and_no_other(url: str, stream: bool) -> None:
    unlucky = COMPLETION | {"seed": UNLUCKY_SEED, "stream": stream, "max_tokens": 50}
    reply = raw.ask(url, raw.post("/v1/completions", unlucky))
    error = reply.events()[-1]["error"] if stream else reply.json()["error"]
    assert reply.status == (200 if stream else 500)
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "OSError" in error["message"]
    assert "bad sector" not in error["message"], "what is inside stays inside"


def test_a_full_queue_refuses_the_next_and_frees_its_places_when_its_clients_leave(url: str) -> None:
    with ExitStack() as stack:
        fill(url, stack)
        for stream in (False, True):
            refused = raw.ask(url, raw.post("/v1/completions", COMPLETION | {"stream": stream}))
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "RateLimitError"
        assert raw.ask(url, raw.get("/health")).status == 200


def test_an_engine_that_is_killed_is_told_to_every_waiter(tiny_dir: Path) -> None:
    """To those that run, that wait for room, that stream and that do not; within a second on a quiet machine."""
    with serving(tiny_dir) as (url, engine), ExitStack() as stack:
        waiters = fill(url, stack)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        replies = [raw.parse(raw.rest_of(waiter)) for waiter in waiters]
        assert time.monotonic() - killed_s < 10
        for i, reply in enumerate(replies):
            is_stream = i % 2 == 0
            error = reply.events()[-1]["error"] if is_stream else reply.json()["error"]
            assert reply.status == (200 if is_stream else 503)
            assert (error["code"], "SIGKILL" in error["message"]) == (503, True)
        for request in (raw.get("/health"), raw.get("/v1/stats"), raw.post("/v1/completions", COMPLETION)):
            assert raw.ask(url, request).status == 503
        assert b"moesaic_engine_up" in raw.ask(url, raw.get("/metrics")).body
        assert engine.exit_code == 1
    assert engine.exit_code == 1
