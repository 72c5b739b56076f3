"""Readers on real sockets that are slow, stall or vanish: no token is lost, no other stream waits, nothing is kept."""

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from moesaic import EngineConfig
from moesaic.server.main import load_app
from moesaic.server.settings import ServerConfig
from moesaic.testing import raw
from moesaic.testing.http import running

CONTEXT = 8192
SETTINGS = {"device": "cpu", "num_kv_blocks": 2048, "enable_chunked_prefill": True, "prefill_chunk_size": 64}
CHARACTERS = "aé€\N{GRINNING FACE}\N{MUSICAL SYMBOL G CLEF}ß\N{COMBINING ACUTE ACCENT}漢"
"""Of one to four bytes, each of which is a token of ``tiny``."""
GENEROUS_S = 20.0
"""A hard bound on what takes a step or two; a machine in company may be slow."""


@pytest.fixture(scope="module")
def url(tiny_dir: Path) -> Iterator[str]:
    """A server whose engine no other test uses: its counts are read."""
    app, _ = load_app(str(tiny_dir), EngineConfig(**SETTINGS), ServerConfig(served_model_name=("tiny",)))
    with running(app, send_buffer_bytes=2**14) as address:
        yield address


def stats(url: str) -> dict[str, Any]:
    found: dict[str, Any] = raw.ask(url, raw.get("/v1/stats")).json()
    return found


def wait_for(url: str, is_so: Any) -> dict[str, Any]:  # Any: a predicate of stats
    end_s = time.monotonic() + GENEROUS_S
    while not is_so(found := stats(url)):
        assert time.monotonic() < end_s, found
        time.sleep(0.01)
    return found


def is_idle(found: dict[str, Any]) -> bool:
    return bool(found["kv_blocks_free"] == found["kv_blocks_total"] and not found["num_requests_by_status"])


@pytest.fixture(autouse=True)
def _nothing_is_left(url: str) -> Iterator[None]:
    yield
    wait_for(url, is_idle)


def a_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a sound request; half of them are forced to write characters of many bytes."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": rng.randint(1, 60), "seed": rng.randint(0, 9)}
    body["temperature"] = rng.choice([0, 0, 1])
    if rng.random() < 0.5:
        text = "".join(rng.choices(CHARACTERS, k=rng.randint(1, 12)))
        body |= {"guided_choice": [text, text[::-1] + "?"], "max_tokens": 60}
    if rng.random() < 0.3:
        body["n"] = 2
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("aeiou "), "\N{GRINNING FACE}"]
    prompt = "".join(rng.choices("Hello, world é", k=rng.randint(1, 150)))
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": prompt}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}


