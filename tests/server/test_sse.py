"""A client that leaves ends the work that was for it."""

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from moesaic.errors import EngineDeadError
from moesaic.server.replies import Reply, Usage
from moesaic.server.sse import PING, EventStream, while_connected


class Source:
    """Something to be left when its stream is over."""

    is_left = False

    async def __aenter__(self) -> "Source":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_left = True


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def played(
    replies: AsyncGenerator[Reply, None], source: Source, receive: Any = never, *, ping_interval_s: float = 15.0
) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    await EventStream(replies, source, ping_interval_s)({"type": "http"}, receive, send)
    return sent


async def two_replies() -> AsyncGenerator[Reply, None]:
    yield Usage.of(1, 2)
    yield Usage.of(1, 3)


def test_each_reply_is_one_event_and_done_ends_the_stream() -> None:
    source = Source()
    sent = asyncio.run(played(two_replies(), source))
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[0] == b'data: {"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}\n\n'
    assert bodies[2:] == [b"data: [DONE]\n\n", b""]
    assert not sent[-1]["more_body"]
    assert source.is_left


@pytest.mark.parametrize(
    ("error", "words"), [(EngineDeadError("it stopped"), b"it stopped"), (KeyError("secret"), b"internal error")]
)
def test_an_error_after_the_headers_is_one_event(error: Exception, words: bytes) -> None:
    async def replies() -> AsyncGenerator[Reply, None]:
        yield Usage.of(1, 2)
        raise error

    sent = asyncio.run(played(replies(), Source()))
    *_, last, done, _end = [message["body"] for message in sent[1:]]
    assert last.startswith(b'data: {"error":{"message":')
    assert words in last
    assert b"secret" not in last
    assert done == b"data: [DONE]\n\n"


def test_the_source_is_left_when_the_client_leaves_in_the_middle() -> None:
    async def endless() -> AsyncGenerator[Reply, None]:
        yield Usage.of(1, 2)
        await asyncio.Event().wait()

    async def leaves_later() -> Message:
        for _ in range(20):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    source = Source()
    sent = asyncio.run(played(endless(), source, leaves_later))
    assert len(sent) == 2
    assert source.is_left


def test_the_source_is_left_when_the_client_has_left_before_the_first_event() -> None:
    async def never_sent(message: Message) -> None:
        await never()

    source = Source()
    asyncio.run(EventStream(two_replies(), source, 15.0)({"type": "http"}, gone, never_sent))
    assert source.is_left


def test_work_is_cancelled_and_has_cleaned_up_when_the_client_has_left() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def body() -> None:
        with pytest.raises(ClientDisconnect):
            await while_connected(gone_later, work())

    async def gone_later() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    asyncio.run(body())
    assert cleaned == [True]


def test_work_that_is_done_gives_its_value_or_its_error() -> None:
    async def value() -> int:
        return 5

    async def failure() -> int:
        raise EngineDeadError("it stopped")

    assert asyncio.run(while_connected(never, value())) == 5
    with pytest.raises(EngineDeadError):
        asyncio.run(while_connected(never, failure()))


def test_silence_is_filled_with_comments_and_no_event_is_lost() -> None:
    async def slow() -> AsyncGenerator[Reply, None]:
        for i in range(3):
            await asyncio.sleep(0.05)
            yield Usage.of(1, i)

    sent = asyncio.run(played(slow(), Source(), ping_interval_s=0.01))
    bodies = [message["body"] for message in sent[1:]]
    events = [body for body in bodies if body != PING]
    assert [body[:6] for body in events] == [b"data: "] * 4 + [b""]
    assert bodies[0] == PING
    assert bodies[-1] == b""


def test_a_reader_who_lets_a_send_wait_gets_no_comment_in_between() -> None:
    async def one() -> AsyncGenerator[Reply, None]:
        yield Usage.of(1, 2)

    sent: list[bytes] = []

    async def full(message: Message) -> None:
        if message.get("body"):
            sent.append(message["body"])
            await asyncio.sleep(0.1)

    asyncio.run(EventStream(one(), Source(), 0.01)({"type": "http"}, never, full))
    assert sent[0].startswith(b"data: ")
    assert sent[-1].startswith(b"data: [DONE]")
    assert len(sent) == 2


def test_leaving_a_silent_stream_ends_its_source_and_its_comments() -> None:
    ended: list[bool] = []

    async def silent() -> AsyncGenerator[Reply, None]:
        try:
            await asyncio.sleep(60)
            yield Usage.of(1, 2)
        finally:
            ended.append(True)

    async def leaves_later() -> Message:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def leave() -> None:
        source, sent = Source(), []

        async def send(message: Message) -> None:
            sent.append(message)

        await EventStream(silent(), source, 0.01)({"type": "http"}, leaves_later, send)
        assert sent[1]["body"] == PING
        assert source.is_left
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(leave())
    assert ended == [True]
