"""Load with clients that vanish: what a server must have kept count of when it is over."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.config import EngineConfig
from moesaic.engine.core import EngineCore
from moesaic.request import SamplingParams, StepOutput
from moesaic.testing import raw

_PART_TIMEOUT_S = 120.0
"""Longest wait for the next bytes: a request that is stuck must end the run."""


class CountingCore(EngineCore):
    """A core that counts the terminal events of each request, in its stats."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: those of EngineCore
        super().__init__(*args, **kwargs)
        self._ends: Counter[str] = Counter()
        self._num_admitted = 0
        self._num_late = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        super().add_request(request_id, prompt_token_ids, sampling_params, priority=priority, timeout_s=timeout_s)
        self._num_admitted += 1

    def add_sibling(
        self,
        request_id: str,
        sibling_of: str,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        super().add_sibling(request_id, sibling_of, sampling_params, priority=priority, timeout_s=timeout_s)
        self._num_admitted += 1

    def step(self) -> list[StepOutput]:
        outputs = super().step()
        for output in outputs:
            self._num_late += output.request_id in self._ends
            self._ends[output.request_id] += output.finish_reason is not None
            if not self._ends[output.request_id]:
                del self._ends[output.request_id]
        return outputs

    def stats(self) -> dict[str, Any]:
        """Return the engine's stats with ``num_admitted``, ``num_ended`` and ``num_late_events``."""
        own = {"num_admitted": self._num_admitted, "num_ended": len(self._ends), "num_late_events": self._num_late}
        return super().stats() | own


def load_counting(path: Path, config: EngineConfig, progress: Callable[[str, float], None]) -> EngineCore:
    """Return a ``CountingCore`` over ``path``; a ``CoreFactory``."""
    return CountingCore.from_path(path, config, progress)


@dataclass(slots=True)
class SoakResult:
    """What the clients saw."""

    num_whole: int = 0
    """Streams that were read to their end and had all their tokens and one finish reason a choice."""
    num_vanished: int = 0
    num_tokens: int = 0
    """Of the whole ones."""
    num_most_at_once: int = 0
    faults: list[str] = field(default_factory=list)
    """Replies that were not whole."""


async def soak(url: str, *, num_clients: int, seconds: float, vanishing: float = 0.3, seed: int = 0) -> SoakResult:
    """Keep ``num_clients`` requests running for ``seconds``; of each request it is drawn whether its client vanishes.

    Begun requests are read to their end, so the call takes somewhat longer. Each client makes at least one request.
    """
    result, end_s = SoakResult(), time.monotonic() + seconds
    num_open = 0

    async def client(rng: random.Random) -> None:
        nonlocal num_open
        while True:
            num_open += 1
            result.num_most_at_once = max(result.num_most_at_once, num_open)
            try:
                await _request(url, rng, rng.random() < vanishing, result)
            except (OSError, AssertionError, KeyError, ValueError, TimeoutError) as error:
                result.faults.append(f"{type(error).__name__}: {error}"[:500])
            num_open -= 1
            if time.monotonic() >= end_s:
                return

    await asyncio.gather(*(client(random.Random(seed * num_clients + i)) for i in range(num_clients)))
    return result


async def _request(url: str, rng: random.Random, vanishes: bool, result: SoakResult) -> None:
    """Make one request and leave at a random point or check the whole reply."""
    path, body = _drawn(rng)
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(raw.post(path, body))
        if vanishes:
            await _read_some(reader, rng)
            result.num_vanished += 1
            return
        data = await asyncio.wait_for(reader.read(), _PART_TIMEOUT_S)
        _check(raw.parse(data), body)
        result.num_whole += 1
        result.num_tokens += body["max_tokens"] * body["n"]
    finally:
        if vanishes and rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


def _drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": rng.randint(1, 100), "n": rng.choice([1, 1, 1, 2])}
    body |= {"temperature": rng.choice([0, 1]), "ignore_eos": True, "stream": rng.random() < 0.8}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    prompt = "x" * rng.randint(1, 200)
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": prompt}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}


async def _read_some(reader: asyncio.StreamReader, rng: random.Random) -> None:
    """Read up to a random number of bytes, in at most a random time; before the first byte is one such point."""
    num_left, end_s = rng.choice([0, 1, 300, 3000]), rng.random()
    try:
        async with asyncio.timeout(end_s):
            while num_left > 0 and (data := await reader.read(num_left)):
                num_left -= len(data)
    except TimeoutError:
        return


def _check(reply: raw.RawReply, body: dict[str, Any]) -> None:
    assert reply.status == 200, reply
    parts = reply.events() if body["stream"] else [reply.json()]
    ends = [(c["index"], c["finish_reason"]) for part in parts for c in part["choices"] if c["finish_reason"]]
    assert sorted(ends) == [(i, "length") for i in range(body["n"])], ends
    assert parts[-1]["usage"]["completion_tokens"] == body["max_tokens"] * body["n"], parts[-1]