def read(url: str, request: bytes, manner: str, rng: random.Random) -> bytes:
    """Return all that came, read in a manner; nothing for one who vanishes."""
    with raw.connected(url, receive_buffer_bytes=rng.choice([None, 8192])) as connection:
        connection.sendall(request)
        if manner == "vanishing":
            connection.recv(rng.randint(1, 2000))
            if rng.random() < 0.5:
                raw.reset(connection)
            return b""
        got = b""
        while manner == "slow" and len(got) < 3000 and (data := connection.recv(rng.randint(1, 200))):
            got += data
            time.sleep(rng.random() * 0.004)
        if manner == "stalling":
            got = connection.recv(rng.randint(1, 300))
            time.sleep(0.5)
        return got + raw.rest_of(connection)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_has_the_text_of_the_whole_reply_however_it_is_read(url: str, seed: int) -> None:
    rng = random.Random(seed)
    requests = [a_request(rng) for _ in range(14)]
    manners = ["fast", "slow", "stalling", "vanishing"] * 7
    wholes = [raw.ask(url, raw.post(path, body)).json()["choices"] for path, body in requests]

    def streamed(i: int) -> bytes:
        path, body = requests[i // 2]  # twice, in two manners
        return read(url, raw.post(path, body | {"stream": True}), manners[i], random.Random(100 * seed + i))

    with ThreadPoolExecutor(len(manners)) as pool:
        replies = list(pool.map(streamed, range(len(manners))))
    for i, reply in enumerate(replies):
        if manners[i] != "vanishing":
            events = raw.parse(reply).events()
            expected = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in wholes[i // 2]}
            assert raw.texts(events) == expected, (manners[i], requests[i // 2])
            ends = [c["index"] for event in events for c in event["choices"] if c["finish_reason"] is not None]
            assert sorted(ends) == sorted(expected)


def test_characters_of_many_tokens_come_whole_in_every_event(url: str) -> None:
    """Each byte is a token here, so a character takes up to four."""
    body = {"model": "tiny", "prompt": "x", "guided_choice": [CHARACTERS], "max_tokens": 60, "stream": True}
    events = raw.ask(url, raw.post("/v1/completions", body | {"return_token_ids": True})).events()
    pieces = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in pieces) == CHARACTERS
    num_tokens = sum(len(choice["token_ids"]) for choice in pieces)
    assert num_tokens >= len(CHARACTERS.encode())
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(choice["text"] for choice in pieces)


def test_readers_who_do_not_read_at_all_hold_nobody_up(url: str) -> None:
    """The others' streams end while the stalled ones, far more than the sockets' buffers hold, have not been read."""
    long = {"model": "tiny", "prompt": "x", "max_tokens": 250, "temperature": 0, "ignore_eos": True, "stream": True}
    stalled = raw.post("/v1/completions", long | {"logprobs": 20, "stream_options": {"include_usage": True}})
    short = raw.post("/v1/completions", long | {"max_tokens": 40, "prompt": "y"})
    with (
        raw.connected(url, receive_buffer_bytes=2048) as first,
        raw.connected(url, receive_buffer_bytes=2048) as second,
    ):
        for one in (first, second):
            one.sendall(stalled)
        wait_for(url, lambda found: found["num_running"] == 2)
        for _ in range(3):
            assert len(raw.texts(raw.ask(url, short).events())) == 1
        wait_for(url, is_idle)  # the engine has given all their tokens, and keeps nothing for them
        for one in (first, second):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
            events = raw.parse(raw.rest_of(one)).events()
            assert len(events) < 250, "it was held up, and what came meanwhile was joined"
            assert events[-1]["usage"]["completion_tokens"] == 250
            scores = [s for event in events for c in event["choices"] for s in c["logprobs"]["token_logprobs"]]
            assert len(scores) == 250


@pytest.mark.parametrize("manner", ["closes", "resets", "is full and closes", "sends ahead", "sends no HTTP ahead"])
@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_frees_its_blocks_long_before_its_last_token(url: str, stream: bool, manner: str) -> None:
    body = {"model": "tiny", "prompt": "leave", "max_tokens": CONTEXT - 10, "temperature": 0, "ignore_eos": True}
    before = stats(url)["num_generation_tokens"]
    with raw.connected(url, receive_buffer_bytes=2048 if "full" in manner else None) as connection:
        request = raw.post("/v1/completions", body | {"stream": stream, "n": 3})
        connection.sendall(request.replace(b"Connection: close\r\n", b""))
        wait_for(url, lambda found: found["num_running"] == 3 and found["num_generation_tokens"] > before + 50)
        if manner.startswith("sends"):
            # As one who keeps the connection; when the stats have come the server has seen these bytes too.
            connection.sendall(raw.get("/health") if manner == "sends ahead" else b"\0\r\n\r\n")
            stats(url)
        if manner == "resets":
            raw.reset(connection)
    left_s, left = time.monotonic(), stats(url)["num_generation_tokens"]
    wait_for(url, is_idle)
    assert time.monotonic() - left_s < GENEROUS_S / 4, "a second on a quiet machine"
    assert stats(url)["num_generation_tokens"] - left < 3 * CONTEXT / 4


def test_four_of_eight_streams_that_leave_change_no_token_of_the_other_four(url: str) -> None:
    """Token by token, log probabilities too: whoever leaves does so in the middle, when all eight share every step."""
    bodies = [
        {"model": "tiny", "prompt": f"{i} " * (5 + 9 * i), "max_tokens": 120, "ignore_eos": True, "stream": True}
        | {"logprobs": 2, "seed": i, "temperature": i % 2}
        for i in range(8)
    ]

    def told(data: bytes) -> tuple[Any, ...]:
        choices = [event["choices"][0] for event in raw.parse(data).events()]
        tokens = [token for c in choices for token in c["logprobs"]["tokens"]]
        scores = [score for c in choices for score in c["logprobs"]["token_logprobs"]]
        return raw.texts([{"choices": choices}]), choices[-1]["finish_reason"], tokens, scores

    def run(leavers: set[int]) -> list[tuple[Any, ...]]:
        with ExitStack() as stack:
            streams = [stack.enter_context(raw.connected(url)) for _ in bodies]
            for stream, body in zip(streams, bodies, strict=True):
                stream.sendall(raw.post("/v1/completions", body))
            wait_for(url, lambda found: found["num_running"] == len(bodies))
            for i in sorted(leavers):
                streams[i].recv(500)
                streams[i].close() if i % 4 else raw.reset(streams[i])
            return [told(raw.rest_of(s)) for i, s in enumerate(streams) if i not in leavers]

    undisturbed = run(set())
    for leavers in ({0, 2, 5, 7}, {1, 3, 4, 6}):
        for before, after in zip(
            (told for i, told in enumerate(undisturbed) if i not in leavers), run(leavers), strict=True
        ):
            assert after[:3] == before[:3]
            assert after[3] == pytest.approx(before[3], abs=1e-4)  # sums in another order
