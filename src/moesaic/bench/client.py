"""The client of every arm: streamed completions of any OpenAI-compatible server, each part with its time."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import httpx2

from moesaic.bench.events import ArmRun, RequestEvents
from moesaic.bench.load import Call
from moesaic.errors import MoesaicError

REQUEST_TIMEOUT_S = 600.0
"""Longest wait for the next part of a stream."""
_POLL_S = 0.1
"""How often a server of ours is asked for its KV blocks; the same for both arms."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a server takes: some refuse token ids as a prompt, some refuse fields that OpenAI's API lacks."""

    takes_ids: bool
    takes_extras: bool

    def body(self, model: str, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        """Return a greedy request (Any: JSON values)."""
        shown = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": model, "prompt": shown, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        if not self.takes_extras:
            return body
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {**body, "ignore_eos": True, "return_token_ids": True, "stream_options": usage}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server under load: ``url`` without ``/v1``."""

    url: str
    model: str
    pid: int | None = None
    """Of a server that was started here."""


async def find_dialect(target: Target, ids: tuple[int, ...] | None, text: str | None) -> Dialect:
    """Return the richest dialect that ``target`` answers one short request in.

    Raises: ``MoesaicError`` if it answers none.
    """
    refusals = []
    async with _client() as client:
        for prompt in (p for p in (ids, text) if p is not None):
            for takes_extras in (True, False):
                dialect = Dialect(takes_ids=prompt is ids, takes_extras=takes_extras)
                track = _Track()
                await _stream(client, target, dialect.body(target.model, prompt, 2), track, time.perf_counter(), None)
                if track.error is None and track.chunks:
                    return dialect
                refusals.append(track.error or "no tokens came")
    raise MoesaicError(f"{target.url} answers no completion of model {target.model!r}: {refusals[-1]}")


async def run_load(
    target: Target, dialect: Dialect, calls: SequenceOf[Call], prompts: SequenceOf[Prompt], *, pair: int, arm: str
) -> ArmRun:
    """Return what the client saw of ``calls``; ends when all of them have."""

    load_average = os.getloadavg()
    async with _client() as client:
        before = await _stats(client, target)
        run = _Run(client, target, dialect, time.perf_counter())
        poll = asyncio.create_task(_peak(client, target)) if before else None
        tracks = {call.request_id: _Track() for call in calls}
        decoders = [tracks[c.request_id] for c in calls if c.role == "decoder"]
        requests = await asyncio.gather(
            *(run.call(c, p, tracks[c.request_id], decoders) for c, p in zip(calls, prompts, strict=True))
        )
        duration_s = time.perf_counter() - run.started_s
        peak = await _stopped(poll)
        after = await _stats(client, target)
    return ArmRun(
        pair=pair,
        arm=arm,
        requests=tuple(requests),
        duration_s=duration_s,
        load_average=load_average,
        peak_kv_blocks=peak,
        num_kv_blocks=after.get("kv_blocks_total"),
        expert_bytes=_expert_bytes(after),
    )


@dataclass(slots=True)
class _Track:
    """A stream while it runs."""

    chunks: list[tuple[float, int]] = field(default_factory=list)
    num_tokens: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    error: str | None = None
    is_cancelled: bool = False
    is_over: bool = False

    def add(self, entry: dict[str, Any], now_s: float) -> None:
        """Take one part: its tokens are its ids, else the growth of the usage, else one if it has text."""
        choice = (entry.get("choices") or [{}])[0]
        usage = entry.get("usage") or {}
        text, ids = choice.get("text") or "", choice.get("token_ids")
        if ids is not None:
            self.token_ids = [*(self.token_ids or []), *ids]
            new = len(ids)
        elif choice and "completion_tokens" in usage:
            new = usage["completion_tokens"] - self.num_tokens
        else:
            new = int(bool(text))
        if new > 0:
            self.chunks.append((now_s, new))
            self.num_tokens += new
        self.text += text
        self.num_prompt_tokens = usage.get("prompt_tokens", self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    client: httpx2.AsyncClient
    target: Target
    dialect: Dialect
    started_s: float

    async def call(self, call: Call, prompt: Prompt, track: _Track, decoders: list[_Track]) -> RequestEvents:
        await self._arrive(call, decoders)
        arrival_s = time.perf_counter() - self.started_s
        body = self.dialect.body(self.target.model, prompt, call.max_tokens)
        try:
            await _stream(self.client, self.target, body, track, self.started_s, call.cancel_after_tokens)
        finally:
            track.is_over = True
        return RequestEvents(
            request_id=call.request_id,
            role=call.role,
            arrival_s=arrival_s,
            chunks=tuple(track.chunks),
            text=track.text,
            token_ids=None if track.token_ids is None else tuple(track.token_ids),
            num_prompt_tokens=call.num_prompt_tokens if track.num_prompt_tokens is None else track.num_prompt_tokens,
            is_cancelled=track.is_cancelled,
            error=track.error,
        )

    async def _arrive(self, call: Call, decoders: list[_Track]) -> None:
        if call.lead_in_tokens:
            while not all(d.is_over or d.num_tokens >= call.lead_in_tokens for d in decoders):
                await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(max(0.0, self.started_s + call.arrival_s - time.perf_counter()))


async def _stream(
    client: httpx2.AsyncClient,
    target: Target,
    body: dict[str, Any],
    track: _Track,
    started_s: float,
    cancel_after_tokens: int | None,
) -> None:
    """Fill ``track``; a failure is its ``error``. A stream may end without ``[DONE]``."""
    try:
        async with client.stream("POST", f"{target.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                track.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
                return
            async for entry in _entries(response):
                if entry.get("error"):
                    track.error = json.dumps(entry["error"])[:300]
                    return
                track.add(entry, time.perf_counter() - started_s)
                if cancel_after_tokens is not None and track.num_tokens >= cancel_after_tokens:
                    track.is_cancelled = True
                    return
    except (httpx2.HTTPError, ValueError) as error:
        track.error = f"{type(error).__name__}: {error}"
    if track.error is None and not track.chunks:
        track.error = "the stream ended without a token"


async def _entries(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data == "[DONE]":
            return
        if line.startswith("data:") and data:
            yield json.loads(data)


def _client() -> httpx2.AsyncClient:
    """No proxies of the environment: they would be measured too. No limit on connections: the server queues."""
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(timeout=httpx2.Timeout(REQUEST_TIMEOUT_S), limits=limits, trust_env=False)


async def _stats(client: httpx2.AsyncClient, target: Target) -> dict[str, Any]:
    """Return the stats of a server of ours; of another, nothing."""
    try:
        response = await client.get(f"{target.url}/v1/stats")
        found = response.json() if response.status_code == 200 else {}
    except (httpx2.HTTPError, ValueError):
        return {}
    return found if isinstance(found, dict) and "kv_blocks_total" in found else {}


async def _peak(client: httpx2.AsyncClient, target: Target) -> int:
    """Return the most KV blocks that were held at a look, once cancelled."""
    peak = 0
    try:
        while True:
            stats = await _stats(client, target)
            if stats:
                peak = max(peak, stats["kv_blocks_total"] - stats["kv_blocks_free"])
            await asyncio.sleep(_POLL_S)
    except asyncio.CancelledError:
        return peak


async def _stopped(poll: "asyncio.Task[int] | None") -> int | None:
    if poll is None:
        return None
    poll.cancel()
    return await poll


def _expert_bytes(stats: dict[str, Any]) -> dict[str, int]:
    experts = stats.get("features", {}).get("experts", {})
    return {name: value for name, value in experts.items() if "bytes" in name and isinstance(value, int)}
