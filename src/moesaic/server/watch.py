"""``GET /v1/steps``: what the engine's steps hold, as they come, for the page and for traces."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from moesaic.engine.client import EngineClient
from moesaic.errors import QueueFullError
from moesaic.server.replies import Reply

POLL_S = 0.1
"""How often the engine is asked while somebody watches; it answers between steps."""

MAX_WATCHERS = 8


class StepReply(Reply):
    """One committed step; times in seconds, ``start_s`` of the engine's own clock."""

    number: int
    start_s: float
    plan_s: float
    launch_s: float
    commit_s: float
    decode_rows: int
    chunks: list[tuple[int, int]]
    """The request, by its number in the order of arrival, and how many of its prompt tokens."""
    largest_itl_s: float | None
    """The largest gap between tokens of one request that the step ended; null if it ended none."""
    kv_blocks_used: int
    num_running: int
    num_waiting: int


class StepsReply(Reply):
    """One event: the steps since the event before, and the state after the last of them."""

    latest: int
    """The number of the last committed step."""
    num_lost: int
    """Steps since the event before that are not in ``steps``."""
    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    steps: list[StepReply]


class StepWatchers:
    """Those who watch one engine; each asks it for itself, and while there is none nobody does."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._num_watchers = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Take one of the places for watchers. Raises: ``QueueFullError`` if all are taken."""
        if self._num_watchers >= MAX_WATCHERS:
            raise QueueFullError(f"{self._num_watchers} clients watch the steps and no more may; try again later")
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    async def events(self) -> AsyncGenerator[StepsReply, None]:
        """Yield the state now, then whatever is new, while the engine takes requests."""
        last: StepsReply | None = None
        while self._client.error is None:
            reply = await self._ask(None if last is None else last.latest)
            if last is None or reply.steps or _state(reply) != _state(last):
                yield reply
            last = reply
            await asyncio.sleep(POLL_S)

    async def _ask(self, after: int | None) -> StepsReply:
        found = await self._client.steps(after)
        # An engine that was started again counts from 0.
        num_new = 0 if after is None else max(0, found["latest"] - after)
        return StepsReply(num_lost=num_new - len(found["steps"]), **found)


def _state(reply: StepsReply) -> tuple[int, ...]:
    return reply.latest, reply.num_running, reply.num_waiting, reply.kv_blocks_total, reply.kv_blocks_used
